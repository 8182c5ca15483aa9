"""What a machine is doing: its processors, memory and CUDA cards, and what of it some processes take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

GIB = 1 << 30


class LoadProbe:
    """Looks at this machine. Shares of processors are means since the look before, or since this was made."""

    def __init__(self) -> None:
        self._cards = Cards.find()
        self._busy, self._whole = _processors()
        there = _processes()
        self._seen, self._known = _keys(there.values()), _spent(_tree(there, [os.getpid()]))

    def take(self, processes: Iterable[int] = ()) -> dict[str, Any]:
        """JSON-ready numbers of now.

        Args:
            processes: what counts as the run's, with all that they have started, beside this process and what it has.

        Returns:
            `cpu_percent` of all processors together, `run_cpu_percent` by the run's processes; `memory_gib` in use,
            `run_memory_gib`, the sum of what is resident for each process of the run, so that shared pages count in
            each. With NVML, for each card in a list: `gpu_percent` of the time in which it computed, `gpu_memory_gib`,
            `gpu_celsius`, `gpu_watts`; None where the card does not say.
        """
        import psutil

        busy, whole = _processors()
        there = _processes()
        tree = _tree(there, [os.getpid(), *processes])
        spent = _spent(tree)
        passed, ran = max(whole - self._whole, 1e-9), 0.0
        for key, seconds in spent.items():
            before = self._known.get(key)
            # Of a process that was there before, and only now is the run's, it is not known when it worked. When one
            # was made does not tell: Linux says when it was started itself in whole seconds.
            if before is not None or key not in self._seen:
                ran += max(0.0, seconds - (before or 0.0))
        found = {
            "cpu_percent": round(100 * min(1.0, max(0.0, busy - self._busy) / passed), 2),
            "run_cpu_percent": round(100 * min(1.0, ran / passed), 2),
            "memory_gib": round((psutil.virtual_memory().total - psutil.virtual_memory().available) / GIB, 3),
            "run_memory_gib": round(sum(_resident(process) for process in tree) / GIB, 3),
        }
        self._busy, self._whole, self._known = busy, whole, spent
        self._seen = _keys(there.values())
        return found | ({} if self._cards is None else self._cards.take())


class Cards:
    """The CUDA cards of this machine, by NVML; the package `nvidia-ml-py` has it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    @classmethod
    def find(cls) -> Cards | None:
        """None where the package, the driver or a card is missing."""
        try:
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

            pynvml.nvmlInit()
            found = cls(pynvml)
        except Exception:
            return None
        return found if found._handles else None

    def take(self) -> dict[str, list[float | None]]:
        """See `LoadProbe.take`; what no card says is left out."""
        nvml = self._nvml
        asked: dict[str, Callable[[Any], float]] = {
            "gpu_percent": lambda card: nvml.nvmlDeviceGetUtilizationRates(card).gpu,
            "gpu_memory_gib": lambda card: nvml.nvmlDeviceGetMemoryInfo(card).used / GIB,
            "gpu_celsius": lambda card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            "gpu_watts": lambda card: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
        }
        found = {name: [_said(ask, card) for card in self._handles] for name, ask in asked.items()}
        return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _said(ask: Callable[[Any], float], card: Any) -> float | None:
    try:
        return round(float(ask(card)), 3)
    except Exception:  # virtual cards and older ones refuse some questions
        return None


def _processors() -> tuple[float, float]:
    """(seconds in which processors worked, seconds in all) of the machine, over all of them."""
    import psutil

    times = psutil.cpu_times()._asdict()
    # A guest's time is in that of its user too.
    whole = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return whole - times["idle"] - times.get("iowait", 0.0), whole


def _processes() -> dict[int, Any]:
    """All processes of this machine, by their numbers."""
    import psutil

    return {process.pid: process for process in psutil.process_iter()}


def _key(process: Any) -> tuple[int, float]:
    """The same for a process as long as it is there, and for no other one."""
    return process.pid, process.create_time()


def _keys(processes: Iterable[Any]) -> set[tuple[int, float]]:
    import psutil

    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.add(_key(process))
    return found


def _tree(there: dict[int, Any], roots: Iterable[int]) -> list[Any]:
    """Some processes and all that come from them, as far as they are there."""
    import psutil

    below: dict[int, list[Any]] = {}
    for process in there.values():
        try:
            below.setdefault(process.ppid(), []).append(process)
        except psutil.Error:
            continue
    found: dict[int, Any] = {}
    waiting = [there[root] for root in roots if root in there]
    while waiting:
        process = waiting.pop()
        if process.pid not in found:
            found[process.pid] = process
            waiting += below.get(process.pid, [])
    return list(found.values())


def _spent(processes: Iterable[Any]) -> dict[tuple[int, float], float]:
    """Seconds that each process has computed, by its number and when it was made."""
    import psutil

    found = {}
    for process in processes:
        try:
            times = process.cpu_times()
            found[_key(process)] = times.user + times.system
        except psutil.Error:
            continue
    return found


def _resident(process: Any) -> int:
    import psutil

    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
