"""`metrics.jsonl`: one line for each step, evaluation or warm-up step, and the fan-out to other trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from strop.errors import RunFailure
from strop.tracking.appended import AppendedFile

Kind = Literal["train", "eval", "warmup"]
FAILURES_IN_A_ROW = 3
"""After so many a tracker is switched off: each call to a server that is gone may wait for a long time."""


@dataclass(frozen=True)
class MetricsRecord:
    """One line of `metrics.jsonl`.

    step: of its kind; an evaluation carries the training step it follows, 0 before the first. time: Unix seconds.
    metrics: name -> number; null in the file (NaN or infinite when logged) is NaN here.
    """

    step: int
    time: float
    kind: Kind
    metrics: dict[str, float] = field(default_factory=dict)


class MetricsSink(Protocol):
    """Another place that metrics go to. Numbers are finite; `kind` is where they come from."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends to `metrics.jsonl` and hands the same numbers to the sinks.

    A torn last line, left by a process that was killed while writing, is cut off when the file is opened. A sink that
    fails does not stop the run: `warn` is told, and after three failures in a row the sink is switched off.

    Args:
        path: the file; made if it is not there.
        sinks: other trackers.
        warn: called with one sentence for each thing that went wrong in a sink.
        clock: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        sinks: Sequence[MetricsSink] = (),
        *,
        warn: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._warn = warn
        self._clock = clock
        self._sinks = list(sinks)
        self._failures = {sink.name: 0 for sink in sinks}
        try:
            self._file = AppendedFile(path)
        except OSError as error:
            raise RunFailure(f"the metrics cannot be written: {error.strerror}", where=str(path)) from error

    def log(self, step: int, metrics: Mapping[str, Any], *, kind: Kind = "train") -> None:
        """Write one line. Values are numbers or what `float()` takes (0-d tensors and arrays, numpy scalars).

        Raises:
            TypeError: a value is not a number.
            RunFailure: the line cannot be written, on a full disk for instance; what was there stays as it was.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        line = {"step": int(step), "time": round(self._clock(), 3), "kind": kind, "metrics": numbers}
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")
        finite = {name: value for name, value in numbers.items() if value is not None}
        for sink in list(self._sinks):
            self._hand_over(sink, step, finite, kind)

    def truncate_after(self, step: int, *, kind: Literal["train", "warmup"] = "train") -> None:
        """Drop what was logged after a step, to go on from its checkpoint.

        Everything from the first line later than `step` on is dropped. For "train", training and evaluation lines
        count; for "warmup" (the run goes on within its warm-up), warm-up lines and all training lines do. Unreadable
        lines go as well. A crash on the way leaves the file as it was.
        """
        self._file.keep(_until(_lines(self.path), step, kind))

    def close(self) -> None:
        """Close the file and the sinks; a second call does nothing."""
        self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._warn(f"{sink.name} did not close: {first_sentence(error)}")
        self._sinks = []

    def _append(self, line: bytes) -> None:
        try:
            self._file.append(line)
        except OSError as error:
            raise RunFailure(
                f"the metrics cannot be written: {error.strerror}",
                where=str(self.path),
                mend="make room on the disk; the same command goes on from the last checkpoint",
            ) from error

    def _hand_over(self, sink: MetricsSink, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        try:
            sink.log(step, metrics, kind)
            self._failures[sink.name] = 0
        except Exception as error:
            self._failures[sink.name] += 1
            self._warn(f"{sink.name} did not take the metrics of step {step}: {first_sentence(error)}")
            if self._failures[sink.name] >= FAILURES_IN_A_ROW:
                self._sinks.remove(sink)
                self._warn(
                    f"{sink.name} is switched off after {FAILURES_IN_A_ROW} failures; metrics.jsonl has everything"
                )


def read_metrics(path: Path, *, kind: Kind | None = None) -> list[MetricsRecord]:
    """Read `metrics.jsonl` in order, all kinds or one; an empty list if there is no such file.

    Lines that cannot be read (the last one, while a run is writing or after a crash) are left out. After a resume the
    same evaluation can be there twice: the later line counts.
    """
    if not path.exists():
        return []
    return [record for _, record in _lines(path) if record is not None and kind in (None, record.kind)]


def _lines(path: Path) -> Iterator[tuple[bytes, MetricsRecord | None]]:
    """Each line with its record; None for one that cannot be read."""
    with path.open("rb") as file:
        for raw in file:
            try:
                line: Any = json.loads(raw) if raw.endswith(b"\n") else None
                numbers = {name: math.nan if value is None else value for name, value in line["metrics"].items()}
                yield raw, MetricsRecord(line["step"], line["time"], line["kind"], numbers)
            except (ValueError, KeyError, TypeError, AttributeError):
                yield raw, None


def _until(
    lines: Iterator[tuple[bytes, MetricsRecord | None]], step: int, kind: Literal["train", "warmup"]
) -> Iterator[bytes]:
    """Those lines that can be read, up to the first one later than a step."""
    for raw, record in lines:
        if record is None:
            continue
        if _is_later(record, step, kind):
            return
        yield raw


def _is_later(record: MetricsRecord, step: int, kind: Literal["train", "warmup"]) -> bool:
    if kind == "warmup":
        return record.kind == "train" or (record.kind == "warmup" and record.step > step)
    return record.kind != "warmup" and record.step > step


def _number(name: str, value: Any) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}, which is not a number") from error
    return number if math.isfinite(number) else None


def first_sentence(error: Exception) -> str:
    """What another package's exception says, cut to one sentence."""
    text = str(error).strip().split("\n")[0].split(". ")[0]
    return f"{type(error).__name__}: {text}"[:200]
