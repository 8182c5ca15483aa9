"""Supervised fine-tuning and DPO on the CPU, all weights, float32: strop against TRL, the same rows in the same order.

TRL is no dependency: it is installed into `benchmarks/.trl`. Each measurement is a process of its own, first a step of
warm-up, then the steps that count; the sides take turns. What is equal: the model and all its weights, the rows of each
step (a digest of their tokens and of what is trained is compared), AdamW, learning rate, clipping, no dropout, nothing
cut off; for DPO beta and the reference, which is the model as it was. The losses of the first step must agree to 1e-3.

What each side may choose: how it cuts a step into passes. strop is left to its defaults. TRL gets every batch size that
is asked for, padded, without padding, and with the passes of a step balanced by length, where its trainer has that; a
way whose first loss is another one does not count, and of the others the fastest is taken. All of them are in the
results. TRL's `packing` is not among them: it puts other rows into a step.

`ragged`: lengths as instruction data have them, log-normal from 8 to 512 tokens. `even`: all rows equally long, so that
nothing can be saved on padding. The step is all that is done for it: reading, forward, backward, optimizer, metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import measure

AGREE = 1e-3
"""How far the first losses may be apart."""


@dataclass(frozen=True)
class Option:
    """How TRL cuts a step into passes. rebalanced: passes of similar lengths, of `size` rows on average."""

    size: int
    padding_free: bool = False
    rebalanced: bool = False

    @property
    def name(self) -> str:
        how = "padding-free" if self.padding_free else "rebalanced" if self.rebalanced else "padded"
        return f"{how}, {self.size} in a pass"


@dataclass(frozen=True)
class Job:
    """What both sides do. rows: examples or pairs in a step. steps: those that are measured; one of warm-up comes
    before. option: for TRL alone."""

    model: str
    data: str
    method: str
    rows: int
    steps: int
    learning_rate: float
    threads: int
    beta: float = 0.1
    option: Option = field(default_factory=lambda: Option(1))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--models", nargs="+", choices=["tiny", "smollm2"], default=["tiny", "smollm2"])
    parser.add_argument("--methods", nargs="+", choices=["sft", "dpo"], default=["sft", "dpo"])
    parser.add_argument("--lengths", nargs="+", choices=["ragged", "even"], default=["ragged", "even"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each repeat")
    parser.add_argument("--rows", type=int, help="rows in a step; 32 for tiny and 16 for smollm2, half as many pairs")
    parser.add_argument("--median", type=float, default=90, help="median tokens of a ragged row")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="TRL's; 1, 4 and all rows if not given")
    options = parser.parse_args(argv)
    if options.smoke:
        options.models, options.lengths, options.median = ["tiny"], ["ragged"], 20
        options.repeats, options.steps, options.rows, options.batch_sizes = 1, 1, 4, [2]
    from against_trl import install_trl

    install_trl()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            path = model_folder(model, Path(folder) / model)
            for method in options.methods:
                for lengths in options.lengths:
                    job = make_job(model, path, method, lengths, Path(folder), options)
                    numbers[f"{model} {method} {lengths}"] = compare(job, lengths, options)
                    # What is there is kept, should a later case be stopped.
                    measure.write("supervised_against_trl", numbers, options)
    return numbers


def model_folder(model: str, folder: Path) -> Path:
    """SmolLM2-135M, or a model of 0.8 million weights with one token for each character."""
    if model == "smollm2":
        from strop.models.fetch import fetch

        return fetch("smollm2-135m")
    from string import ascii_letters, digits

    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    settings = NewModel(characters=f"{ascii_letters}{digits} .?\n", hidden_size=128, layers=4, heads=4, context=1024)
    save_model(*create_model(settings, seed=0), folder)
    return folder


def make_job(model: str, path: Path, method: str, lengths: str, folder: Path, options: argparse.Namespace) -> Job:
    """Write the rows, and say what is done with them."""
    from rows import example_rows, ragged_lengths

    from strop.models.load import load_tokenizer

    count = options.rows or (32 if model == "tiny" else 16) // (2 if method == "dpo" else 1)
    total = count * (options.steps + 1)
    drawn = ragged_lengths(total, median=options.median)
    if lengths == "even":
        # As many tokens as the ragged rows have.
        drawn = [round(statistics.mean(drawn))] * total
    rows = example_rows(load_tokenizer(path), drawn, pairs=method == "dpo", even=lengths == "even")
    data = folder / f"{model}-{method}-{lengths}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Job(
        model=str(path),
        data=str(data),
        method=method,
        rows=count,
        steps=options.steps,
        learning_rate={"tiny": 1e-3, "smollm2": 1e-5}[model],
        threads=options.threads,
    )


def options_of(job: Job, sizes: Sequence[int] | None, *, even: bool) -> list[Option]:
    """The ways that TRL's trainer has for this method."""
    chosen = sorted({size for size in sizes or (1, 4, job.rows) if job.rows % size == 0 and size <= job.rows})
    found = [Option(size) for size in chosen]
    if job.method == "sft" and not even:
        found += [Option(size, padding_free=True) for size in chosen if size > 1]
        found += [Option(size, rebalanced=True) for size in chosen if 1 < size < job.rows]
    return found


