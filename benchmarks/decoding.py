"""Where a decoding step of the engine `local` spends its time on one GPU, beside what it cannot do without.

A step draws one token for each of many sequences. Its floor is what it must read once: the weights, the keys and
values of every sequence, and the logits. What a step takes is what a run of many tokens takes longer than a run of one,
whose time is that of the prompts; kernels are counted in the same way, by torch's profiler.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import card
import measure
import random_models
from samplers import SAMPLERS, Job

NAME = "decoding_gpu"
# What a kernel is for, by what its name contains: the first that fits.
KINDS = {
    "compiled": ("triton_",),
    "attention": ("_decode", "attention", "flash"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "splitk", "aten::mm", "addmm", "aten::linear"),
}
OTHERS = "drawing and others"
SHOWN = 20


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.set_defaults(threads=8)
    parser.add_argument("--only", nargs="+", choices=("local", "local-compiled"), default=["local-compiled"])
    parser.add_argument("--shape", choices=list(random_models.SHAPES), default="qwen3-0.6b")
    parser.add_argument("--sequences", type=int, default=256, help="decoded together")
    parser.add_argument("--prompt-tokens", type=int, default=352, help="what the cache holds at the first step")
    parser.add_argument("--new-tokens", type=int, default=65, help="the first of them is no step")
    parser.add_argument("--prefill-tokens", type=int, help="of prompts, in one pass")
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    job = make_job(options)
    numbers: dict[str, Any] = {"job": asdict(job), **card.about(), "sides": {}}
    with tempfile.TemporaryDirectory() as folder:
        random_models.write_model(Path(folder), job.shape, dtype=job.dtype, context=job.context)
        for engine in options.only:
            numbers["sides"][engine] = one_engine(engine, job, folder, options.repeats)
            measure.write(NAME, numbers, options, script="decoding")
            show(engine, numbers["sides"][engine])
    return numbers


def make_job(options: argparse.Namespace) -> Job:
    """The sizes; those of a smoke run are a CPU's."""
    sizes: dict[str, Any] = {
        "shape": options.shape,
        "sizes": [options.sequences],
        "device": "cuda",
        "dtype": "bfloat16",
    }
    sizes |= {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
    sizes["prefill_tokens"] = options.prefill_tokens
    if options.smoke:
        sizes |= {"shape": "tiny", "sizes": [6], "device": "cpu", "dtype": "float32"}
        sizes |= {"prompt_tokens": 7, "new_tokens": 9}
    return Job(**sizes, runs=options.repeats, threads=options.threads, memory=0.0)


def one_engine(engine: str, job: Job, folder: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step: by the clock, of its kernels by kind, and its floor.

    Returns:
        prefill_ms: of all prompts together. step_ms: by the clock. idle_ms: of it without a kernel (None on a CPU).
        kinds, kernels: of a step. floor_ms: see `floor`.
    """
    from strop.config.model import ModelSettings
    from strop.models.load import load_model

    loaded = load_model(ModelSettings(path=folder, dtype=job.dtype), device=job.device, seed=0)
    (count,) = job.sizes
    prompts = random_models.prompts(job.shape, [job.prompt_tokens] * count)
    sampler: Any = SAMPLERS[engine](loaded, job)

    def seconds(new_tokens: int) -> float:
        sampler.new_tokens = new_tokens
        sampler.prepare()
        card.wait()
        started = time.perf_counter()
        sampler.run(prompts)
        return time.perf_counter() - started

    # The first compiles and captures.
    seconds(job.new_tokens)
    lengths = {"prompts": 1, "whole": job.new_tokens}
    times = measure.interleaved({name: partial(seconds, length) for name, length in lengths.items()}, repeats)
    steps = job.new_tokens - 1
    prefill = measure.median(times["prompts"])
    step = (measure.median(times["whole"]) - prefill) / steps
    before, after = (recorded(partial(seconds, length)) for length in lengths.values())
    kernels = {name: (after[name] - before[name]) / steps for name in after}
    sampler.close()
    kinds = Counter[str]()
    for name, taken in kernels.items():
        kinds[kind_of(name)] += taken
    return {
        "prefill_ms": 1e3 * prefill,
        "step_ms": 1e3 * step,
        "seconds": times,
        "idle_ms": 1e3 * step - sum(kinds.values()) if job.device == "cuda" else None,
        "kinds": dict(kinds.most_common()),
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:SHOWN]),
        "floor_ms": floor(loaded.model, job, count),
    }


def kind_of(kernel: str) -> str:
    """One of KINDS, or OTHERS."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHERS)


def recorded(run: Callable[[], object]) -> Counter[str]:
    """Milliseconds of each kernel, by name; on a CPU of each operator."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        run()
        card.wait()
    found = Counter[str]()
    for event in profiler.key_averages():
        if on_gpu and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            found[event.key] += event.self_device_time_total / 1e3
        elif not on_gpu:
            found[event.key] += event.self_cpu_time_total / 1e3
    return found


def floor(model: Any, job: Job, count: int) -> dict[str, float]:
    """Milliseconds in which this device reads what a step needs, in the middle of the run, each byte once.

    bandwidth: GB/s, of a copy of a gigabyte, bytes read and written.
    """
    import torch

    shape = model.config
    size = torch.finfo(model.dtype).bits // 8
    weights = sum(parameter.nbytes for parameter in model.parameters())
    length = job.prompt_tokens + (job.new_tokens - 1) / 2
    held = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * size
    data = torch.empty(2**30 if job.device == "cuda" else 2**26, dtype=torch.uint8, device=job.device)
    other = torch.empty_like(data)
    times = []
    for _ in range(10):
        card.wait()
        started = time.perf_counter()
        other.copy_(data)
        card.wait()
        times.append(time.perf_counter() - started)
    bandwidth = 2 * data.nbytes / min(times)
    parts = {"weights": weights, "keys and values": count * length * held, "logits": count * shape.vocab_size * size}
    found = {name: 1e3 * nbytes / bandwidth for name, nbytes in parts.items()}
    return {**found, "together": sum(found.values()), "bandwidth": bandwidth / 1e9}


def show(engine: str, found: dict[str, Any]) -> None:
    """A few lines of it."""
    print(f"{engine}: prompts {found['prefill_ms']:.1f} ms, a step {found['step_ms']:.2f} ms, idle {found['idle_ms']}")
    for title in ("kinds", "floor_ms", "kernels"):
        print(
            f"  {title}: " + ", ".join(f"{name[:60]} {value:.3f}" for name, value in found[title].items()), flush=True
        )


if __name__ == "__main__":
    main()
