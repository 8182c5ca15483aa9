"""Threads that verifiers are called in."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from strop.rewards.calls import Abandoned, call


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_starts_threads_of_its_own() -> None:
    assert asyncio.run(call(lambda: 1, name="parent")) == 1
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if asyncio.run(call(lambda: 2, name="child", timeout=10)) == 2 else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
