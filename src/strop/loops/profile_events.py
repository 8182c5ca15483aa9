"""What torch recorded of a step: operators by phase, the parts of training, and when a GPU had something to do."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._autograd import DeviceType

from strop.loops.profile_page import Span
from strop.training.ranges import PARTS

OTHER = "other"
_BACKWARD = "autograd::engine::evaluate_function: "


@dataclass
class Operators:
    """Seconds by name. On a GPU these are of its kernels, by the operator that started them; else of operators on the
    CPU, without those that they call.

    by_phase: phase -> operator -> seconds. parts: of training, part -> seconds, on a CPU with what Python does between
    the operators of a part. busy: seconds in which the GPU had
    something to do, by phase, and of the whole step under ""; None without one.
    """

    unit: str
    by_phase: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    parts: Counter[str] = field(default_factory=Counter)
    busy: dict[str, float] | None = None


def operators(events: Iterable[Any], mark: str, marked: float, spans: Sequence[Span]) -> Operators:
    """Divide the events of torch's profiler among the phases of a step.

    Args:
        events: `FunctionEvent`s, in microseconds of their own clock. mark: name of a range. marked: when that began by
            the clock of `spans`.
    """
    events = [e for e in events if not e.is_async and e.name != "[memory]"]
    shift = next(marked - 1e-6 * e.time_range.start for e in events if e.name == mark)
    host = [e for e in events if e.device_type == DeviceType.CPU]
    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    on_gpu = bool(kernels)
    found = Operators("GPU time" if on_gpu else "CPU time")
    phase_at = _Phases(spans)
    part_of = _Parts(host)
    for event in host:
        if event.name == mark:
            continue
        phase = phase_at(shift + 1e-6 * event.time_range.start)
        seconds = 1e-6 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        if phase == "training":
            found.parts[part_of(event)] += seconds
        if not event.is_user_annotation:
            found.by_phase[phase][_shown(event.name)] += seconds
    if on_gpu:
        found.busy = _busy(
            [(shift + 1e-6 * e.time_range.start, shift + 1e-6 * e.time_range.end) for e in kernels], spans
        )
    return found


class _Phases:
    """The phase at a time; "" between phases."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.started)
        self._starts = [span.started for span in self._spans]

    def __call__(self, moment: float) -> str:
        at = bisect_right(self._starts, moment) - 1
        return self._spans[at].phase if at >= 0 and moment <= self._spans[at].ended else ""


class _Parts:
    """The part of training that an event belongs to: the innermost named range around it; in a backward pass, that of
    the operator whose gradient is computed, which has the same sequence number."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._known: dict[int, str] = {}
        self._forward: dict[tuple[int, int], str] = {}
        # In order, so that the last operator with a number counts: it is the one that has made the node.
        for event in sorted(events, key=lambda e: e.time_range.start):
            if event.sequence_nr >= 0 and not event.name.startswith(_BACKWARD):
                inside = self._around(event)
                if inside is not None:
                    self._forward[event.thread, event.sequence_nr] = inside

    def __call__(self, event: Any) -> str:
        if event.id not in self._known:
            self._known[event.id] = self._look(event)
        return self._known[event.id]

    def _look(self, event: Any) -> str:
        if event.is_user_annotation and event.name in PARTS:
            return str(event.name)
        if event.name.startswith(_BACKWARD):
            if event.name.endswith("AccumulateGrad"):
                return "gradients"
            found = self._forward.get((event.fwd_thread, event.sequence_nr))
            if found is not None:
                return found
        return OTHER if event.cpu_parent is None else self(event.cpu_parent)

    def _around(self, event: Any) -> str | None:
        """The named range around an event of a forward pass; None in a backward pass and outside of all."""
        above = event.cpu_parent
        while above is not None and not above.name.startswith(_BACKWARD):
            if above.is_user_annotation and above.name in PARTS:
                return str(above.name)
            above = above.cpu_parent
        return None


def _busy(intervals: list[tuple[float, float]], spans: Sequence[Span]) -> dict[str, float]:
    """Seconds that some interval covers, by phase and under "" in all."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    found: dict[str, float] = defaultdict(float, {"": sum(end - start for start, end in merged)})
    for span in spans:
        found[span.phase] += sum(max(0.0, min(end, span.ended) - max(start, span.started)) for start, end in merged)
    return found


def _shown(name: str) -> str:
    """An operator's name without what all have in common."""
    if name.startswith(_BACKWARD):
        return f"autograd of {name.removeprefix(_BACKWARD).removeprefix('torch::autograd::')}"
    return name.removeprefix("aten::")
