"""What the loop itself costs: steps of a real run whose engine and trainer answer at once.

32 groups of 8 completions of 512 tokens a step; in one process (`local`), and with engine and trainer in a Ray actor
(`ray`), through the requests, results and batches that always travel. With the file of whole episodes that a run
writes at each step by default, and without. Everything but engine, trainer and the proof of delivery is the run's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

KINDS = ("local", "ray")
OTHER = "other checkout"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--groups", type=int, default=32, help="groups of a step")
    parser.add_argument("--size", type=int, default=8, help="completions of a group")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured, after three that are not")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of cluster.kind")
    parser.add_argument("--against", type=Path, help="another checkout, whose loop is measured in turn with this one")
    parser.add_argument("--profile", help="file for cProfile's numbers of a single case; slows everything down")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.groups, options.size, options.tokens, options.steps = 1, 2, 2, 16, 2
    here = Path(__file__).parents[1]

    def side(kind: str, every: int, checkout: Path = here) -> dict[str, list[float]]:
        job = {
            "kind": kind,
            "episodes_every": every,
            "groups": options.groups,
            "size": options.size,
            "tokens": options.tokens,
            "steps": options.steps,
            "skipped": 1 if options.smoke else 3,
            "threads": options.threads,
            "profile": options.profile and str(Path(options.profile).absolute()),
        }
        script = checkout.absolute() / "benchmarks" / "driver_overhead_side.py"
        paths = [script.parent, checkout.absolute() / "src"]
        return measure.fresh_process(script, [json.dumps(job)], threads=options.threads, python_path=paths)

    files = {"with episodes": 1, "without episodes": 0}
    cases = {f"{kind}, {name}": (kind, every) for kind in options.kinds for name, every in files.items()}
    sides: dict[str, Any] = {}
    for name, case in cases.items():
        sides[name] = lambda case=case: side(*case)
        if options.against is not None:
            sides[f"{name}, {OTHER}"] = lambda case=case: side(*case, options.against)
    found = measure.interleaved(sides, options.repeats)
    numbers: dict[str, Any] = {
        "sizes": {name: getattr(options, name) for name in ("groups", "size", "tokens", "steps")},
        "cases": {name: summary(repeats) for name, repeats in found.items()},
    }
    if options.against is not None:
        numbers["ratios"] = {name: ratios(found[name], found[f"{name}, {OTHER}"]) for name in cases}
    measure.write("driver_overhead", numbers, options)
    return numbers


def summary(repeats: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Milliseconds of a step and of its parts: the median over all steps, the least, and the whole ones of each repeat.

    On a machine that others use too, the least is nearest to what the loop costs, and the time of its own cores
    ("cpu of ...") is disturbed less than that of the clock.
    """
    return {
        "milliseconds": {
            part: round(1000 * measure.median([one for repeat in repeats for one in repeat[part]]), 2)
            for part in repeats[0]
        },
        "least": {part: round(1000 * min(one for repeat in repeats for one in repeat[part]), 2) for part in repeats[0]},
        "whole": [[round(1000 * one, 2) for one in repeat["whole"]] for repeat in repeats],
    }


def ratios(ours: Sequence[dict[str, list[float]]], theirs: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """This checkout's whole steps by the other's: of the least, of what nine in ten steps take longer than, and of the
    medians. What else the machine does moves the last most."""
    both = [sorted(one for repeat in repeats for one in repeat["whole"]) for repeats in (ours, theirs)]
    places = {"least": 0, "tenth": len(both[0]) // 10, "median": len(both[0]) // 2}
    return {name: round(both[0][at] / both[1][at], 3) for name, at in places.items()}


if __name__ == "__main__":
    main()
