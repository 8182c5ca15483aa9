"""Threads that verifiers are called in."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from strop.rewards import calls
from strop.rewards.calls import Abandoned, Crew, call


def test_one_call_after_another_runs_in_the_same_thread_under_its_own_name() -> None:
    async def two() -> list[tuple[int, str]]:
        found = []
        for name in ("first", "second"):
            found.append(await call(lambda: (threading.get_ident(), threading.current_thread().name), name=name))
            await asyncio.sleep(0.05)
        return found

    (first, name), (second, other) = asyncio.run(two())
    assert first == second
    assert (name, other) == ("strop-first", "strop-second")


def test_a_call_that_hangs_holds_up_no_other() -> None:
    release = threading.Event()

    async def calls() -> int:
        with pytest.raises(Abandoned):
            await call(release.wait, name="hangs", timeout=0.05)
        return await call(lambda: 7, name="next", timeout=30)

    try:
        assert asyncio.run(calls()) == 7
    finally:
        release.set()


def test_a_crew_makes_so_many_calls_at_a_time_in_the_order_in_which_they_came() -> None:
    lock, now, most, begun = threading.Lock(), [0], [0], list[int]()

    def work(number: int) -> int:
        with lock:
            begun.append(number)
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.002)
        with lock:
            now[0] -= 1
        return number

    async def calls(crew: Crew) -> list[int]:
        return await asyncio.gather(*(crew.call(lambda n=n: work(n), name="x", timeout=30) for n in range(20)))

    for size in (1, 3):
        most[0] = 0
        begun.clear()
        crew = Crew(size)
        assert asyncio.run(calls(crew)) == list(range(20))
        assert most[0] == size
        # Threads may overtake each other between taking a call and saying so.
        assert all(abs(place - number) < size for place, number in enumerate(begun))
        assert asyncio.run(calls(crew)) == list(range(20))  # of another event loop


def test_a_thread_of_a_crew_takes_the_next_call_itself() -> None:
    release = threading.Event()

    async def calls() -> list[int]:
        crew = Crew(1)
        first = asyncio.create_task(crew.call(release.wait, name="first"))
        others = [asyncio.create_task(crew.call(threading.get_ident, name="x")) for _ in range(5)]
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in others)
        release.set()
        await first
        return await asyncio.gather(*others)

    assert len(set(asyncio.run(calls()))) == 1


def test_a_call_that_is_left_behind_gives_its_place_to_another() -> None:
    release = threading.Event()

    async def calls() -> None:
        crew = Crew(2)
        hanging = [asyncio.create_task(crew.call(release.wait, name="hangs", timeout=0.05)) for _ in range(2)]
        waiting = [asyncio.create_task(crew.call(lambda n=n: n, name="next", timeout=30)) for n in range(5)]
        assert [type(one) for one in await asyncio.gather(*hanging, return_exceptions=True)] == [Abandoned] * 2
        assert await asyncio.gather(*waiting) == list(range(5))
        # Those that went on beside the crew do not become a third and a fourth place when they return after all.
        release.set()
        lock, now, most = threading.Lock(), [0], [0]

        def count() -> None:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.005)
            with lock:
                now[0] -= 1

        await asyncio.gather(*(crew.call(count, name="count") for _ in range(8)))
        assert most[0] == 2

    try:
        asyncio.run(calls())
    finally:
        release.set()


def test_where_the_system_has_no_more_threads_those_that_are_there_make_all_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Only(calls._Thread):
        made = 0

        def __init__(self) -> None:
            Only.made += 1
            if Only.made > 1:
                raise RuntimeError("can't start new thread")
            super().__init__()

    def slow(number: int) -> int:
        time.sleep(0.01)
        return number

    async def several() -> list[int]:
        crew = Crew(4)
        return await asyncio.gather(*(crew.call(lambda n=n: slow(n), name="slow", timeout=30) for n in range(6)))

    monkeypatch.setattr(calls, "_Thread", Only)
    monkeypatch.setattr(calls, "_idle", [])
    assert asyncio.run(several()) == list(range(6))
    assert Only.made > 1


def test_where_the_system_has_no_thread_at_all_each_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise RuntimeError("can't start new thread")

    async def several(crew: Crew) -> list[int | BaseException]:
        made = [crew.call(lambda n=n: n, name="x", timeout=30) for n in range(3)]
        return await asyncio.gather(*made, return_exceptions=True)

    crew = Crew(2)
    with monkeypatch.context() as without:
        without.setattr(calls, "_Thread", none_left)
        without.setattr(calls, "_idle", [])
        assert [str(one) for one in asyncio.run(several(crew))] == ["can't start new thread"] * 3
    assert asyncio.run(several(crew)) == [0, 1, 2]


def test_calls_that_come_together_wake_one_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = list[Crew]()
    work_for = calls._Thread.work_for

    def noting(thread: calls._Thread, crew: Crew) -> None:
        woken.append(crew)
        # Long enough for a thread to make calls one by one as they come.
        work_for(thread, crew)
        time.sleep(0.005)

    async def several(crew: Crew) -> list[int]:
        return await asyncio.gather(*(crew.call(lambda n=n: n, name="x", timeout=30) for n in range(20)))

    monkeypatch.setattr(calls._Thread, "work_for", noting)
    assert asyncio.run(several(Crew(1))) == list(range(20))
    assert len(woken) == 1


def test_what_has_ended_does_not_wait_for_the_next_call_of_its_thread() -> None:
    release = threading.Event()

    async def two() -> int:
        crew = Crew(1)
        first = asyncio.create_task(crew.call(lambda: 7, name="first"))
        second = asyncio.create_task(crew.call(release.wait, name="second"))
        try:
            return await asyncio.wait_for(first, 10)
        finally:
            assert not second.done()
            release.set()
            await second

    assert asyncio.run(two()) == 7


def test_the_time_of_a_call_begins_with_the_call_and_not_in_the_queue() -> None:
    async def calls() -> list[int]:
        crew = Crew(1)

        def slow(number: int) -> int:
            time.sleep(0.1)
            return number

        # The last waits for longer than it may take.
        return await asyncio.gather(*(crew.call(lambda n=n: slow(n), name="slow", timeout=1.0) for n in range(14)))

    assert asyncio.run(calls()) == list(range(14))


def test_a_call_that_is_cancelled_in_the_queue_is_never_made() -> None:
    release, made = threading.Event(), list[str]()

    async def calls() -> None:
        crew = Crew(1)
        first = asyncio.create_task(crew.call(release.wait, name="first"))
        second = asyncio.create_task(crew.call(lambda: made.append("second"), name="second"))
        third = asyncio.create_task(crew.call(lambda: made.append("third"), name="third"))
        await asyncio.sleep(0.02)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await asyncio.gather(first, third)

    try:
        asyncio.run(calls())
    finally:
        release.set()
    assert made == ["third"]


def test_what_a_call_raises_is_raised_and_the_crew_goes_on() -> None:
    def fail() -> None:
        raise SystemExit("no")

    async def calls() -> int:
        crew = Crew(1)
        with pytest.raises(SystemExit, match="no"):
            await crew.call(fail, name="fails")
        return await crew.call(lambda: 7, name="next", timeout=30)

    assert asyncio.run(calls()) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_starts_threads_of_its_own() -> None:
    crew = Crew(1)
    assert asyncio.run(call(lambda: 1, name="parent")) == 1
    assert asyncio.run(crew.call(lambda: 1, name="parent")) == 1
    child = os.fork()
    if not child:
        code = 1
        try:
            found = [asyncio.run(make(lambda: 2, name="child", timeout=10)) for make in (call, crew.call)]
            code = 0 if found == [2, 2] else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
