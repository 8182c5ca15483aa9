"""What every benchmark shares: threads, fresh processes, peak memory, interleaved repeats, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "transformers", "vllm", "trl", "accelerate", "peft", "numpy")
# A child process writes its numbers after this mark; libraries may print what they like before.
MARK = "NUMBERS "

T = TypeVar("T")


def arguments(description: str, *, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs; nothing is kept")
    parser.add_argument("--repeats", type=int, default=repeats, help="times that each side is measured; odd")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of every process")
    parser.add_argument("--out", type=Path, help="file of the results, instead of benchmarks/results/NAME.json")
    return parser


def use_threads(threads: int) -> None:
    """Hold this process, and those it starts, to so many threads; call it before anything else imports torch."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def interleaved(sides: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure all sides in turn, A B A B, so that whatever else the machine does meets every side alike.

    A line for each goes to standard error: some take minutes.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, side in sides.items():
            started = time.perf_counter()
            found[name].append(side())
            seconds = time.perf_counter() - started
            print(f"{name}: {repeat + 1} of {repeats}, {seconds:.1f} s", file=sys.stderr, flush=True)
    return found


def median(values: Sequence[float]) -> float:
    """The middle value: one disturbed repeat does not move it."""
    return float(statistics.median(values))


def fresh_process(
    script: Path,
    arguments: Sequence[str],
    *,
    threads: int,
    python_path: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    timeout: float = 3600,
) -> dict[str, Any]:
    """Run a script in a process of its own; returns what it gave to `tell`.

    Raises:
        RuntimeError: it failed, told nothing or took longer than `timeout` seconds; with the end of what it printed.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([*map(str, python_path), str(ROOT / "src"), *_given_path()]),
        **(variables or {}),
    }
    command = [sys.executable, str(script), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script.name} took longer than {timeout:.0f} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{script.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    numbers: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return numbers


def _given_path() -> list[str]:
    """Folders that this process was told to import from; some machines have packages nowhere else."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def tell(numbers: Mapping[str, Any]) -> None:
    """Give numbers to the process that called `fresh_process`."""
    print(MARK + json.dumps(numbers), flush=True)


def forget_peak() -> None:
    """Start the peak of `peak_bytes` anew, where the kernel allows it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Largest resident memory of this process so far, in bytes.

    Linux counts `ru_maxrss` on from the process that started this one, so its own high-water mark is read first.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processor cores that this process may use; under a restriction (`taskset`) fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write(name: str, numbers: Mapping[str, Any], options: argparse.Namespace, *, script: str | None = None) -> None:
    """Print the numbers, and keep them with the command, the date, the versions and the processor.

    Args:
        name: of the file of results. script: name of the script, if it is another.
    """
    from strop.tracking.system import git_state

    if cores() < options.threads:
        print(f"WARNING: {options.threads} threads shared {cores()} core: not a measurement", file=sys.stderr)
    result = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{script or name}.py", *_without_out(sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": cores(),
        "threads": options.threads,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": _versions(),
        "git": git_state(ROOT),
        "smoke": options.smoke,
        "repeats": options.repeats,
        "numbers": numbers,
    }
    text = json.dumps(result, indent=2)
    print(text)
    target: Path | None = options.out or (None if options.smoke else RESULTS / f"{name}.json")
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
        print(f"written to {target}", file=sys.stderr)


def _without_out(arguments: Sequence[str]) -> list[str]:
    """Where a file of results was put changes nothing in it."""
    kept: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if "--out" not in (before, argument) and not argument.startswith("--out="):
            kept.append(argument)
    return kept


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
