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
import time
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
            asked["progress"] = str(Path(folder) / "progress.json")

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
    random_models.write_model(folder / "model", job["shape"], dtype=job["dtype"], context=context)
    vocabulary = random_models.words(random_models.SHAPES[job["shape"]].vocabulary - random_models.FIRST)
    count = job["prompts"] * (job["steps"] + 2)
    rows = [
        json.dumps({"prompt": random_models.text_of(ids, vocabulary)})
        for ids in random_models.prompts(job["shape"], [job["prompt_tokens"]] * count)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return {"model": str(folder / "model"), "data": str(folder / "prompts.jsonl")}


def one_place(asked: dict[str, Any]) -> dict[str, Any]:
    """The metrics of each step of a run."""
    measure.use_threads(asked["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config, progress = recipe(asked, folder), Path(asked["progress"])
        return {"steps": asyncio.run(steps_of(config, asked["steps"] + 2, progress)), **card.about()}


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


async def steps_of(config: Any, count: int, progress: Path) -> list[dict[str, float]]:
    """What is looked at of each step, and its seconds."""
    import strop

    found: list[dict[str, float]] = []
    async with strop.open_run(config, fresh=True) as run:
        await run.begin()
        for _ in range(count):
            started = time.perf_counter()
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step += 1
            await run.publish()
            await run.look(groups)
            metrics = run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
            seconds = time.perf_counter() - started
            kept = (*SAME, *TIMES, "tokens/sampled", "publish/probe_gap", "publish/bytes", "staleness/max")
            found.append({**{key: metrics[key] for key in kept if key in metrics}, "seconds": seconds})
            # What is known so far, should a later step take too long.
            progress.write_text(json.dumps({"steps": found}))
    return found


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
