"""Processes that die, are stopped, or outlive nobody: found in time, by name, and nothing hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_waiting import Start, until

from strop.cluster.session import worker_environment
from strop.cluster.supervision import WorkerLost
from strop.errors import RunFailure

FOUND_WITHIN = 10.0
"""Seconds: what the documentation promises with the default limits."""
DEFAULTS = {"heartbeat": 2.0, "timeout": 8.0}


async def lost(call: Any) -> WorkerLost:
    """The loss that a call ends with, in time."""
    async with asyncio.timeout(FOUND_WITHIN):
        with pytest.raises(WorkerLost) as caught:
            await call
    return caught.value


async def test_a_killed_rank_is_named_with_its_last_words_and_its_peers_are_ended(start: Start) -> None:
    group = await start(3, **DEFAULTS)
    pids = [worker.pid for worker in group.workers]
    loss = await lost(group.call("hang_or_die", 1, "SIGKILL"))
    assert (loss.role, loss.rank, loss.pid, loss.node) == ("trainer", 1, pids[1], group.workers[1].node)
    assert "trainer 1 is lost" in loss.what
    assert loss.last[-1] == "trainer 1 | last words"
    await until(lambda: not any(map(psutil.pid_exists, pids)))


async def test_a_stopped_rank_is_found_although_nothing_says_so(start: Start) -> None:
    group = await start(2, **DEFAULTS)
    pids = [worker.pid for worker in group.workers]
    asked = asyncio.ensure_future(group.call("sleep", 600))
    await asyncio.sleep(0.2)
    os.kill(pids[1], signal.SIGSTOP)
    loss = await lost(asked)
    assert (loss.rank, loss.pid) == (1, pids[1])
    assert "it has not given a sign of life for 8 s" in loss.what
    # Stopped processes hear no polite request.
    await until(lambda: not any(map(psutil.pid_exists, pids)))


async def test_a_call_to_one_that_is_lost_while_idle_fails_at_once(start: Start) -> None:
    group = await start(2)
    os.kill(group.workers[0].pid, signal.SIGKILL)
    await until(lambda: group.workers[0].lost is not None, FOUND_WITHIN)
    loss = await lost(group.workers[0].call("add", 1))
    assert loss.rank == 0
    with pytest.raises(WorkerLost, match="trainer 0 is lost"):
        await group.call("add", 1)


async def test_the_rank_that_died_is_blamed_and_not_the_peer_whose_collective_broke(start: Start) -> None:
    group = await start(2)
    with pytest.raises(WorkerLost, match="trainer 1 is lost") as caught:
        await group.call("die_and_break_peers", 1)
    assert "trainer 1 was the first; after it failed trainer 0" in caught.value.__notes__


async def test_a_driver_that_computes_loses_nobody(start: Start) -> None:
    group = await start(1, heartbeat=0.2, timeout=6.0)
    time.sleep(9.0)  # the event loop stands still
    assert await group.call("add", 1) == (0, 1, 11)


async def test_a_worker_that_computes_is_not_lost(start: Start) -> None:
    group = await start(1, heartbeat=0.2, timeout=6.0)
    assert await group.call("sleep", 9.0) == "slept"


async def test_one_of_a_role_is_started_again_as_often_as_is_allowed(start: Start) -> None:
    group = await start(2, "engine", together=False, restarts=1)
    other, first = group.workers[1].pid, group.workers[0].pid
    os.kill(first, signal.SIGKILL)
    await lost(group.workers[0].call("sleep", 600))
    worker = await group.restart(0)
    assert worker is group.workers[0]
    assert worker.pid != first
    assert group.workers[1].pid == other
    assert await worker.call("add", 1) == (0, 1, 11)
    os.kill(worker.pid, signal.SIGKILL)
    await lost(worker.call("sleep", 600))
    with pytest.raises(WorkerLost, match="engine 0") as caught:
        await group.restart(0)
    assert "cluster.supervision.restarts" in caught.value.mend


async def test_an_object_is_made_anew_by_a_callback(start: Start) -> None:
    group = await start(1, "engine", together=False)
    worker = await group.restart(0, lambda again: again.make("toys:make_toy", base=90))
    assert await worker.call("add", 1) == (0, 1, 91)


async def test_a_worker_that_cannot_start_is_a_failure_and_no_wait(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder of the logs should be")
    group = await start(1)  # it has no log then, and says so
    assert group.workers[0].log is None
    with pytest.raises(RunFailure):
        await group.workers[0].call("no_such_method")


@pytest.mark.parametrize(
    ("attached", "state"), [(True, "busy"), (True, "idle"), (False, "busy")], ids=["attached", "idle", "own-cluster"]
)
async def test_no_worker_outlives_its_driver(ray_session: Any, tmp_path: Path, attached: bool, state: str) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address if attached else ""
    script = Path(__file__).parent / "driver_to_kill.py"
    driver = subprocess.Popen(
        [sys.executable, str(script), address, str(tmp_path), state],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **worker_environment(os.environ)},
    )
    assert driver.stdout is not None
    try:
        pids = json.loads(await asyncio.to_thread(driver.stdout.readline))
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
    finally:
        driver.kill()
        driver.wait()
    await until(lambda: not any(map(psutil.pid_exists, pids)), FOUND_WITHIN)
