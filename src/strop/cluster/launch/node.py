"""What a job's script asks Python for: `python3 -P -m strop.cluster.launch.node address`, and `… wait`.

The script could ask Ray's own commands, but these have no answer to "have all nodes joined, and with their GPUs?".
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from strop.errors import MissingExtra

Nodes = Callable[[], list[dict[str, Any]]]
"""Gives the nodes as `ray.nodes()` has them; raises ConnectionError while Ray is not up."""


def addresses() -> str:
    """This node's IP address, a free port for Ray's head, a secret, and a port for Ray's clients if it can serve them.

    Free ports let several jobs share a machine. Ray opens its port for clients only where grpc is installed, refuses
    the option where it is not, and ends when the port is taken.
    """
    import ray.util

    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
    ip = ray.util.get_node_ip_address()
    clients = ports[1:] if find_spec("grpc") is not None else []
    return " ".join(map(str, (ip, ports[0], secrets.token_hex(32), *clients)))


def wait_for_nodes(
    nodes: Nodes, count: int, gpus: int, *, seconds: float, processes: Sequence[int] = (), every: float = 1.0
) -> str:
    """Wait until so many nodes with so many GPUs are in a Ray cluster.

    Args:
        processes: ids of the processes that start the nodes; if one of them ends, waiting is over.

    Returns:
        Nothing if they have all joined, else what is missing.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            alive = [node for node in nodes() if node["Alive"]]
        except ConnectionError:
            alive = []
        have = int(sum(node["Resources"].get("GPU", 0) for node in alive))
        if len(alive) >= count and have >= gpus:
            return ""
        who = ", ".join(sorted(str(node["NodeManagerHostname"]) for node in alive)) or "none"
        found = f"{len(alive)} of {count} nodes and {have} of {gpus} GPUs are in the Ray cluster ({who})"
        if gone := [process for process in processes if not _runs(process)]:
            return f"process {gone[0]}, which started nodes, has ended; {found}"
        if time.monotonic() >= end:
            return f"{found} after {seconds:g} seconds"
        time.sleep(every)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _nodes_at(address: str) -> Nodes:
    def nodes() -> list[dict[str, Any]]:
        import ray

        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        found: list[dict[str, Any]] = ray.nodes()
        return found

    return nodes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="strop.cluster.launch.node")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("address")
    waiting = commands.add_parser("wait")
    waiting.add_argument("--address", required=True)
    waiting.add_argument("--nodes", type=int, required=True)
    waiting.add_argument("--gpus", type=int, default=0)
    waiting.add_argument("--seconds", type=float, required=True)
    waiting.add_argument("--process", type=int, action="append", default=[])
    given = parser.parse_args(arguments)
    if find_spec("ray") is None:
        print(MissingExtra("ray", extra="ray", needed_for="a run on several nodes").block(), file=sys.stderr)
        return 2
    if given.command == "address":
        print(addresses())
        return 0
    missing = wait_for_nodes(
        _nodes_at(given.address), given.nodes, given.gpus, seconds=given.seconds, processes=given.process
    )
    if missing:
        print(f"strop launch: {missing}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
