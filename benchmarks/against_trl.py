"""A whole GRPO step on the CPU: strop against TRL's transformers path, on the same model, prompts and lengths.

TRL is no dependency: it is installed into `benchmarks/.trl`. Each measurement is a process of its own, first a step of
warm-up, then the steps that count; the sides take turns. What is equal: the model (all its weights, float32), the
prompts and their order, completions of a prompt, the longest completion, temperature 1, learning rate, AdamW, one
update for each step's completions, no KL penalty, the reward (a checksum, 0 or 1). What each side may choose: how it
cuts a step into passes. For TRL the fastest of several batch sizes is taken.

`smollm2` gets a copy of the model folder whose end-of-text token is one that the model never writes, so that all
completions have the full length on both sides. `tiny` is the model of the quickstart with its random weights: both
sides end at its end-of-text token, and sample lengths from the same distribution (the means are in the results).

sampling: `generate` (TRL) or the engine (strop). scoring: rewards, advantages, and what is between the two others.
training: forward, backward and optimizer. total: from the end of a step to the end of the next, all that is done for
it; strop's includes metrics, episode files and the proof that the engine has the new weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure

TRL = "trl==1.16.*"
FOLDER = measure.HERE / ".trl"
PARTS = ("total", "sampling", "scoring", "training")
# An end-of-text token for the copy of SmolLM2: reserved in its tokenizer, for notebooks without output.
NEVER_WRITTEN = "<empty_output>"


@dataclass(frozen=True)
class Job:
    """What both sides do. steps: those that are measured; one of warm-up comes before."""

    model: str
    data: str
    prompts: int
    group_size: int
    new_tokens: int
    learning_rate: float
    steps: int
    threads: int
    batch_size: int = 8


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), help="all if not given")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each repeat")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="TRL's, of which the fastest is taken")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.steps, options.batch_sizes = 1, 1, [8]
    install_trl()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or (["tiny"] if options.smoke else list(JOBS)):
            job = JOBS[name](Path(folder) / name, options)
            sizes = options.batch_sizes or ([8, 16, 32] if name == "smollm2" else [32, 64, 128, 256])
            numbers[name] = compare(job, sizes, options.repeats)
    measure.write("against_trl", numbers, options)
    return numbers


def install_trl() -> None:
    """TRL and accelerate without their dependencies, which strop has."""
    if (FOLDER / "trl").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FOLDER), "--no-deps"]
    subprocess.run([*command, TRL, "accelerate"], check=True)


def tiny(folder: Path, options: argparse.Namespace) -> Job:
    """The quickstart's model and its problems; 32 prompts of 3 to 6 tokens, completions of at most 8."""
    return _tiny(folder, options, context=32, new_tokens=8)


def tiny_ragged(folder: Path, options: argparse.Namespace) -> Job:
    """The same with completions of at most 64 tokens: a model that ends anywhere writes one to 64, some 15 on average.

    The lengths that reinforcement learning meets: a few completions of a batch go on long after most have ended.
    """
    return _tiny(folder, options, context=96, new_tokens=8 if options.smoke else 64)


def _tiny(folder: Path, options: argparse.Namespace, *, context: int, new_tokens: int) -> Job:
    from strop.config.loading import load_config
    from strop.data.arithmetic import problems
    from strop.models.create import create_model
    from strop.models.save import save_model

    create = load_config(measure.ROOT / "recipes" / "quickstart.yaml").model.create
    assert create is not None
    save_model(*create_model(create.model_copy(update={"context": context}), seed=0), folder / "model")
    prompts = 4 if options.smoke else 32
    texts = [row["prompt"] for row in problems(count=prompts * (options.steps + 1))]
    return _job(folder, texts, options, prompts=prompts, new_tokens=new_tokens, learning_rate=1e-4)


