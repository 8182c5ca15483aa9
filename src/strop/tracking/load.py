"""`load.jsonl`: the load of the machines of a run over time, taken by a thread of its own."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from strop.tracking.appended import AppendedFile
from strop.tracking.load_probe import LoadProbe
from strop.tracking.metrics_tail import MetricsTail

LAST = 5.0
"""Most seconds that the end of a run waits for the last line."""
MOST_CARDS = 64
_NOT_IN_A_NAME = re.compile(r"[,=]")
"""What cursors have between names."""


class Elsewhere(Protocol):
    """The processes of a run that this one did not start, and the machines that they are on."""

    def processes(self) -> Sequence[int]:
        """Numbers of those on this machine."""
        ...

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, load) of other machines, as they told it since this was last asked."""
        ...


class LoadSampler:
    """Appends a line for each machine, `every` so many seconds and once at the end: `time` (Unix seconds), `step` that
    is under way, `node`, and what `LoadProbe.take` says.

    It is there to be looked at: nothing that goes wrong reaches the run, which is told once. Lines of steps that a run
    has to do again stay, for the machine did them.

    Args:
        path: the file; made if it is not there. every: 0 for none, and no file.
    """

    def __init__(self, path: Path, every: float, *, warn: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._every = every
        self._warn: Callable[[str], None] | None = warn
        self._file: AppendedFile | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if every > 0:
            try:
                self._file = AppendedFile(path)
            except OSError as error:
                self._failed(error)

    def start(self, step: Callable[[], int], elsewhere: Elsewhere | None = None) -> None:
        """Begin. step: the one that is under way."""
        if self._file is None:
            return
        self._thread = threading.Thread(target=self._run, args=(self._file, step, elsewhere), name="load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take a last line and end; a second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            # A driver of cards that hangs is no reason for the run to.
            self._thread.join(LAST)
        elif self._file is not None:
            self._file.close()
        self._thread, self._file = None, None

    def _run(self, file: AppendedFile, step: Callable[[], int], elsewhere: Elsewhere | None) -> None:
        try:
            node, probe, ended = socket.gethostname(), LoadProbe(), False
            while not ended:
                ended = self._stop.wait(self._every)
                now = {"time": round(time.time(), 3), "step": step()}
                found = [(node, probe.take([] if elsewhere is None else elsewhere.processes()))]
                found += [] if elsewhere is None else elsewhere.take()
                try:
                    lines = (json.dumps(now | {"node": name} | load) for name, load in found)
                    file.append(b"".join(line.encode() + b"\n" for line in lines))
                except OSError as error:
                    self._failed(error)
        except Exception as error:
            self._failed(error)
        finally:
            file.close()

    def _failed(self, error: Exception) -> None:
        if self._warn is not None:
            why = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
            warn, self._warn = self._warn, None
            # Where warnings are shown may be closed by now.
            with contextlib.suppress(Exception):
                warn(f"the load of the machine cannot be recorded: {why} ({self.path}); the run goes on")


class LoadTail(MetricsTail):
    """Follows one `load.jsonl`, as `MetricsTail` follows metrics: the kind of a line is the machine's name, and a list
    of cards is a column for each, `gpu_percent/0` and so on."""

    def _record(self, line: Any) -> tuple[int, float, str, dict[str, float]]:
        numbers = {name: value for name, value in line.items() if name not in ("time", "step", "node")}
        node = _NOT_IN_A_NAME.sub("_", str(line["node"])[:200])
        return line["step"], float(line["time"]), node, dict(_columns(numbers))


def _columns(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        each = [(name, value)]
        if isinstance(value, list):
            each = [(f"{name}/{card}", one) for card, one in enumerate(value[:MOST_CARDS])]
        for column, one in each:
            if isinstance(one, bool) or not isinstance(one, int | float | None):
                raise TypeError("a load is a number")
            yield column, math.nan if one is None else float(one)
