"""Groups of real actors: calls on all ranks, exceptions, time-outs, and where arguments lie in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cluster_waiting import Start, shared_group, until
from toys import Flat

from strop.cluster.group import WorkerGroup
from strop.cluster.placement import Ask
from strop.errors import MissingExtra, RunFailure, UserError


@pytest.fixture(scope="module")
def pair(ray_session: Any) -> Iterator[WorkerGroup]:
    """Two ranks, for the tests that leave them as they were."""
    with shared_group(Ask("trainer", 2, "cpu"), "toys:make_toy", base=10) as group:
        yield group


async def test_every_rank_is_called_and_knows_its_peers(pair: WorkerGroup) -> None:
    assert await pair.call("add", 5) == (0, 2, 15)
    assert await pair.workers[1].call("add", 6) == (1, 2, 16)
    assert await pair.workers[1].call("inner.name") == "inner"
    around = [await worker.call("surroundings") for worker in pair.workers]
    assert {e["MASTER_ADDR"] + e["MASTER_PORT"] for e in around} == {
        around[0]["MASTER_ADDR"] + around[0]["MASTER_PORT"]
    }
    assert [e["LOCAL_RANK"] for e in around] == ["0", "0"]
    assert around[0]["STROP_TEST_PASSED"] == "yes"


async def test_plain_methods_share_one_thread_and_coroutines_another(start: Start) -> None:
    worker = (await start(1)).workers[0]
    threads = {await worker.call("thread") for _ in range(5)}
    assert len(threads) == 1
    assert await worker.call("thread_of_coroutines") not in threads
    # A coroutine answers while a plain method runs, and so does a ping.
    slow = asyncio.ensure_future(worker.call("sleep", 600))
    assert await worker.call("nap", 0) == "napped"
    assert await worker.health("ping", 10) == []
    assert not slow.done()
    slow.cancel()


async def test_ranks_see_calls_in_one_order(start: Start) -> None:
    group = await start(2)
    names = [f"call {number}" for number in range(30)]
    await asyncio.gather(*(group.call("note", name) for name in names))
    assert [await worker.call("noted") for worker in group.workers] == [names, names]


async def test_large_arguments_are_read_from_the_store_and_not_copied(pair: WorkerGroup) -> None:
    flat = Flat(torch.arange(300_000), {"half": torch.ones(200_000, dtype=torch.bfloat16)}, None, 7)
    array = np.arange(200_000, dtype=np.float64)
    for worker in pair.workers:
        found = await worker.call("look_at", array, flat)
        assert found["writeable"] is False
        for place in ("array", "tensor"):
            assert "/dev/shm/plasma" in found[place] or "/tmp/plasma" in found[place], found[place]
        assert found["kinds"] == ["torch.int64", "torch.bfloat16", True]
        assert found["sum"] == float(flat.ids.sum()) + 200_000
        assert found["rest"] == (None, 7)


async def test_results_are_ones_own_to_write_to(pair: WorkerGroup) -> None:
    found = await pair.call("tensor", 100_000)
    found["made"][0] = 5
    assert found["made"].tolist()[:3] == [5, 1, 2]
    assert found["half"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["user", "extra"])
async def test_errors_of_strop_arrive_as_themselves(pair: WorkerGroup, kind: str) -> None:
    expected = UserError if kind == "user" else MissingExtra
    with pytest.raises(expected) as caught:
        await pair.workers[0].call("fail", kind)
    assert type(caught.value) is expected
    if kind == "user":
        assert (caught.value.what, caught.value.where, caught.value.mend) == ("a bad key", "toy.key", "mend it")
    assert "in fail" in str(caught.value.__cause__)
    # The worker is as it was.
    assert await pair.call("add", 1) == (0, 2, 11)


async def test_the_first_rank_that_raises_is_named_and_its_peers_are_ended(start: Start) -> None:
    group = await start(2)
    pids = [worker.pid for worker in group.workers]
    with pytest.raises(RunFailure, match="trainer 1 failed: ValueError: odd value") as caught:
        await group.call("fail", "odd", 1, others_sleep=600)
    assert "in fail" in str(caught.value.__cause__)
    await until(lambda: not any(map(psutil.pid_exists, pids)))
    with pytest.raises(RunFailure, match="trainer 1 failed"):
        await group.call("add", 1)
    await group.start_all()
    await group.make("toys:make_toy_later", base=20)
    assert await group.call("add", 1) == (0, 2, 21)


async def test_an_exit_of_the_hosted_object_is_an_error(pair: WorkerGroup) -> None:
    with pytest.raises(RunFailure, match="trainer 0 failed: SystemExit: 3"):
        await pair.workers[0].call("fail", "exit")


async def test_a_time_out_names_who_has_not_answered(start: Start) -> None:
    group = await start(2)
    with pytest.raises(RunFailure, match=r"hang_or_die was not answered within 0.5 s by trainer 0, trainer 1"):
        await group.call("hang_or_die", 9, "SIGKILL", timeout=0.5)


async def test_a_factory_that_is_not_there_is_named(start: Start) -> None:
    group = await start(1, make=False)
    with pytest.raises(RunFailure, match="make_nothing"):
        await group.make("toys:make_nothing")


async def test_what_workers_print_is_in_their_own_files(start: Start, tmp_path: Any, notices: list[str]) -> None:
    group = await start(2)
    await group.call("speak")
    log = tmp_path / "logs" / "trainer-1.log"
    await until(lambda: log.exists() and "a warned warning" in log.read_text())
    lines = log.read_text().splitlines()
    for words in ("plain words", "words of an error", "words of a child"):
        assert f"trainer 1 | {words}" in lines
    assert all(line.startswith("trainer 1 | ") for line in lines)
    assert any("a logged warning" in line for line in lines)
    await until(lambda: len([n for n in notices if "warn" in n]) >= 4)
    assert {n.split(" | ")[0] for n in notices} == {"trainer 0", "trainer 1"}
    assert any("trainer 1 | WARNING toy: a logged warning" in n for n in notices)
    assert not any("plain words" in n for n in notices)


async def test_a_call_beside_others_holds_none_of_them_up(start: Start) -> None:
    group = await start(2)
    beside = asyncio.ensure_future(group.call("sleep_beside", 600.0, beside=True))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        assert await group.call("add", 1) == (0, 2, 11)
    assert not beside.done()
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    assert await group.call("sleep_beside", 0.0, beside=True) == "slept beside"
