"""Starts a Ray cluster that counts as many CPUs as told, prints its address, and ends it with standard input."""

from __future__ import annotations

import sys

from strop.cluster.session import import_ray, open_session


def main(cpus: int) -> None:
    session = open_session(None, cpus=cpus, store_mb=100)
    print(import_ray().get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    session.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