def compare(job: Job, lengths: str, options: argparse.Namespace) -> dict[str, Any]:
    """TRL's best way, then both sides in turn.

    Raises:
        RuntimeError: the sides were not trained on the same rows, or no way of TRL's has the same first loss.
    """
    short = replace(job, steps=1)
    first = run("supervised_strop_side", short)["steps"][0]
    trials: dict[str, dict[str, Any]] = {}
    ways = {way.name: way for way in options_of(job, options.batch_sizes, even=lengths == "even")}
    for name, way in ways.items():
        trials[name] = tried(replace(short, option=way), first)
        print(f"TRL, {name}: {trials[name]}", file=sys.stderr, flush=True)
    best = fastest(trials)
    timed = replace(job, option=ways[best])
    found = measure.interleaved(
        {"strop": lambda: run("supervised_strop_side", timed), "trl": lambda: run("supervised_trl_side", timed)},
        options.repeats,
    )
    for mine, theirs in zip(found["strop"], found["trl"], strict=True):
        check_same(mine["steps"], theirs["steps"])
    return {
        "job": {key: value for key, value in asdict(job).items() if key not in ("model", "data", "option")},
        "trl_way": best,
        "trl_ways": trials,
        **comparison(found),
    }


def tried(job: Job, first: dict[str, float]) -> dict[str, Any]:
    """One way of TRL's: seconds of a step, first loss, peak memory, and why it cannot be taken, if it cannot."""
    try:
        found = run("supervised_trl_side", job)
    except RuntimeError as error:
        return {"left_out": f"it fails: {str(error).strip().splitlines()[-1]}"}
    steps = found["steps"]
    numbers: dict[str, Any] = {
        "seconds": steps[-1]["total"],
        "cpu_seconds": steps[-1]["cpu"],
        "first_loss": steps[0]["loss"],
        "peak_mib": round(found["peak"] / 2**20),
    }
    if steps[0]["digest"] != first["digest"]:
        numbers["left_out"] = "it trains on other rows or tokens"
    elif abs(steps[0]["loss"] - first["loss"]) > AGREE:
        numbers["left_out"] = f"its first loss is not strop's {first['loss']:.6f}"
    return numbers


def fastest(trials: dict[str, dict[str, Any]]) -> str:
    """The name of the fastest way that computes the same.

    Raises:
        RuntimeError: there is none.
    """
    good = {name: numbers["seconds"] for name, numbers in trials.items() if "left_out" not in numbers}
    if not good:
        raise RuntimeError(f"no way of TRL's computes what strop does: {json.dumps(trials, indent=1)}")
    return min(good, key=lambda name: good[name])


def check_same(mine: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> None:
    """Raise RuntimeError unless both sides were trained on the same rows and began with the same loss."""
    if [step["digest"] for step in mine] != [step["digest"] for step in theirs]:
        raise RuntimeError("the sides were not trained on the same tokens")
    if abs(mine[0]["loss"] - theirs[0]["loss"]) > AGREE:
        raise RuntimeError(f"the first losses differ: {mine[0]['loss']} and {theirs[0]['loss']}")


def run(script: str, job: Job) -> dict[str, Any]:
    """One side in a fresh process."""
    from against_trl import FOLDER

    return measure.fresh_process(
        measure.HERE / f"{script}.py",
        [json.dumps(asdict(job))],
        threads=job.threads,
        python_path=[FOLDER] if script == "supervised_trl_side" else [],
        variables={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )


def comparison(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios and what they are made of; a ratio of times above 1 says that strop is faster, of memory below 1 that it
    needs less. `ratio` is that of whole repeats: the steps of a ragged one are not equally long. Seconds of the
    processor count all threads, and say more than those of the clock where the machine has other things to do."""
    mine, theirs = (summary(found[name]) for name in ("strop", "trl"))
    gaps = [abs(a - b) for a, b in zip(mine["losses"], theirs["losses"], strict=True)]
    tokens = [step["tokens"] for step in found["strop"][0]["steps"]]
    trained = [step["trained_tokens"] for step in found["strop"][0]["steps"]]
    return {
        "tokens_of_each_step": tokens,
        "trained_tokens_of_each_step": trained,
        "ratio": theirs["seconds_of_a_repeat"] / mine["seconds_of_a_repeat"],
        "ratio_of_cpu_seconds": theirs["cpu_seconds_of_a_repeat"] / mine["cpu_seconds_of_a_repeat"],
        "ratio_of_medians": theirs["seconds_median"] / mine["seconds_median"],
        "ratio_of_minima": theirs["seconds_min"] / mine["seconds_min"],
        "ratio_of_peak_memory": mine["peak_mib"] / theirs["peak_mib"],
        "first_losses_differ_by": gaps[0],
        "losses_differ_by_at_most": max(gaps),
        "strop": mine,
        "trl": theirs,
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One side: seconds over the measured steps of all repeats, peak memory, and the losses of the first repeat."""
    seconds = [[step["total"] for step in one["steps"][1:]] for one in runs]
    flat = [value for one in seconds for value in one]
    return {
        "seconds_of_a_repeat": measure.median([sum(one) for one in seconds]),
        "cpu_seconds_of_a_repeat": measure.median([sum(step["cpu"] for step in one["steps"][1:]) for one in runs]),
        "seconds_median": measure.median(flat),
        "seconds_min": min(flat),
        "seconds": seconds,
        "peak_mib": round(measure.median([one["peak"] for one in runs]) / 2**20),
        "peaks_mib": [round(one["peak"] / 2**20) for one in runs],
        "losses": [step["loss"] for step in runs[0]["steps"]],
        "versions": runs[0]["versions"],
    }


if __name__ == "__main__":
    main()
