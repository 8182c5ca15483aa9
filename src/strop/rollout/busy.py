"""When something that several ask was at work."""

from __future__ import annotations

import time
from collections.abc import Sequence

Interval = tuple[float, float]
"""From and until, by `time.perf_counter()`."""
MOST = 24
"""Intervals that are kept between two looks; the shortest breaks between more of them are left out."""


class Busy:
    """Notes when something has work: from where the first one enters until the last one has left. Also by `with`."""

    def __init__(self) -> None:
        self._inside = 0
        self._rests = False
        self._since: float | None = None
        self._found: list[Interval] = []

    def enter(self) -> None:
        """One more asks."""
        self._inside += 1
        if self._inside == 1:
            self._look()

    def leave(self) -> None:
        """One of them has its answer."""
        self._inside -= 1
        if self._inside == 0:
            self._look()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def rest(self) -> None:
        """It does nothing from now on, whoever waits for it."""
        self._rests = True
        self._look()

    def go_on(self) -> None:
        """It works again."""
        self._rests = False
        self._look()

    def take(self) -> list[Interval]:
        """The intervals since this was last asked, in order; one that goes on has ended now and begins anew."""
        now = time.perf_counter()
        found, self._found = self._found, []
        if self._since is not None:
            found.append((self._since, now))
            self._since = now
        return fewer(found, MOST)

    def _look(self) -> None:
        works = self._inside > 0 and not self._rests
        if works and self._since is None:
            self._since = time.perf_counter()
        elif not works and self._since is not None:
            self._found.append((self._since, time.perf_counter()))
            self._since = None
            if len(self._found) >= 16 * MOST:
                self._found = fewer(self._found, MOST)


def fewer(intervals: Sequence[Interval], most: int) -> list[Interval]:
    """At most so many of them, in order: those with the shortest breaks between become one."""
    if len(intervals) <= most:
        return list(intervals)
    breaks = sorted(range(1, len(intervals)), key=lambda at: intervals[at - 1][1] - intervals[at][0])
    starts = [0, *sorted(breaks[: most - 1])]
    ends = [*starts[1:], len(intervals)]
    return [(intervals[start][0], intervals[end - 1][1]) for start, end in zip(starts, ends, strict=True)]
