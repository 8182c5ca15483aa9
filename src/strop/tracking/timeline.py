"""`timeline.jsonl`: when the phases of each step ran, and when engines and verifiers were at work meanwhile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.tracking.appended import AppendedFile

MOST_SPANS = 4096
"""Spans of a step that are read; a run writes far fewer."""


@dataclass(frozen=True)
class Span:
    """Something that was done. phase: what. lane: who worked: `driver`, `trainer`, `verifiers`, and `engine`, or where
    there are several `engine 0` and so on. start: seconds from the start of the step, below 0 for what began before.
    """

    phase: str
    lane: str
    start: float
    seconds: float


@dataclass(frozen=True)
class StepTimeline:
    """One line: a step, when it started in Unix seconds, and how long it took."""

    step: int
    time: float
    seconds: float
    spans: tuple[Span, ...]


class TimelineWriter:
    """Appends to `timeline.jsonl`. It is there to be looked at, so that nothing which goes wrong with it stops a run:
    `warn` is told once.

    Args:
        path: the file; made if it is not there.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._warn: Callable[[str], None] | None = warn
        self._file: AppendedFile | None = None
        try:
            self._file = AppendedFile(path)
        except OSError as error:
            self._failed(error)

    def log(self, line: StepTimeline) -> None:
        """Write one line."""
        if self._file is None:
            return
        spans = [[s.phase, s.lane, round(s.start, 6), round(s.seconds, 6)] for s in line.spans]
        values = {"step": line.step, "time": round(line.time, 3), "seconds": round(line.seconds, 6), "spans": spans}
        try:
            self._file.append(json.dumps(values, allow_nan=False).encode() + b"\n")
        except OSError as error:
            self._failed(error)

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, to go on from the checkpoint of this one, and what cannot be read."""
        if self._file is None:
            return
        try:
            lines = [raw for raw in self.path.read_bytes().splitlines(keepends=True) if _step_of(raw) <= step]
            self._file.keep(lines)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _failed(self, error: OSError) -> None:
        if self._warn is not None:
            self._warn(f"the timeline of steps cannot be written: {error.strerror} ({self.path}); the run goes on")
            self._warn = None


def read_step(path: Path, step: int) -> StepTimeline | None:
    """The last line of a step; None where there is none that can be read, or no such file."""
    head, found = f'{{"step": {step}, '.encode(), b""
    try:
        with path.open("rb") as file:
            for raw in file:
                if raw.startswith(head) and raw.endswith(b"\n"):
                    found = raw
    except OSError:
        return None
    return _parsed(found) if found else None


def read_timeline(path: Path) -> list[StepTimeline]:
    """All lines that can be read; none if there is no such file."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    return [line for raw in lines if raw.endswith(b"\n") and (line := _parsed(raw)) is not None]


def joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(start, end) of what some (start, end) cover together, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _step_of(raw: bytes) -> float:
    line = _parsed(raw)
    return math.inf if line is None else line.step


def _parsed(raw: bytes) -> StepTimeline | None:
    try:
        line: Any = json.loads(raw)
        spans = tuple(_spans(line["spans"][:MOST_SPANS]))
        found = StepTimeline(int(line["step"]), float(line["time"]), float(line["seconds"]), spans)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return found if math.isfinite(found.time) and math.isfinite(found.seconds) else None


def _spans(values: Sequence[Any]) -> Iterator[Span]:
    for phase, lane, start, seconds in values:
        span = Span(str(phase)[:100], str(lane)[:100], float(start), float(seconds))
        if math.isfinite(span.start) and math.isfinite(span.seconds) and span.seconds >= 0:
            yield span
