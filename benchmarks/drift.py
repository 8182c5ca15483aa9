"""How far sampler and trainer are apart, over steps that change no weight: on one GPU, with each engine.

The weights stand still, because the learning rate is too small to move a single bit of the float32 masters; everything
else is that of a run: sampling, update, publication and its proof. Whatever moves the distance of their
log-probabilities from step to step is then a fault: something of an earlier step is left in the engine or in the
trainer. Nothing is fetched: the model has a true shape and random weights.

slope: of the mean distance, in nats for each step, by least squares, with its standard error; beyond four of them it is
a drift. The distance itself is rounding, and differs between batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import card
import measure
import numpy as np
import random_models

NAME = "drift_gpu"
ENGINES = ("local", "vllm", "consistent")
"""Of `rollout.engine.kind`; `consistent` is `local` in its consistent mode, whose distance must be 0."""
STILL = 1e-30
"""A learning rate that moves no float32 number of a size that weights have."""
DISTANCES = ("mismatch/mean", "mismatch/abs_max", "publish/probe_gap")


@dataclass(frozen=True)
class Job:
    """What all engines do. memory: share of the GPU's memory that vLLM gets."""

    shape: str
    device: str
    dtype: str
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    threads: int
    memory: float

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=1)
    parser.set_defaults(threads=8)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--shape", choices=list(random_models.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=16, help="of a step; each has eight completions")
    parser.add_argument("--eager", action="store_true", help="engines neither compile nor, with vLLM, capture graphs")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory that vLLM gets")
    parser.add_argument("--limit", type=int, default=600, help="seconds for each engine, its start included")
    parser.add_argument("--add", action="store_true", help="keep the engines that the file of results already has")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        measure.tell(one_engine(**json.loads(options.side)))
        return {}
    job = make_job(options)
    numbers: dict[str, Any] = {"job": asdict(job), "sides": card.earlier(options, NAME, asdict(job))}
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), job)
        for engine in options.only:
            # In the consistent mode nothing is compiled anyway, and graphs stay.
            eager = options.eager and engine != "consistent"
            asked = {"engine": engine, "eager": eager, "job": asdict(job), **files}
            numbers["sides"][engine] = {"eager": eager, **run(asked, options.limit)}
            # Each engine at once: whoever ends this early keeps what there is.
            measure.write(NAME, numbers, options, script="drift")
            shown = ("weights_moved", "distances")
            side = numbers["sides"][engine]
            print(
                engine,
                len(side.get("steps", [])),
                {key: side[key] for key in shown if key in side},
                _why(side),
                flush=True,
            )
    return numbers


def _why(side: dict[str, Any]) -> str:
    """The last line of why a side failed; the whole of it is with the side."""
    lines: list[str] = str(side.get("failed", "")).strip().splitlines()
    return lines[-1] if lines else ""


def make_job(options: argparse.Namespace) -> Job:
    """The sizes; those of a smoke run are a CPU's."""
    sizes: dict[str, Any] = {"shape": options.shape, "device": "cuda", "dtype": "bfloat16", "prompts": options.prompts}
    sizes |= {"group_size": 8, "prompt_tokens": 95, "new_tokens": 128, "steps": options.steps}
    if options.smoke:
        sizes |= {"shape": "tiny", "device": "cpu", "dtype": "float32"}
        sizes |= {"prompts": 3, "group_size": 2, "prompt_tokens": 9, "new_tokens": 6, "steps": 5}
    return Job(**sizes, threads=options.threads, memory=options.memory)


def make_files(folder: Path, job: Job) -> dict[str, str]:
    """The model and its prompts, other ones for each step."""
    lengths = [job.prompt_tokens] * (job.prompts * job.steps)
    return random_models.write_job(folder, job.shape, dtype=job.dtype, context=job.context, lengths=lengths)


def run(asked: dict[str, Any], limit: int) -> dict[str, Any]:
    """One engine in a fresh process: its steps and what they come to, and why it failed where it did."""
    side, variables = ["--side", json.dumps(asked)], {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def measured() -> dict[str, Any]:
        threads = asked["job"]["threads"]
        return measure.fresh_process(Path(__file__), side, threads=threads, variables=variables, timeout=limit)

    found = card.attempted(measured, Path(asked["progress"]))
    return {**found, **summary(found.get("steps", []))}


def summary(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What the steps come to, of each distance: its mean, the largest, and the slope with its standard error."""
    if len(steps) < 3:
        return {}
    at = np.arange(len(steps)) - (len(steps) - 1) / 2
    found: dict[str, Any] = {}
    for name in DISTANCES:
        values = np.array([step[name] for step in steps])
        slope = float(at @ values / (at @ at))
        rest = values - values.mean() - slope * at
        error = float(np.sqrt(rest @ rest / (len(steps) - 2) / (at @ at)))
        found[name] = {
            "mean": float(values.mean()),
            "largest": float(values.max()),
            "slope": slope,
            "slope_error": error,
            "drifts": bool(slope > 4 * error),
        }
    return {"distances": found}


def recipe(engine: str, job: Job, files: dict[str, str], folder: str, *, eager: bool) -> Any:
    """The job as a recipe; what it does not say is strop's default. eager: see `rollout.engine.eager`."""
    import strop_side

    settings: dict[str, Any] = {"kind": engine}
    if engine == "consistent":
        settings = {"kind": "local", "consistent": True}
    if eager:
        settings["eager"] = True
    if engine == "vllm" and job.device != "cpu":
        settings["memory"] = job.memory
    asked = {**asdict(job), **files, "learning_rate": STILL, "engine": settings}
    return strop_side.recipe(asked, folder)


def one_engine(engine: str, eager: bool, job: dict[str, Any], model: str, data: str, progress: str) -> dict[str, Any]:
    """The distances of each step of a run, and how many of its weights are others at the end."""
    sizes = Job(**job)
    measure.use_threads(sizes.threads)
    found: dict[str, Any] = {"steps": []}
    with tempfile.TemporaryDirectory() as folder:
        config = recipe(engine, sizes, {"model": model, "data": data}, folder, eager=eager)
        asyncio.run(steps_of(config, sizes.steps, found, Path(progress)))
    return {**found, **card.about()}


async def steps_of(config: Any, count: int, found: dict[str, Any], progress: Path) -> None:
    """Do the steps of a run, and note them in `found` and in a file."""
    import strop

    async with strop.open_run(config, fresh=True) as run:
        await run.begin()
        before = {name: weight.detach().cpu().clone() for name, weight in run.trainer.trained_weights()}
        for step in range(1, count + 1):
            started = time.perf_counter()
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step = step
            await run.publish()
            metrics = run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
            seconds = time.perf_counter() - started
            found["steps"].append({**{name: metrics[name] for name in DISTANCES}, "seconds": seconds})
            # What is known so far, should a later step take too long.
            progress.write_text(json.dumps({**found, **card.about()}))
        after = dict(run.trainer.trained_weights())
        # What was 0 may have become as large as the learning rate.
        found["weights_moved"] = sum(
            int(((weight - after[name].detach().cpu()).abs() > 1e10 * STILL).sum()) for name, weight in before.items()
        )


if __name__ == "__main__":
    main()
