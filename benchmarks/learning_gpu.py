"""What a tiny model learns with each engine on one GPU, from the same start: accuracy on held-out sums.

The task is that of the quickstart, whose demonstrations are careless and whose reward is right. One fine-tuning makes
the model that all runs begin with; then each engine trains it with each seed. The engines draw other samples, so that
runs are alike in what they come to and not step by step. Runs of an engine are one after another in a process of its
own. Heads are of 64 numbers: vLLM needs 32 or more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import card
import measure

NAME = "learning_gpu"
ENGINES = ("local", "vllm")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=1)
    parser.set_defaults(threads=8)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eager", action="store_true", help="engines neither compile nor, with vLLM, capture graphs")
    parser.add_argument("--memory", type=float, default=0.1, help="share of the GPU's memory that vLLM gets")
    parser.add_argument("--limit", type=int, default=600, help="seconds for each engine, its start included")
    parser.add_argument("--add", action="store_true", help="keep the engines that the file of results already has")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        measure.tell(one_side(**json.loads(options.side)))
        return {}
    job = make_job(options)
    numbers: dict[str, Any] = {"job": job, "sides": card.earlier(options, NAME, job)}
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress.json"
        start = fresh({"what": "start", "job": job, "folder": folder, "progress": str(progress)}, options)["model"]
        for engine in options.only:
            asked = {"what": engine, "job": job, "folder": folder, "progress": str(progress), "start": start}
            found = card.attempted(lambda asked=asked: fresh(asked, options), progress)  # type: ignore[misc]
            numbers["sides"][engine] = {**found, **summary(found.get("runs", []))}
            # Each engine at once: whoever ends this early keeps what there is.
            measure.write(NAME, numbers, options)
            shown = ("accuracy_before", "accuracy_after", "mismatch_mean", "mismatch_max")
            side = numbers["sides"][engine]
            after = [run["accuracy"][-1] for run in side.get("runs", [])]
            print(engine, after, {key: side[key] for key in shown if key in side}, _why(side), flush=True)
    return numbers


def _why(side: dict[str, Any]) -> str:
    """The last line of why a side failed; the whole of it is with the side."""
    lines: list[str] = str(side.get("failed", "")).strip().splitlines()
    return lines[-1] if lines else ""


def make_job(options: argparse.Namespace) -> dict[str, Any]:
    """What all engines do; a smoke run is a CPU's."""
    job: dict[str, Any] = {"device": "cuda", "steps": options.steps, "warmup_steps": 1000, "held_out": 200}
    job |= {"groups_per_step": 64, "group_size": 8, "seeds": options.seeds}
    if options.smoke:
        job |= {"device": "cpu", "steps": 2, "warmup_steps": 2, "held_out": 8, "groups_per_step": 2, "group_size": 2}
    return job | {"threads": options.threads, "memory": options.memory, "eager": options.eager}


def fresh(asked: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own tells."""
    side, variables = ["--side", json.dumps(asked)], {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return measure.fresh_process(
        Path(__file__), side, threads=options.threads, variables=variables, timeout=options.limit
    )


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds."""
    if not runs:
        return {}
    return {
        "accuracy_before": statistics.fmean(run["accuracy"][0] for run in runs),
        "accuracy_after": statistics.fmean(run["accuracy"][-1] for run in runs),
        "mismatch_mean": statistics.fmean(run["mismatch_mean"] for run in runs),
        "mismatch_max": max(run["mismatch_max"] for run in runs),
    }


def recipe(job: dict[str, Any]) -> dict[str, Any]:
    """What all runs have in common."""

    def problems(count: int, **others: Any) -> dict[str, Any]:
        return {"path": "strop.data.arithmetic:problems", "arguments": {"count": count, **others}}

    return {
        "data": {"train": problems(6000), "eval": problems(job["held_out"], split="eval")},
        "rewards": {"verifiers": [{"kind": "exact"}]},
        "rollout": {
            "groups_per_step": job["groups_per_step"],
            "group_size": job["group_size"],
            "max_new_tokens": 5,
        },
        "training": {"optimizer": {"learning_rate": 3e-4, "beta2": 0.99, "warmup_steps": 5}},
        "checkpoint": {"every": 1000},
        "tracking": {"display": "off", "tensorboard": False},
        "hardware": {"threads": job["threads"], "device": job["device"]},
        "run": {},
    }


def one_side(what: str, job: dict[str, Any], folder: str, progress: str, start: str | None = None) -> dict[str, Any]:
    """The folder of the model that all begin with, or the runs of an engine, in a process of their own."""
    measure.use_threads(job["threads"])
    os.chdir(folder)
    if what == "start":
        return {"model": str(warmed_up(job))}
    found: dict[str, Any] = {"runs": []}
    for seed in job["seeds"]:
        found["runs"].append(trained(what, str(start), seed, job))
        # What is known so far, should a later run take too long.
        Path(progress).write_text(json.dumps({**found, **card.about()}))
    return {**found, **card.about()}


def warmed_up(job: dict[str, Any]) -> Path:
    """Fine-tune a new model on careless sums, six in ten one too high."""
    import strop
    from strop.config.loading import load_config

    data = recipe(job)
    data["data"] = {
        "train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 8000, "flawed": 0.6}},
    }
    data["supervised"] = {"method": "sft", "batch_size": 128}
    data["training"]["optimizer"] |= {"learning_rate": 4e-3, "schedule": "cosine", "warmup_steps": 100}
    data["run"] |= {"steps": job["warmup_steps"], "name": "start"}
    data["model"] = {
        "create": {"characters": "0123456789+=", "hidden_size": 128, "layers": 2, "heads": 2, "context": 32}
    }
    del data["rewards"], data["rollout"]
    return strop.train(load_config(None, data=data), fresh=True).model.resolve()


def trained(engine: str, start: str, seed: int, job: dict[str, Any]) -> dict[str, Any]:
    """One run: accuracy at each evaluation, reward of each step, and distance of the log-probabilities."""
    import strop
    from strop.config.loading import load_config

    data = recipe(job)
    settings: dict[str, Any] = {"kind": engine}
    if job["eager"]:
        settings["eager"] = True
    if engine == "vllm" and job["device"] != "cpu":
        settings |= {"memory": job["memory"], "sleep": "never"}
    data["rollout"]["engine"] = settings
    data |= {"model": {"path": start}, "evaluation": {"every": max(1, job["steps"] // 2)}}
    data["run"] |= {"seed": seed, "steps": job["steps"], "name": f"{engine}-{seed}"}
    began = time.perf_counter()
    run = strop.train(load_config(None, data=data), fresh=True).folder
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    return {
        "seed": seed,
        "seconds": seconds,
        "accuracy": [line["metrics"]["eval/accuracy"] for line in lines if line["kind"] == "eval"],
        "reward": [step["reward/mean"] for step in steps],
        "mismatch_mean": statistics.fmean(step["mismatch/mean"] for step in steps),
        "mismatch_max": max(step["mismatch/abs_max"] for step in steps),
        "probe_gap_max": max(step["publish/probe_gap"] for step in steps),
    }


if __name__ == "__main__":
    main()
