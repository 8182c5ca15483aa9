"""Trains the recipes that standard input names, one in a line, and says in which folder: so torch is imported once.

Line: {"recipe": file, "overrides": ["key=value", ...], "floor": nats}; answer: the run's folder, or what was raised.
floor: what the probe takes for rounding in float32 without having measured it.
"""

from __future__ import annotations

import json
import sys
import traceback

import strop
from strop.config.loading import load_config
from strop.errors import StropError
from strop.loops import assembly


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        assembly.PROBE_FLOOR["float32"] = asked["floor"]
        try:
            summary = strop.train(load_config(asked["recipe"], overrides=asked["overrides"]))
            answer = {"folder": str(summary.folder)}
        except StropError as error:
            answer = {"error": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
