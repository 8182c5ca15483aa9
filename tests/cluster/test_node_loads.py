"""The load of other machines: one process on each tells it, and a probe that hangs makes nobody look lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from cluster_waiting import Start

from strop.cluster.group import WorkerGroup
from strop.cluster.node_loads import NodeLoads
from strop.cluster.supervision import local_node
from strop.loops.processes import PROBE


async def until(there: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + 60
    while not (found := there()):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)
    return found


def loads(group: WorkerGroup) -> NodeLoads:
    return group._supervisor.loads


async def test_one_process_of_a_machine_tells_of_all_there(start: Start) -> None:
    """This machine counts as another one here."""
    group = await start(2)
    await asyncio.gather(*(worker.call("add", 1) for worker in group.workers))
    assert loads(group).take() == []
    loads(group).begin(0.1, PROBE, "")
    [(name, load), *_] = await until(loads(group).take)
    # A machine of the driver's name that is another one gets its id too.
    assert name == f"{socket.gethostname()} {group.workers[0].node[:8]}"
    assert 0 <= load["run_cpu_percent"] <= load["cpu_percent"] + 1
    # Both processes, each of which has imported Ray.
    assert load["run_memory_gib"] > 0.05
    assert load["memory_gib"] > load["run_memory_gib"] / 2
    assert loads(group).processes() == []


async def test_the_drivers_own_machine_is_not_asked(start: Start) -> None:
    group = await start(2)
    loads(group).begin(0.1, PROBE, local_node())
    pids = await until(loads(group).processes)
    assert sorted(pids) == sorted(worker.pid for worker in group.workers)
    await asyncio.sleep(1.5)
    assert loads(group).take() == []


async def test_when_the_one_that_tells_is_lost_another_does(start: Start) -> None:
    group = await start(2, "engine", together=False)
    loads(group).begin(0.1, PROBE, "")
    await until(loads(group).take)
    [question] = loads(group)._questions.values()
    told, lost = question.handle, question.handle.pid
    os.kill(lost, signal.SIGKILL)
    await until(lambda: told.lost is not None)
    await until(lambda: [one.handle for one in loads(group)._questions.values()] != [told])
    loads(group).take()
    assert await until(loads(group).take)


async def test_a_probe_that_hangs_or_fails_makes_nobody_look_lost(start: Start) -> None:
    for probe in ("toys:HangingProbe", "toys:FailingProbe", "toys:NoProbe"):
        group = await start(1, timeout=1.5)
        loads(group).begin(0.1, probe, "")
        await until(lambda group=group: loads(group)._questions)  # type: ignore[misc]
        await asyncio.sleep(4)
        assert group.workers[0].lost is None
        assert await group.call("add", 5) == (0, 1, 15)
        assert loads(group).take() == []
