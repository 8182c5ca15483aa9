"""What sampling ahead is worth where engine and trainer each have their own place: throughput against S = 0.

`sleeping`: an engine and a trainer that sleep, each for as long as the other, so that nothing competes for processors;
the loop, windows, admission, journal, turns and records are a run's own. `real`: runs of `cluster: ray` with one
trainer rank and one engine, each with one thread, of sizes with which sampling a window takes about as long as training
it. There is beside them a run on the same two threads in which engine and trainer take turns (`together`).

What is short of twice the throughput has to be in the figures that a run gives: `bubble/trainer`, `bubble/engine`, and
the parts of a step. With S > 0 tokens are corrected, for which the trainer looks at each batch once more (`scoring`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import measure

SIZES = {
    "sleeping": {"groups": 16, "size": 4, "tokens": 64, "prompt": 16, "width": 16, "layers": 1, "epochs": 1},
    "real": {"groups": 16, "size": 8, "tokens": 128, "prompt": 32, "width": 128, "layers": 2, "epochs": 1},
}
# Ray makes its workers nice, and the driver would go first.
VARIABLES = {"RAY_worker_niceness": "0"}
SMOKE = {"groups": 2, "size": 2, "tokens": 8, "prompt": 8, "width": 16, "layers": 1, "epochs": 1}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.set_defaults(threads=1)
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured, after four that are not")
    parser.add_argument("--seconds", type=float, default=0.5, help="that sampling and training take, each, asleep")
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2], help="of rollout.max_staleness")
    parser.add_argument("--kinds", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--apart", action="store_true", help="without `together`")
    for name in ("groups", "size", "tokens", "prompt", "width", "layers", "epochs"):
        parser.add_argument(f"--{name}", type=int, help="of `real`")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.steps, options.seconds, options.staleness = 1, 2, 0.05, [0, 1]
    given = {name: getattr(options, name) for name in SMOKE if getattr(options, name) is not None}
    sizes = {kind: SMOKE if options.smoke else of | (given if kind == "real" else {}) for kind, of in SIZES.items()}
    cases = {name: job for kind in options.kinds for name, job in jobs(kind, sizes[kind], options).items()}
    script = Path(__file__).with_name("overlap_side.py")

    def side(name: str, job: dict[str, Any]) -> dict[str, Any]:
        told = measure.fresh_process(
            script, [json.dumps(job)], threads=job["threads"], python_path=[script.parent], variables=VARIABLES,
            timeout=900,
        )  # fmt: skip
        print(f"{name}: {told['tokens_per_second']:,.0f} tokens a second", file=sys.stderr, flush=True)
        return told

    found = measure.interleaved({name: partial(side, name, job) for name, job in cases.items()}, options.repeats)
    numbers = {
        "sizes": {kind: sizes[kind] for kind in options.kinds} | {"steps": options.steps, "seconds": options.seconds},
        "cases": {name: summary(repeats) for name, repeats in found.items()},
        "against S = 0": against(found),
    }
    alone = options.kinds[0] if len(options.kinds) == 1 else None
    measure.write(f"overlap_{alone}" if alone else "overlap", numbers, options, script="overlap")
    return numbers


def jobs(kind: str, sizes: dict[str, int], options: Any) -> dict[str, dict[str, Any]]:
    """The cases of a kind, by name."""
    shared = {
        "kind": kind, "sizes": sizes, "seconds": options.seconds, "steps": options.steps,
        "skipped": 1 if options.smoke else 4, "threads": options.threads, "placement": "separate",
    }  # fmt: skip
    found = {f"{kind}, S={bound}": {**shared, "staleness": bound} for bound in options.staleness}
    if kind == "real" and not options.apart:
        together = {"staleness": 0, "placement": "colocated", "threads": 2 * options.threads}
        found[f"{kind}, together"] = {**shared, **together}
    return found


def summary(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the throughput of each repeat."""
    first = repeats[0]
    found = {
        name: round(measure.median([repeat[name] for repeat in repeats]), 4) for name in first if name != "seconds"
    }
    seconds = {
        part: round(measure.median([repeat["seconds"][part] for repeat in repeats]), 4) for part in first["seconds"]
    }
    return {**found, "seconds": seconds, "repeats": [round(repeat["tokens_per_second"], 1) for repeat in repeats]}


def against(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each case's throughput as a multiple of S = 0 of its kind: the median over repeats, and each repeat."""
    result = {}
    for name, repeats in found.items():
        base = found.get(f"{name.partition(',')[0]}, S=0")
        if base is None or base is repeats:
            continue
        ratios = [one["tokens_per_second"] / of["tokens_per_second"] for one, of in zip(repeats, base, strict=True)]
        result[name] = {"median": round(measure.median(ratios), 3), "repeats": [round(one, 3) for one in ratios]}
    return result


if __name__ == "__main__":
    main()
