"""What a run ran on: versions, platform, git state, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGES = ("strop", "torch", "transformers", "peft", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers, without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "strop":
                found[package] = str(getattr(sys.modules.get("strop"), "__version__", "unknown"))
    return found


def platform_facts() -> dict[str, Any]:
    """Operating system, machine, processors this process may use, total memory, and CUDA cards if torch is loaded."""
    import psutil

    facts: dict[str, Any] = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    torch = _cuda_torch()
    if torch is not None:
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def memory_bytes() -> dict[str, int]:
    """Memory in use now, in bytes: `process` (resident set), and with CUDA `cuda_allocated`, `cuda_reserved` and
    `cuda_peak` (largest allocated since the peak was last reset), each summed over the visible cards."""
    used = {"process": _process(os.getpid()).memory_info().rss}
    torch = _cuda_torch()
    if torch is not None:
        cards = range(torch.cuda.device_count())
        used["cuda_allocated"] = sum(torch.cuda.memory_allocated(card) for card in cards)
        used["cuda_reserved"] = sum(torch.cuda.memory_reserved(card) for card in cards)
        used["cuda_peak"] = sum(torch.cuda.max_memory_allocated(card) for card in cards)
    return used


@lru_cache(maxsize=1)
def _process(number: int) -> Any:
    """What psutil knows of a process; to find it takes four times as long as to ask it."""
    import psutil

    return psutil.Process(number)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository that holds `folder`, and whether tracked files differ from it; None without one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    # Untracked files are left out: looking for them can take minutes in a folder full of data.
    changes = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _cuda_torch() -> Any:
    """torch if it is loaded and has CUDA in use; a process that has not imported torch holds no memory of a card."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch
    return None
