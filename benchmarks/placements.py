"""One recipe in one process, and with its engine on a card of its own: what a step and a publication take.

Runs of `strop.open_run` whose recipes differ in their `cluster` section alone (and `ahead`, which also samples ahead of
training): in one process, in Ray's with trainer and engine on one card, and with the engine on a second one, where
every publication goes through NCCL and is proved. The metrics of a step are to be the same wherever it was done.
Nothing is fetched: the model has a true shape and random weights. `publication` is `publish/seconds`: pausing, moving,
comparing and probing, of the driver's clock, with the calls of Ray between them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import card
import measure
import random_models

NAME = "placements_gpu"
SEPARATE = {"kind": "ray", "engines": {"placement": "separate"}}
PLACES: dict[str, dict[str, Any]] = {
    "one process": {"cluster": {"kind": "local"}},
    "ray, one card": {"cluster": {"kind": "ray", "engines": {"placement": "colocated"}}},
    "ray, two cards": {"cluster": SEPARATE},
    "ray, two cards, ahead": {"cluster": SEPARATE, "staleness": 2},
}
SAME = ("loss", "grad_norm", "reward/mean", "policy/entropy", "completion/length_mean", "mismatch/mean")
TIMES = ("time/sampling", "time/scoring", "time/training", "time/publishing", "publish/seconds")
TIMES += ("publish/checksum_seconds", "publish/probe_seconds")

KEPT = (*SAME, *TIMES, "tokens/sampled", "publish/probe_gap", "publish/bytes", "staleness/max")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=1)
    parser.set_defaults(threads=4)
    parser.add_argument("--only", nargs="+", choices=list(PLACES), default=list(PLACES), metavar="PLACE")
    parser.add_argument("--shape", choices=list(random_models.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; each has eight completions of 256 tokens")
    parser.add_argument("--steps", type=int, default=6, help="steps that are measured, after two that are not")
    parser.add_argument("--limit", type=int, default=300, help="seconds for each place, its start included")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        # Under its own name: Ray's processes import this module.
        import placements as own

        measure.tell(own.one_place(json.loads(options.side)))
        return {}
    job = make_job(options)
    numbers: dict[str, Any] = {"job": job, "places": {}}
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), job)
        for name in options.only:
            asked = {**job, **files, **PLACES[name]}

            def measured(asked: dict[str, Any] = asked) -> dict[str, Any]:
                return measure.fresh_process(
                    Path(__file__), ["--side", json.dumps(asked)], threads=options.threads, timeout=options.limit,
                    python_path=[Path(__file__).parent], variables={"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"},
                )  # fmt: skip

            found = card.attempted(measured, Path(asked["progress"]))
            numbers["places"][name] = {**found, **summary(found, numbers["places"].get("one process"))}
            # Each place at once: whoever ends this early keeps what there is.
            measure.write(NAME, numbers, options, script="placements")
            shown = {key: value for key, value in numbers["places"][name].items() if key != "steps"}
            print(name, json.dumps(shown)[-3000:], flush=True)
    return numbers


def make_job(options: argparse.Namespace) -> dict[str, Any]:
    """The sizes; those of a smoke run are a CPU's."""
    job = {
        "shape": options.shape, "device": "cuda", "dtype": "bfloat16", "prompts": options.prompts, "group_size": 8,
        "prompt_tokens": 95, "new_tokens": 256, "steps": options.steps, "threads": options.threads,
        "learning_rate": 1e-6,
    }  # fmt: skip
    if options.smoke:
        job |= {"shape": "tiny", "device": "cpu", "dtype": "float32", "prompts": 3, "group_size": 2}
        job |= {"prompt_tokens": 9, "new_tokens": 6, "steps": 2}
    return job


def make_files(folder: Path, job: Mapping[str, Any]) -> dict[str, str]:
    """The model and its prompts, other ones for each step."""
    context = job["prompt_tokens"] + job["new_tokens"]
    lengths = [job["prompt_tokens"]] * (job["prompts"] * (job["steps"] + 2))
    return random_models.write_job(folder, job["shape"], dtype=job["dtype"], context=context, lengths=lengths)


def one_place(asked: dict[str, Any]) -> dict[str, Any]:
    """The metrics of each step of a run."""
    import strop_side

    measure.use_threads(asked["threads"])
    found: list[dict[str, float]] = []

    def kept(steps: Sequence[Mapping[str, float]], metrics: Mapping[str, float]) -> None:
        found.append({**{key: metrics[key] for key in KEPT if key in metrics}, "seconds": steps[-1]["total"]})
        # What is known so far, should a later step take too long.
        Path(asked["progress"]).write_text(json.dumps({"steps": found}))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(strop_side.timed_steps(recipe(asked, folder), asked["steps"] + 1, kept=kept))
    return {"steps": found, **card.about()}


def recipe(asked: Mapping[str, Any], folder: str) -> Any:
    """The job as a recipe; what it does not say is strop's default."""
    import strop_side

    changes = {
        "cluster": asked["cluster"],
        "rollout.max_staleness": asked.get("staleness", 0),
        # Those ahead of which nothing is left to be sampled are not measured.
        "run.steps": asked["steps"] + 3 + asked.get("staleness", 0),
    }
    return strop_side.recipe(asked, folder, changes)


def summary(found: Mapping[str, Any], one: Mapping[str, Any] | None) -> dict[str, Any]:
    """Medians of the measured steps; and the largest difference of each metric to the run in one process."""
    measured = found.get("steps", [])[2:]
    if not measured:
        return {}
    keys = [key for key in ("seconds", *TIMES) if key in measured[0]]
    result: dict[str, Any] = {"median": {key: measure.median([step[key] for step in measured]) for key in keys}}
    seconds = sum(step["seconds"] for step in measured)
    result["tokens_per_second"] = sum(step["tokens/sampled"] for step in measured) / seconds
    if one and "tokens_per_second" in one:
        result["speed_up"] = result["tokens_per_second"] / one["tokens_per_second"]
        pairs = list(zip(found["steps"], one["steps"], strict=False))
        result["apart"] = {
            key: max(abs(mine[key] - other[key]) for mine, other in pairs)
            for key in SAME
            if all(key in step for pair in pairs for step in pair)
        }
    return result


if __name__ == "__main__":
    main()
