"""What the benchmarks of one GPU share: its name, its memory, and waiting for it. Nothing of it needs a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import measure

GIB = 2**30


def name() -> str:
    """Of the GPU, or of the processor where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else measure.processor()


def wait() -> None:
    """Until the GPU has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Start the peaks of `memory` anew."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, float]:
    """GiB: peaks of what PyTorch has given out and of what it holds, and what is used of the GPU now, by anybody (as
    nvidia-smi shows it). Empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "used_gib": round((total - free) / GIB, 2),
    }


def about() -> dict[str, Any]:
    """Card, PyTorch's CUDA and versions of what computes."""
    import torch

    found: dict[str, Any] = {"card": name(), "cuda": torch.version.cuda, "versions": {}}
    for package in ("torch", "transformers", "vllm", "trl", "accelerate"):
        # Some lie in a folder without what a package manager writes beside them.
        own = getattr(sys.modules.get(package), "__version__", None)
        with suppress(PackageNotFoundError):
            found["versions"][package] = own or version(package)
    return found


def attempted(measured: Callable[[], dict[str, Any]], progress: Path) -> dict[str, Any]:
    """What a side told; where it failed, what it had written to `progress` until then, and why it failed."""
    progress.unlink(missing_ok=True)
    try:
        return measured()
    except Exception as error:  # whatever it is, the other sides have numbers too
        known: dict[str, Any] = json.loads(progress.read_text()) if progress.exists() else {}
        return {**known, "failed": str(error)[-3000:]}


def earlier(options: argparse.Namespace, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Sides that the file of results has already, where they are wanted and of the same job."""
    file = options.out or measure.RESULTS / f"{name}.json"
    if not options.add or not file.exists():
        return {}
    numbers = json.loads(file.read_text())["numbers"]
    if numbers["job"] != job:
        raise SystemExit(f"{file} is of another job: leave out --add, or name another --out")
    sides: dict[str, Any] = numbers["sides"]
    return sides
