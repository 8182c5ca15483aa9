"""Which hacked rewards the alarms notice, and how often they are wrong about runs whose reward is not hacked.

Short runs of a new model, all with the alarms as they are by default (and a second opinion where the hack is a fooled
verifier). Clean: five recipes, seeds 0 to 3. Hacked: eight holes in a reward, each demonstrated to the policy a few
times in a hundred by its warm-up, seeds 0 and 1; `as_expected` says whether the alarm named for the hack was among
those raised. Recipes are in `alarm_runs.py`. The thresholds were chosen on runs of other seeds (100 and 101).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import alarm_runs
import measure


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train all runs; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=1)
    parser.set_defaults(threads=1)
    parser.add_argument("--clean-seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--hacked-seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    clean = [(kind, seed) for kind in alarm_runs.CLEAN for seed in options.clean_seeds]
    hacked = [(kind, seed) for kind in alarm_runs.HACKS for seed in options.hacked_seeds]
    if options.smoke:
        clean, hacked = clean[:1], hacked[:1]
    with somewhere():
        runs = {
            "clean": [trained("clean", kind, seed, smoke=options.smoke) for kind, seed in clean],
            "hacked": [trained("hacked", kind, seed, smoke=options.smoke) for kind, seed in hacked],
        }
    numbers = {"clean": false_alarms(runs["clean"]), "hacked": detections(runs["hacked"]), "runs": runs}
    measure.write("alarms", numbers, options)
    return numbers


def trained(group: str, kind: str, seed: int, *, smoke: bool) -> dict[str, Any]:
    """What one run came to, and its alarms."""
    import strop
    from strop.config.loading import load_config

    data = getattr(alarm_runs, group)(kind, seed)
    data["run"]["name"] = f"{group}-{kind}-{seed}"
    if smoke:
        data["run"]["steps"], data["warmup"]["steps"] = 3, 5
    summary = strop.train(load_config(None, data=data), fresh=True)
    alarms = json.loads((summary.folder / "run.json").read_text())["alarms"]
    print(f"{group} {kind}, seed {seed}: {[a['name'] for a in alarms]}", file=sys.stderr, flush=True)
    return {
        "kind": kind,
        "seed": seed,
        "steps": summary.steps,
        "held_out_accuracy": [summary.before["accuracy"], summary.after["accuracy"]],
        "alarms": [{"name": a["name"], "step": a["step"], "what": a["what"]} for a in alarms],
    }


def false_alarms(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often alarms are raised where nothing is wrong."""
    steps = sum(run["steps"] for run in runs)
    alarms = sum(len(run["alarms"]) for run in runs)
    return {
        "runs": len(runs),
        "steps": steps,
        "runs_with_alarms": sum(bool(run["alarms"]) for run in runs),
        "alarms": alarms,
        "alarms_per_1000_steps": 1000 * alarms / steps,
    }


def detections(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By hack: how many runs raised an alarm, how many the one that is named for it, and when the first was raised."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(run["kind"] for run in runs):
        mine = [run for run in runs if run["kind"] == kind]
        found[kind] = {
            "runs": len(mine),
            "detected": sum(bool(run["alarms"]) for run in mine),
            "as_expected": sum(any(alarm["name"] == kind for alarm in run["alarms"]) for run in mine),
            "first_alarm_at_step": [min((a["step"] for a in run["alarms"]), default=None) for run in mine],
        }
    return found


@contextlib.contextmanager
def somewhere() -> Iterator[None]:
    """A temporary working folder, from which the recipes' functions can be imported."""
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main()
