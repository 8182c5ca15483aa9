"""Sampling on one GPU: strop's `local` and `vllm` engines, and transformers' `generate` with either of its caches.

Nothing is fetched: the model has the shape of Qwen3-0.6B, random weights, and an end-of-text token that it never
writes. All sample the same numbers of tokens at temperature 1 from the whole distribution: many sequences, some, and
one alone. Each engine is a process of its own; its start is measured apart, and the first run of each size is not
counted. Weights are published before each run, outside of its time, so that nothing of an earlier run is left.

`generate` gets prompts of one length, so that it need not pad, and returns no log-probabilities where it is timed. With
`cache_implementation="static"` it compiles the model by itself. `distance` is how far the log-probabilities that an
engine reports are from the trainer's for the same tokens, and how far both are from those of the same weights computed
in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import card
import measure
import numpy as np
import random_models
from samplers import SAMPLERS, Job, Prompts

NAME = "engines_gpu"
ENGINES = ("local", "local-compiled", "vllm", "generate", "generate-static")
# Completions whose log-probabilities are compared.
COMPARED = 16


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=1)
    parser.set_defaults(threads=8)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--shape", choices=list(random_models.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 64, 1], help="sequences sampled together")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--prefill-tokens", type=int, help="of prompts, in one pass of strop's engines")
    parser.add_argument("--runs", type=int, default=2, help="timed runs of each size in a process")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory that vLLM gets")
    parser.add_argument("--limit", type=int, default=500, help="seconds for each engine, its start included")
    parser.add_argument("--add", action="store_true", help="keep the engines that the file of results already has")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        measure.tell(one_engine(**json.loads(options.side)))
        return {}
    job = make_job(options)
    numbers: dict[str, Any] = {"job": asdict(job), "sides": card.earlier(options, NAME, asdict(job))}
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        random_models.write_model(Path(folder) / "model", job.shape, dtype=job.dtype, context=job.context)
        for _ in range(options.repeats):
            for engine in options.only:
                found.setdefault(engine, []).append(run(engine, job, Path(folder), options.limit))
                numbers["sides"][engine] = summary(found[engine], job)
                # Each engine at once: whoever ends this early keeps what there is.
                measure.write(NAME, numbers, options, script="engines")
    return numbers


def make_job(options: argparse.Namespace) -> Job:
    """The sizes; those of a smoke run are a CPU's."""
    sizes: dict[str, Any] = {name: getattr(options, name) for name in ("shape", "sizes", "prompt_tokens", "new_tokens")}
    sizes |= {"device": "cuda", "dtype": "bfloat16", "runs": options.runs, "prefill_tokens": options.prefill_tokens}
    if options.smoke:
        sizes = {"shape": "tiny", "sizes": [20, 1], "prompt_tokens": 7, "new_tokens": 6, "runs": 1}
        sizes |= {"device": "cpu", "dtype": "float32"}
    return Job(**sizes, threads=options.threads, memory=options.memory)


def run(engine: str, job: Job, folder: Path, limit: int) -> dict[str, Any]:
    """One engine in a fresh process: what it told, or what it had got to, and why it failed."""
    progress = folder / "progress.json"
    asked = {"engine": engine, "job": asdict(job), "model": str(folder / "model"), "progress": str(progress)}

    def measured() -> dict[str, Any]:
        side, variables = ["--side", json.dumps(asked)], {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return measure.fresh_process(Path(__file__), side, threads=job.threads, variables=variables, timeout=limit)

    return card.attempted(measured, progress)


def summary(runs: Sequence[dict[str, Any]], job: Job) -> dict[str, Any]:
    """Tokens a second of each size, over all runs of all repeats; the first run of a process is none."""
    found: dict[str, Any] = {"runs": list(runs)}
    if failures := [one["failed"] for one in runs if "failed" in one]:
        # The whole of it is with its run.
        found["failed"] = failures[0].strip().splitlines()[-1]
    for size in job.sizes:
        seconds = [value for one in runs for value in one.get("seconds", {}).get(str(size), [])[1:]]
        if seconds:
            rates = found.setdefault("tokens_per_second", {})
            rates[str(size)] = size * job.new_tokens / measure.median(seconds)
    for name in ("distance", "start_seconds"):
        if known := [one[name] for one in runs if name in one]:
            found[name] = known[0]
    return found


def one_engine(engine: str, job: dict[str, Any], model: str, progress: str) -> dict[str, Any]:
    """What a process measures of its engine.

    Returns:
        seconds of each run of each size, the first of which is not counted; start_seconds; distance; memory.
    """
    from strop.config.model import ModelSettings
    from strop.models.load import load_model

    sizes = Job(**job)
    measure.use_threads(sizes.threads)
    loaded = load_model(ModelSettings(path=model, dtype=sizes.dtype), device=sizes.device, seed=0)
    started = time.perf_counter()
    sampler = SAMPLERS[engine](loaded, sizes)
    card.wait()
    found: dict[str, Any] = {**card.about(), "start_seconds": time.perf_counter() - started, "seconds": {}}
    card.forget_peak()
    for size in sizes.sizes:
        prompts = random_models.prompts(sizes.shape, [sizes.prompt_tokens] * size, seed=size)
        times = found["seconds"][str(size)] = []
        for _ in range(sizes.runs + 1):
            sampler.prepare()
            card.wait()
            started = time.perf_counter()
            tokens = sampler.run(prompts)
            times.append(time.perf_counter() - started)
            assert np.shape(tokens) == (size, sizes.new_tokens), "completions must have the full length"
        found |= card.memory()
        # What is known so far, should the rest take too long.
        Path(progress).write_text(json.dumps(found))
    prompts = random_models.prompts(sizes.shape, [sizes.prompt_tokens] * COMPARED, seed=1)
    sampler.prepare()
    found["distance"] = distance(loaded.model, prompts, *sampler.with_logprobs(prompts))
    sampler.close()
    return found


def distance(model: Any, prompts: Prompts, tokens: Any, given: Any) -> dict[str, float]:
    """Mean and largest absolute differences of log-probabilities, in nats.

    Returns:
        mean, max: what the engine gave to `score_streams`, the trainer's. engine_float32_mean, trainer_float32_mean: of
        both to the same weights in float32. tokens: how many.
    """
    from strop.models.forward import score_streams

    streams = [np.asarray([*prompt, *sampled]) for prompt, sampled in zip(prompts, tokens, strict=True)]

    def scored(module: Any) -> np.ndarray:
        pieces = [score_streams(module, [stream])[0] for stream in streams]
        return np.concatenate([piece[len(prompt) :] for piece, prompt in zip(pieces, prompts, strict=True)])

    reported = np.concatenate([np.asarray(one, dtype=np.float32) for one in given])
    trainer = scored(model)
    exact = scored(model.float())
    return {
        "mean": float(np.abs(reported - trainer).mean()),
        "max": float(np.abs(reported - trainer).max()),
        "engine_float32_mean": float(np.abs(reported - exact).mean()),
        "trainer_float32_mean": float(np.abs(trainer - exact).mean()),
        "tokens": len(reported),
    }


if __name__ == "__main__":
    main()