def smollm2(folder: Path, options: argparse.Namespace) -> Job:
    """SmolLM2-135M, 4 prompts of some 60 to 100 tokens, completions of 48."""
    from texts import texts_of_at_least

    from strop.models.fetch import fetch
    from strop.models.load import load_tokenizer

    source, target = fetch("smollm2-135m"), folder / "model"
    shutil.copytree(source, target)
    tokenizer = load_tokenizer(source)
    token = tokenizer.convert_tokens_to_ids(NEVER_WRITTEN)
    _change(target / "tokenizer_config.json", eos_token=NEVER_WRITTEN, pad_token=NEVER_WRITTEN)
    for file in ("config.json", "generation_config.json"):
        _change(target / file, eos_token_id=token, pad_token_id=token)
    prompts, new_tokens = (1, 4) if options.smoke else (4, 48)
    texts = texts_of_at_least(tokenizer, prompts * (options.steps + 1), 60)
    return _job(folder, texts, options, prompts=prompts, new_tokens=new_tokens, learning_rate=1e-6)


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _job(
    folder: Path, texts: Sequence[str], options: argparse.Namespace, *, prompts: int, new_tokens: int, **rest: Any
) -> Job:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return Job(
        model=str(folder / "model"),
        data=str(data),
        prompts=prompts,
        group_size=8,
        new_tokens=new_tokens,
        steps=options.steps,
        threads=options.threads,
        **rest,
    )


def compare(job: Job, batch_sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """TRL's best batch size, then both sides in turn."""
    step = job.prompts * job.group_size
    trials = {}
    for size in sorted({min(size, step) for size in batch_sizes}):
        short = Job(**asdict(job) | {"batch_size": size, "steps": min(2, job.steps)})
        trials[size] = measure.median([s["total"] for s in run("trl_side", short)["steps"]])
    best = Job(**asdict(job) | {"batch_size": min(trials, key=lambda size: trials[size])})
    found = measure.interleaved(
        {"strop": lambda: run("strop_side", best), "trl": lambda: run("trl_side", best)}, repeats
    )
    sides = {name: summary(runs, step) for name, runs in found.items()}
    mine, theirs = sides["strop"], sides["trl"]
    return {
        "job": {key: value for key, value in asdict(best).items() if key not in ("model", "data", "batch_size")},
        "completions_in_a_step": step,
        "trl_batch_size": best.batch_size,
        "trl_seconds_of_a_step_by_batch_size": trials,
        "ratio_completions_per_minute": mine["completions_per_minute"] / theirs["completions_per_minute"],
        "ratio_of_parts": {part: theirs["seconds"][part] / max(mine["seconds"][part], 1e-9) for part in PARTS},
        **sides,
    }


def run(script: str, job: Job) -> dict[str, Any]:
    """One side in a fresh process."""
    return measure.fresh_process(
        measure.HERE / f"{script}.py",
        [json.dumps(asdict(job))],
        threads=job.threads,
        python_path=[FOLDER] if script == "trl_side" else [],
        variables={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )


def summary(runs: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
    """Medians over all measured steps of all repeats."""
    steps = [s for one in runs for s in one["steps"]]
    names = [key for key in steps[0] if key not in ("tokens", "prompt_tokens")]
    seconds = {name: measure.median([s[name] for s in steps]) for name in names}
    return {
        "completions_per_minute": 60 * step / seconds["total"],
        "seconds": seconds,
        "mean_completion_tokens": sum(s["tokens"] for s in steps) / (len(steps) * step),
        "mean_prompt_tokens": sum(s["prompt_tokens"] for s in steps) / (len(steps) * step),
        "peak_mib": round(measure.median([one["peak"] for one in runs]) / 2**20),
        "totals": [[s["total"] for s in one["steps"]] for one in runs],
        "versions": runs[0]["versions"],
    }


JOBS: dict[str, Callable[[Path, argparse.Namespace], Job]] = {
    "tiny": tiny,
    "tiny_ragged": tiny_ragged,
    "smollm2": smollm2,
}

if __name__ == "__main__":
    main()
