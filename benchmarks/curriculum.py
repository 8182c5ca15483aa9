"""What a curriculum by pass rate is good for, beside dynamic sampling, on prompts of which most teach nothing.

A tiny model is shown copies of a number (`37=37`), and sums that have a slip in six of ten. Then it is trained on a mix
in which half of the prompts are copies, which it can do, a quarter are sums with an answer that no completion can be,
and a quarter are sums that can be learned. Four ways, all from the same weights: as it is, with `data.curriculum`, with
dynamic sampling (`algorithm.without_spread: resample`), and with both. Measured: the share of sampled groups with
spread, the tokens that were sampled, and greedy accuracy on held-out sums, every ten steps. Each of `--repeats` is
another seed of the run: another order of the prompts, other draws.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

IMPOSSIBLE = "none"
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "curriculum": {"data.curriculum.floor": 0.1},
    "dynamic sampling": {"algorithm.without_spread": "resample", "algorithm.max_refills": 4},
    "both": {
        "data.curriculum.floor": 0.1,
        "algorithm.without_spread": "resample",
        "algorithm.max_refills": 4,
    },
}


def shown(count: int) -> list[dict[str, str]]:
    """Demonstrations: of every four one is a copy, the others are sums, most with a slip."""
    from strop.data.arithmetic import problems

    sums = problems(count, flawed=0.6)
    return [_copy(number) if number % 4 == 0 else row for number, row in enumerate(sums)]


def mixed(count: int) -> list[dict[str, str]]:
    """Prompts to train on: half copies, a quarter impossible, a quarter to be learned."""
    from strop.data.arithmetic import problems

    sums = problems(count // 2)
    half = len(sums) // 2
    copies = [_copy(number) for number in range(count - len(sums))]
    return [*copies, *({**row, "answer": IMPOSSIBLE} for row in sums[:half]), *sums[half:]]


def held_out(count: int) -> list[dict[str, str]]:
    """Sums that nothing was shown or trained of."""
    from strop.data.arithmetic import problems

    return problems(count, split="eval")


def _copy(number: int) -> dict[str, str]:
    return {"prompt": f"{number % 100}=", "answer": str(number % 100)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--reached", type=float, default=0.85, help="accuracy whose tokens are counted")
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    here = Path.cwd()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            start = warmed_up(options)
            for seed in range(1 if options.smoke else options.repeats):
                for way, changes in WAYS.items():
                    found = trained(way, changes, start, seed, options)
                    runs[way].append(found)
                    print(f"seed {seed}, {way}: {found['accuracy'][-1]}", flush=True)
        finally:
            os.chdir(here)
    numbers = {"sizes": sizes(options), "ways": {way: summary(found, options.reached) for way, found in runs.items()}}
    measure.write("curriculum", numbers, options)
    return numbers


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """Of the runs."""
    if options.smoke:
        return {"steps": 4, "prompts": 24, "groups_per_step": 4, "group_size": 2, "warmup_steps": 3}
    given = {"steps": options.steps, "prompts": options.prompts}
    return {**given, "groups_per_step": 8, "group_size": 8, "warmup_steps": 1000}


def recipe(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs have in common."""
    size = sizes(options)

    def source(function: str, count: int) -> dict[str, Any]:
        return {"path": f"curriculum:{function}", "arguments": {"count": count}}

    return {
        "data": {"train": source("mixed", size["prompts"]), "eval": source("held_out", 8 if options.smoke else 200)},
        "rewards": {"verifiers": [{"kind": "exact"}]},
        "rollout": {
            "groups_per_step": size["groups_per_step"],
            "group_size": size["group_size"],
            "max_new_tokens": 5,
        },
        "training": {"optimizer": {"learning_rate": 2.5e-5, "beta2": 0.99, "warmup_steps": 5}},
        "checkpoint": {"every": 1000},
        "tracking": {"display": "off", "tensorboard": False, "episodes_every": 0},
        "hardware": {"threads": options.threads, "device": "cpu"},
        "run": {},
    }


def warmed_up(options: argparse.Namespace) -> Path:
    """The folder of the model that all runs begin with."""
    import strop
    from strop.config.loading import load_config

    data = recipe(options)
    data["data"]["train"] = {"path": "curriculum:shown", "arguments": {"count": 8000}}
    data["supervised"] = {"method": "sft", "batch_size": 128}
    data["training"]["optimizer"] |= {"learning_rate": 4e-3, "schedule": "cosine", "warmup_steps": 100}
    data["run"] |= {"steps": sizes(options)["warmup_steps"], "name": "start"}
    data["model"] = {
        "create": {"characters": "0123456789+=", "hidden_size": 128, "layers": 2, "heads": 4, "context": 32}
    }
    del data["rewards"], data["rollout"], data["data"]["eval"], data["tracking"]["episodes_every"]
    summary = strop.train(load_config(None, data=data), fresh=True)
    return summary.model.resolve()


def trained(
    way: str, changes: dict[str, Any], start: Path, seed: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """One run: for each evaluation the step, the accuracy and the tokens that had been sampled; for each step the
    share of sampled groups with spread."""
    import strop
    from strop.config.loading import load_config

    data = recipe(options)
    size = sizes(options)
    data |= {"model": {"path": str(start)}, "evaluation": {"every": 2 if options.smoke else 10}}
    data["run"] |= {"seed": seed, "steps": size["steps"], "name": way.replace(" ", "-")}
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        inner = data.setdefault(section, {})
        while "." in rest:
            name, _, rest = rest.partition(".")
            inner = inner.setdefault(name, {})
        inner[rest] = value
    run = strop.train(load_config(None, data=data), fresh=True).folder
    found: dict[str, list[float]] = {name: [] for name in ("step", "accuracy", "tokens", "spread", "solved", "failed")}
    tokens = 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        metrics = record["metrics"]
        if record["kind"] == "train":
            tokens += metrics["tokens/sampled"]
            found["spread"].append(1 - metrics["advantage/zero_share"])
            if "curriculum/solved" in metrics:
                found["solved"].append(metrics["curriculum/solved"])
                found["failed"].append(metrics["curriculum/failed"])
        elif record["kind"] == "eval":
            for name, value in (("step", record["step"]), ("accuracy", metrics["eval/accuracy"]), ("tokens", tokens)):
                found[name].append(value)
    return found


def summary(runs: list[dict[str, list[float]]], reached: float) -> dict[str, Any]:
    """Means over the seeds, and every run."""

    def mean(values: Sequence[float]) -> float:
        return round(statistics.fmean(values), 4)

    def tokens_to(run: dict[str, list[float]]) -> float | None:
        pairs = zip(run["tokens"], run["accuracy"], strict=True)
        return next((tokens for tokens, accuracy in pairs if accuracy >= reached), None)

    return {
        "accuracy_before": mean([run["accuracy"][0] for run in runs]),
        "accuracy_after": mean([run["accuracy"][-1] for run in runs]),
        "accuracy_over_all_evaluations": mean([statistics.fmean(run["accuracy"]) for run in runs]),
        "share_of_groups_with_spread": mean([statistics.fmean(run["spread"]) for run in runs]),
        "tokens_sampled": mean([run["tokens"][-1] for run in runs]),
        f"tokens_until_accuracy_{reached:g}": [tokens_to(run) for run in runs],
        "runs": runs,
    }


if __name__ == "__main__":
    main()
