"""`metrics.jsonl` followed while a run writes it: each line is read once, and kept in columns."""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
import zlib
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 1 << 20
LONGEST = 1 << 24
"""Bytes of a line without an end that are held; what comes behind them is not read."""
REMEMBERED = 256
"""Bytes before the place that was read up to; a file that has others there is another one."""


@dataclass
class Column:
    """The lines of one kind: their steps and times, and each metric as numbers of the same length, NaN where a line
    does not have it."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: dict[str, array[float]] = field(default_factory=dict)

    def add(self, step: int, time: float, metrics: dict[str, float]) -> None:
        """Append one line."""
        before = len(self.steps)
        self.steps.append(step)
        self.times.append(time)
        for name, value in metrics.items():
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = array("d", [math.nan]) * before
            column.append(value)
        if len(metrics) < len(self.values):
            for column in self.values.values():
                if len(column) == before:
                    column.append(math.nan)


@dataclass(frozen=True)
class News:
    """What came since a cursor. reset: everything is here, because the cursor was of another file (a run that went on
    from a checkpoint drops later lines) or there was none. kinds: kind -> (steps, times, name -> values)."""

    cursor: str
    reset: bool
    kinds: dict[str, tuple[list[int], list[float], dict[str, list[float]]]]


class MetricsTail:
    """Follows one `metrics.jsonl`. May be used from several threads.

    Lines that cannot be read are left out; one that is not ended yet waits until it is. Where the file was replaced or
    cut, it is read anew and cursors given out before are answered with everything.

    Args:
        path: the file.
        only: names of the metrics that are kept; all of them if None.
    """

    def __init__(self, path: Path, *, only: Collection[str] | None = None) -> None:
        self.path = path
        self._only = None if only is None else frozenset(only)
        self.kinds: dict[str, Column] = {}
        self.lines_read = 0
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._changed = -1
        self._forget()

    @property
    def untouched(self) -> bool:
        """Whether nothing was read yet, so that the whole file is still to be."""
        return self._offset == 0

    def poll(self) -> None:
        """Read what was appended; a file that is not there, or cannot be read, is an empty one."""
        with self._lock:
            self._poll()

    def news(self, since: str, names: Iterable[str]) -> News:
        """Poll, and return what came since a cursor.

        Args:
            since: the cursor of an earlier call; "" for everything.
            names: the metrics that are asked for.
        """
        wanted = list(dict.fromkeys(names))
        with self._lock:
            self._poll()
            seen = self._seen(since)
            kinds = {}
            for kind, column in self.kinds.items():
                start = 0 if seen is None else seen.get(kind, 0)
                values = {name: column.values[name][start:].tolist() for name in wanted if name in column.values}
                kinds[kind] = (column.steps[start:].tolist(), column.times[start:].tolist(), values)
            counts = ",".join(f"{kind}={len(column.steps)}" for kind, column in self.kinds.items())
            return News(f"{self._generation}:{counts}", seen is None, kinds)

    def names(self) -> dict[str, list[str]]:
        """Names of the metrics of each kind, in order of their first line."""
        with self._lock:
            return {kind: list(column.values) for kind, column in self.kinds.items()}

    def column(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric; empty if there is none."""
        with self._lock:
            column = self.kinds.get(kind)
            if column is None or name not in column.values:
                return [], []
            return column.steps.tolist(), column.values[name].tolist()

    def line(self, kind: str, step: int) -> tuple[float, dict[str, float]] | None:
        """Time and metrics of the last line of a step; None if there is none."""
        with self._lock:
            column = self.kinds.get(kind)
            if column is None:
                return None
            for at in range(len(column.steps) - 1, -1, -1):
                if column.steps[at] == step:
                    found = {name: values[at] for name, values in column.values.items()}
                    return column.times[at], {name: value for name, value in found.items() if not math.isnan(value)}
            return None

    def last(self, kind: str) -> tuple[int, float]:
        """Step and time of the last line of a kind; (0, NaN) if there is none."""
        with self._lock:
            column = self.kinds.get(kind)
            return (column.steps[-1], column.times[-1]) if column is not None and column.steps else (0, math.nan)

    def times(self) -> list[float]:
        """Times of all lines, kind after kind."""
        with self._lock:
            return [time for column in self.kinds.values() for time in column.times]

    def _poll(self) -> None:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not self._is_the_same(file, status):
                    self._forget()
                    self._inode = (status.st_dev, status.st_ino)
                if status.st_size > self._offset:
                    self._read_from(file)
        except OSError:
            if self._offset:
                self._forget()

    def _is_the_same(self, file: BinaryIO, status: os.stat_result) -> bool:
        if (status.st_dev, status.st_ino) != self._inode or status.st_size < self._offset:
            return False
        if status.st_size == self._offset and status.st_mtime_ns == self._changed:
            return True
        start = max(0, self._offset - REMEMBERED)
        file.seek(start)
        self._changed = status.st_mtime_ns
        return zlib.crc32(file.read(self._offset - start)) == self._before

    def _read_from(self, file: BinaryIO) -> None:
        file.seek(self._offset)
        rest, last = b"", b""
        while len(rest) <= LONGEST and (chunk := file.read(CHUNK)):
            self.bytes_read += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for raw in lines:
                self._take(raw)
                self._offset += len(raw) + 1
                last = (last + raw + b"\n")[-REMEMBERED:]
        if last:
            start = max(0, self._offset - REMEMBERED)
            file.seek(start)
            self._before = zlib.crc32(file.read(self._offset - start))

    def _take(self, raw: bytes) -> None:
        self.lines_read += 1
        try:
            step, time, kind, metrics = self._record(json.loads(raw))
            if type(step) is not int or abs(step) >= 1 << 53:
                return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return
        self.kinds.setdefault(kind, Column()).add(step, time, metrics)

    def _record(self, line: Any) -> tuple[int, float, str, dict[str, float]]:
        """Step, time, kind and numbers of a line. Whatever is raised, the line is left out."""
        kind, metrics = line["kind"], {n: _number(value) for n, value in line["metrics"].items() if self._keeps(n)}
        if not isinstance(kind, str) or not kind.isidentifier():
            raise ValueError("a kind is a name")
        return line["step"], float(line["time"]), kind, metrics

    def _keeps(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _seen(self, since: str) -> dict[str, int] | None:
        """How many lines of each kind a cursor has seen; None if it is of another file or not a cursor."""
        generation, _, counts = since.partition(":")
        if generation != self._generation:
            return None
        try:
            pairs = (part.split("=") for part in counts.split(",") if part)
            seen = {kind: int(count) for kind, count in pairs}
        except ValueError:
            return None
        good = all(0 <= count <= len(self.kinds[kind].steps) for kind, count in seen.items() if kind in self.kinds)
        return seen if good else None

    def _forget(self) -> None:
        self.kinds = {}
        self._inode = (-1, -1)
        self._offset = 0
        self._before = zlib.crc32(b"")
        self._changed = -1
        self._generation = uuid.uuid4().hex[:8]


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a metric is a number")
    return float(value)
