"""A whole GRPO step on one GPU: strop and TRL, each with vLLM in its own process and without.

Nothing is fetched: the model has the shape of Qwen3-0.6B and random weights, and its end-of-text token is one that it
never writes, so that all completions have the full length. Each side is a process of its own: one step of warm-up, then
the steps that count. What is equal: model, prompts and their order, completions of a prompt and their length,
temperature 1, learning rate, AdamW with moments in float32, one update for each step's completions, no KL penalty, the
reward (a checksum, 0 or 1), and the share of the GPU that vLLM gets. strop computes in bfloat16 and keeps float32
masters; TRL keeps float32 weights under autocast to bfloat16, which is its default. TRL computes log-probabilities once
more before it trains, to correct for vLLM's, and pads rows of one length here: neither pays for padding.

sampling: until the last completion. publishing: weights to the engine, with strop's proof that they arrived. scoring:
rewards, advantages and what is between. training: forward, backward and optimizer. other: strop's metrics and alarms.
total: from the end of a step to the end of the next.

TRL, accelerate and datasets may lie in a folder that PYTHONPATH names; where they are absent, they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import against_trl
import card
import measure
import random_models

NAME = "against_trl_gpu"
SIDES = {
    "strop-vllm": ("strop", "vllm"),
    "strop-local": ("strop", "local"),
    "trl-vllm": ("trl", "vllm"),
    "trl-transformers": ("trl", "transformers"),
}
PARTS = ("total", "sampling", "scoring", "training", "publishing", "other")


@dataclass(frozen=True)
class Job:
    """What all sides do. steps: those that are measured; one of warm-up comes before. batch_size: TRL's, for each pass.
    memory: share of the GPU's memory that vLLM gets. context: longest prompt and completion. max_sequences: that strop
    decodes together; None is its default. TRL decodes all of a step together."""

    shape: str
    device: str
    dtype: str
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    learning_rate: float
    steps: int
    threads: int
    batch_size: int
    memory: float
    context: int
    max_sequences: int | None


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=1)
    parser.set_defaults(threads=8)
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=["strop-vllm", "strop-local", "trl-vllm"])
    parser.add_argument("--shape", choices=list(random_models.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each side")
    parser.add_argument("--prompts", type=int, default=64, help="of a step; each has eight completions")
    parser.add_argument("--batch-size", type=int, default=32, help="TRL's rows in a pass")
    parser.add_argument("--max-sequences", type=int, help="decoded together by strop, if not its default")
    parser.add_argument("--limit", type=int, default=600, help="seconds for each side, its start included")
    parser.add_argument("--add", action="store_true", help="keep the sides that the file of results already has")
    options = parser.parse_args(argv)
    job = make_job(options)
    numbers: dict[str, Any] = {"job": asdict(job), "sides": card.earlier(options, NAME, asdict(job))}
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), job)
        for _ in range(options.repeats):
            for side in options.only:
                found.setdefault(side, []).append(run(side, job, files, options.limit))
                numbers["sides"][side] = summary(found[side])
                numbers["ratios"] = ratios(numbers["sides"])
                # Each side at once: whoever ends this early keeps what there is.
                measure.write(NAME, numbers, options)
    return numbers


def make_job(options: argparse.Namespace) -> Job:
    """The sizes; those of a smoke run are a CPU's."""
    sizes: dict[str, Any] = {
        "shape": options.shape,
        "device": "cuda",
        "dtype": "bfloat16",
        "prompts": options.prompts,
        "prompt_tokens": 95,
        "new_tokens": 300,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "context": 512,
    }
    if options.smoke:
        small = {"prompts": 4, "prompt_tokens": 9, "new_tokens": 6, "steps": 1, "batch_size": 8, "context": 32}
        sizes |= {"shape": "tiny", "device": "cpu", "dtype": "float32"} | small
    return Job(
        **sizes,
        group_size=8,
        learning_rate=1e-6,
        threads=options.threads,
        memory=0.3,
        max_sequences=options.max_sequences,
    )


def make_files(folder: Path, job: Job) -> dict[str, str]:
    """The model and its prompts, as the job of a side names them."""
    lengths = [job.prompt_tokens] * (job.prompts * (job.steps + 1))
    return random_models.write_job(folder, job.shape, dtype=job.dtype, context=job.context, lengths=lengths)


def run(side: str, job: Job, files: Mapping[str, str], limit: int) -> dict[str, Any]:
    """One side in a fresh process: what it told, or what it had got to, and why it failed."""
    who, engine = SIDES[side]
    asked = {**asdict(job), **files, "engine": engine}
    if who == "strop":
        settings: dict[str, Any] = {"kind": engine}
        if job.max_sequences is not None:
            settings["max_sequences"] = job.max_sequences
        if engine == "vllm" and job.device != "cpu":
            settings["memory"] = job.memory
        asked["engine"] = settings
    progress = Path(files["progress"])

    def measured() -> dict[str, Any]:
        path: list[Path] = []
        if who == "trl" and importlib.util.find_spec("trl") is None:
            against_trl.install_trl()
            path = [against_trl.FOLDER]
        return measure.fresh_process(
            measure.HERE / f"against_trl_gpu_{who}_side.py",
            [json.dumps(asked)],
            threads=job.threads,
            python_path=path,
            variables={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"},
            timeout=limit,
        )

    return card.attempted(measured, progress)


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the measured steps of all repeats, the peaks, and every step. The first step of a run is none."""
    found: dict[str, Any] = {"runs": list(runs)}
    if failures := [one["failed"] for one in runs if "failed" in one]:
        # The whole of it is with its run.
        found["failed"] = failures[0].strip().splitlines()[-1]
    steps = [step for one in runs for step in one.get("steps", [])[1:]]
    if not steps:
        return found
    keys = steps[0].keys()
    found |= {
        "seconds": {part: measure.median([s[part] for s in steps]) for part in PARTS},
        "tokens": measure.median([s["tokens"] for s in steps]),
        "prompt_tokens": measure.median([s["prompt_tokens"] for s in steps]),
        "tokens_per_second": measure.median([(s["tokens"] + s["prompt_tokens"]) / s["total"] for s in steps]),
        "start_seconds": measure.median([one["start_seconds"] for one in runs if "start_seconds" in one]),
        "steps": len(steps),
    }
    found |= {key: max(s[key] for s in steps) for key in keys if key.endswith("_gib")}
    found |= {key: measure.median([s[key] for s in steps]) for key in ("mismatch_mean", "mismatch_max") if key in keys}
    return found


def ratios(sides: Mapping[str, Any]) -> dict[str, Any]:
    """How much longer TRL takes than each side of strop, with vLLM where it was measured: above 1 strop is faster."""
    found = {}
    for theirs in ("trl-vllm", "trl-transformers"):
        for ours in ("strop-vllm", "strop-local"):
            if "seconds" in sides.get(ours, {}) and "seconds" in sides.get(theirs, {}):
                mine, other = sides[ours]["seconds"], sides[theirs]["seconds"]
                found[f"{theirs} / {ours}"] = {part: other[part] / mine[part] for part in PARTS if mine[part] > 0}
    return found


if __name__ == "__main__":
    main()
