"""Intervals in which something had work: none is made up, and they stay few."""

from __future__ import annotations

import asyncio
import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from strop.rollout.busy import MOST, Busy, fewer


def test_it_is_busy_from_the_first_to_the_last() -> None:
    busy = Busy()
    assert busy.take() == []
    before = time.perf_counter()
    with busy:
        with busy:
            pass
        assert busy._found == []
        inside = time.perf_counter()
    after = time.perf_counter()
    [(start, end)] = busy.take()
    assert before <= start <= inside <= end <= after
    assert busy.take() == []


def test_what_goes_on_is_told_in_parts_that_meet() -> None:
    busy = Busy()
    with busy:
        [(_, middle)] = busy.take()
    [(start, end)] = busy.take()
    assert start == middle < end


def test_it_does_nothing_while_it_rests() -> None:
    busy = Busy()
    with busy:
        busy.rest()
        with busy:
            assert len(busy.take()) == 1
        assert busy.take() == []
        busy.go_on()
    assert len(busy.take()) == 1


def test_one_who_fails_has_left() -> None:
    async def fail(busy: Busy) -> None:
        with busy:
            await asyncio.sleep(0)
            raise ValueError

    async def run() -> list[tuple[float, float]]:
        busy = Busy()
        await asyncio.gather(*(fail(busy) for _ in range(3)), return_exceptions=True)
        found = busy.take()
        assert busy.take() == []
        return found

    assert len(asyncio.run(run())) == 1


def test_of_very_many_intervals_few_are_kept() -> None:
    busy = Busy()
    for _ in range(5000):
        with busy:
            pass
        assert len(busy._found) < 16 * MOST
    found = busy.take()
    assert len(found) == MOST
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(found))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=60), st.integers(1, 20))
def test_the_shortest_breaks_go(parts: list[tuple[int, int]], most: int) -> None:
    at, intervals = 0, []
    for pause, length in parts:
        intervals.append((float(at + pause), float(at + pause + length)))
        at += pause + length
    found = fewer(intervals, most)
    assert len(found) == min(most, len(intervals))
    assert (found[0][0], found[-1][1]) == (intervals[0][0], intervals[-1][1])
    breaks = sorted(b[0] - a[1] for a, b in itertools.pairwise(intervals))
    kept = sorted(b[0] - a[1] for a, b in itertools.pairwise(found))
    assert kept == breaks[len(breaks) - len(kept) :]
