"""A profile of one step (`strop train --profile`): when each phase ran, what torch did in it, and its memory."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, record_function

from strop.loops.profile_events import Operators, operators
from strop.loops.profile_page import Memory, Page, Span, page
from strop.tracking.system import memory_bytes
from strop.training.ranges import record_ranges

MARK = "profile begins"
"""Ranges by which the clock of the trace and that of the loop are compared."""


class StepProfile:
    """Records one step of a run. The loop says when a step begins and ends, and notes its phases.

    Args:
        folder: of the run. step: that is recorded, 1 for the first. title: which run, on what. device: that the model
            is on. held: bytes of what is in its memory all the time, by name; None where the model is in other
            processes.
    """

    def __init__(
        self, folder: Path, step: int, *, title: str, device: torch.device, held: Callable[[], dict[str, int]] | None
    ) -> None:
        self.step = step
        self.path = folder / "profile" / f"step-{step:06d}"
        self.done = False
        self._title = title
        self._device = device
        self._held = held
        self._spans: list[Span] = []
        self._began = self._marked = 0.0
        self._mark = ""
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        """Step number `step` begins."""
        if step != self.step or self.done or self._profiler is not None:
            return
        # Or torch's profiler says on the terminal that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # All threads: some engines sample in one of their own.
        self._profiler = torch.profiler.profile(
            activities=activities,
            profile_memory=True,
            acc_events=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()
        record_ranges(True)
        _forget_peak(self._device)
        self._mark, self._marked = _compared_clocks()
        self._began = time.perf_counter()

    def note(self, phase: str, started: float, ended: float) -> None:
        """A phase was run, by `time.perf_counter()`."""
        if self._profiler is not None and ended > started:
            self._spans.append(Span(phase, max(started, self._began), ended))

    def end(self, metrics: Mapping[str, float]) -> Path | None:
        """The step has ended: write the profile; returns the file to read, None where no profile was made.

        Args:
            metrics: of the step.
        """
        if self._profiler is None:
            return None
        ended, peak = time.perf_counter(), _peak(self._device)
        profiler = self._profiler
        self.abandon()
        self.done = True
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_trace(profiler)
        found: Operators | None = None
        if self._held is not None:
            found = operators(profiler.events(), self._mark, self._marked, self._spans)
        where = "GPU" if self._device.type == "cuda" else "process"
        memory = Memory(where, peak, self._held() if self._held else None)
        text = page(Page(self.step, self._title, self._began, ended, self._spans, dict(metrics), found, memory))
        target = self.path / "profile.txt"
        target.write_text(text, encoding="utf-8")
        return target

    def abandon(self) -> None:
        """The run ends within the step."""
        if self._profiler is not None:
            record_ranges(False)
            self._profiler.stop()
            self._profiler = None

    def _write_trace(self, profiler: Any) -> None:
        """`trace.json.gz`, with the phases of the loop in a row of their own."""
        plain = self.path / "trace.json"
        profiler.export_chrome_trace(str(plain))
        text = plain.read_text(encoding="utf-8", errors="replace")
        mark = re.search(rf'"name": "{re.escape(self._mark)}".*?"ts": ([\d.]+)', text, re.DOTALL)
        if mark is not None:
            shift, row = float(mark[1]) - 1e6 * self._marked, {"pid": "strop", "tid": "the loop"}
            events = [
                {
                    "ph": "X",
                    "cat": "phase",
                    "name": s.phase,
                    "ts": 1e6 * s.started + shift,
                    "dur": 1e6 * s.seconds,
                    **row,
                }
                for s in self._spans
            ]
            added = "".join(json.dumps(event) + ",\n" for event in events)
            text = text.replace('"traceEvents": [', '"traceEvents": [\n' + added, 1)
        with gzip.open(self.path / "trace.json.gz", "wt", encoding="utf-8", compresslevel=5) as file:
            file.write(text)
        plain.unlink()


def _compared_clocks() -> tuple[str, float]:
    """(a range of the trace, when it began by `time.perf_counter()`).

    On a busy machine others may run between a look at the clock and the range, so the shortest of some tries counts.
    """
    tries: list[tuple[float, str, float]] = []
    for number in range(10):
        name = f"{MARK} ({number})"
        before = time.perf_counter()
        with record_function(name):
            pass
        tries.append((time.perf_counter() - before, name, before))
    _, name, moment = min(tries)
    return name, moment


def _forget_peak(device: torch.device) -> None:
    """Let the peak of the memory begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # Linux; elsewhere the peak is that of the whole run.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak(device: torch.device) -> int:
    """Bytes at the peak: allocated on the GPU, else resident of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii")):
            return 1024 * int(found[1])
    return int(memory_bytes()["process"])
