"""`profile.txt`: where the time and the memory of a step went, on one page."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.tracking.text import show_number

if TYPE_CHECKING:
    from strop.loops.profile_events import Operators

REST = "rest of the loop"
MOST = 4
"""Operators that are shown of a phase."""
TOKENS = {
    "sampling": "throughput/sampling_tokens_per_second",
    "scoring": "throughput/scoring_tokens_per_second",
    "training": "throughput/training_tokens_per_second",
}
ELSEWHERE = (
    "Trainer ranks and engines are in other processes. This profile is the driver's: its phases are what the driver\n"
    "waited for, and operators and memory of the other processes are not in it, nor in the trace."
)
_MIB = 1 << 20


@dataclass(frozen=True)
class Span:
    """A phase of the loop, in seconds of `time.perf_counter()`."""

    phase: str
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True)
class Memory:
    """where: "GPU" or "process". peak: bytes in the step. held: bytes of what is there all the time, by name; None
    where the model is elsewhere."""

    where: str
    peak: int
    held: dict[str, int] | None


@dataclass(frozen=True)
class Page:
    """What the page is made of. began, ended: of the step. metrics: of the step. operators: None where the model is in
    other processes."""

    step: int
    title: str
    began: float
    ended: float
    spans: Sequence[Span]
    metrics: Mapping[str, float]
    operators: Operators | None
    memory: Memory

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def phases(self) -> dict[str, float]:
        """Seconds of each phase in order of their first beginning, and the rest."""
        found: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.started):
            found[span.phase] = found.get(span.phase, 0.0) + span.seconds
        return {**found, REST: max(0.0, self.seconds - sum(found.values()))}


def page(given: Page) -> str:
    """The text of `profile.txt`."""
    parts = [_head(given), _table(given)]
    if given.operators is None:
        parts.append(ELSEWHERE)
    else:
        if given.operators.parts:
            parts.append(_training(given, given.operators))
        parts.append(_operators(given, given.operators))
    parts += [_memory(given.memory), "\n".join(_statements(given))]
    return "\n\n".join(parts) + "\n"


def _head(given: Page) -> str:
    slow = "The profiler itself takes time, mostly where there are many small operators: go by the shares."
    return f"Step {given.step} of {given.title}\n{slow}"


def _table(given: Page) -> str:
    busy = given.operators.busy if given.operators is not None else None
    head = f"{'phase':<18}{'seconds':>10}{'share':>9}{'tokens/s':>11}"
    lines = [head + (f"{'GPU idle':>10}" if busy is not None else "")]

    def line(name: str, seconds: float, key: str, tokens: float | None) -> str:
        text = f"{name:<18}{seconds:>10.4f}{_percent(seconds, given.seconds):>9}"
        text += f"{show_number(tokens) if tokens is not None else '':>11}"
        if busy is not None:
            idle = _percent(max(0.0, seconds - busy[key]), seconds) if name != REST else ""
            text += f"{idle:>10}"
        return text.rstrip()

    for name, seconds in given.phases().items():
        lines.append(line(name, seconds, name, given.metrics.get(TOKENS.get(name, ""))))
    lines.append(line("whole step", given.seconds, "", None))
    rates = [
        f"{given.metrics[name]:.4g} {unit}"
        for name, unit in (("throughput/training_tflops", "TFLOP/s"),)
        if name in given.metrics
    ]
    rates += [
        f"{label} {100 * given.metrics[name]:.1f} %"
        for name, label in (("throughput/mfu", "MFU"), ("throughput/mfu_full", "MFU with full attention"))
        if name in given.metrics
    ]
    if rates:
        lines.append(f"training: {', '.join(rates)}")
    return "\n".join(lines)


def _training(given: Page, found: Operators) -> str:
    from strop.training.ranges import PARTS

    total = sum(found.parts.values())
    what = "GPU time" if found.busy is not None else "with what Python does in them"
    lines = [f"{'parts of training':<18}{'seconds':>10}{'share':>9}   ({what}, forward and backward)"]
    order = [*PARTS, *sorted(set(found.parts) - set(PARTS))]
    lines += [
        f"  {part:<16}{found.parts[part]:>10.4f}{_percent(found.parts[part], total):>9}"
        for part in order
        if found.parts[part] > 0
    ]
    return "\n".join(lines)


def _operators(given: Page, found: Operators) -> str:
    lines = [f"{'operators':<18}{'seconds':>10}   ({found.unit} of their own; the first {MOST} of each phase)"]
    for phase in given.phases():
        counted: Counter[str] = found.by_phase.get(phase, Counter())
        total = sum(counted.values())
        if total <= 0:
            continue
        most = [f"{name} {_percent(seconds, total)}" for name, seconds in counted.most_common(MOST) if seconds]
        # A name and its number stay in one line.
        shown = ", ".join(one.replace(" ", "\N{NO-BREAK SPACE}") for one in most)
        head = f"  {phase:<16}{total:>10.4f}   "
        lines += textwrap.wrap(
            shown, 100, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _memory(memory: Memory) -> str:
    what = "allocated on the GPU" if memory.where == "GPU" else "resident memory of the process"
    lines = [f"{'memory':<18}{'MiB':>10}", f"  {'peak':<16}{memory.peak / _MIB:>10.1f}   ({what}, in this step)"]
    if memory.held is None:
        return "\n".join(lines)
    rest = memory.peak - sum(memory.held.values())
    note = "activations and the rest" if memory.where == "GPU" else "activations, Python, torch and the profiler"
    lines += [f"  {name:<16}{size / _MIB:>10.1f}" for name, size in memory.held.items()]
    lines.append(f"  {'rest':<16}{max(0, rest) / _MIB:>10.1f}   ({note})")
    return "\n".join(lines)


def _statements(given: Page) -> Iterator[str]:
    """What dominates, in one to three sentences."""
    phases = given.phases()
    first, second = [*sorted(phases, key=lambda name: -phases[name]), ""][:2]
    also = ""
    if second and phases[second] >= 0.2 * given.seconds:
        also = f", and {_percent(phases[second], given.seconds)} {second}"
    yield f"{_percent(phases[first], given.seconds)} of the step is {first}{also}."
    found = given.operators
    if found is None:
        return
    parts = sum(found.parts.values())
    if parts and phases.get("training", 0.0) >= 0.2 * given.seconds:
        part, seconds = found.parts.most_common(1)[0]
        of = "the GPU's time in training" if found.busy is not None else "training"
        yield f"{_percent(seconds, parts)} of {of} is {part}, forward and backward."
    if found.busy is not None:
        idle = max(0.0, given.seconds - found.busy[""])
        yield f"The GPU has nothing to do in {_percent(idle, given.seconds)} of the step."
    else:
        inside = min(given.seconds, sum(sum(counted.values()) for counted in found.by_phase.values()))
        yield f"Operators take {_percent(inside, given.seconds)} of the step; Python and waiting, the rest."


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "–"
