"""Weights for an engine that takes the place of a lost one: which, when, and never half of an update."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from strop.cluster.supervision import WorkerLost
from strop.loops.remote_publisher import RemotePublisher

pytest.importorskip("ray")


class Engine:
    """A process that an engine is in."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost: WorkerLost | None = None
        self._gone = asyncio.Event()

    def lose(self) -> None:
        self.lost = WorkerLost("engine", self.rank, "it was killed", node="n", host="h", pid=7, log=None, last=[])
        self._gone.set()

    async def gone(self) -> None:
        await self._gone.wait()


class World:
    """What a publisher stands on; `published` has (version, whole, engines that took it)."""

    def __init__(self, count: int = 2) -> None:
        self.engines = SimpleNamespace(workers=[Engine(rank) for rank in range(count)])
        self.trainers = SimpleNamespace()
        self.published: list[tuple[int, bool, int]] = []
        self.connected = 0
        self.updating = False
        self.publisher = RemotePublisher(self, None, wait=5.0)  # type: ignore[arg-type]
        self.publisher._publisher = self  # type: ignore[assignment]

    async def engines_in_place(self) -> list[Engine]:
        for index, worker in enumerate(self.engines.workers):
            if worker.lost is not None:
                await self.again(index)
        return list(self.engines.workers)

    async def again(self, index: int) -> Engine:
        """Another process in a place."""
        await asyncio.sleep(0)
        self.engines.workers[index] = Engine(index)
        return self.engines.workers[index]

    async def connect(self) -> None:
        self.connected += 1

    def loss(self) -> WorkerLost | None:
        return next((worker.lost for worker in self.engines.workers if worker.lost is not None), None)

    async def publish(self, trainer: Any, engines: dict[str, Any], *, version: int, whole: bool) -> dict[str, float]:
        assert not self.updating, "weights were read while they were changed"
        await asyncio.sleep(0)
        self.published.append((version, whole, len(engines)))
        return {}


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def give(world: World, worker: Engine) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(world.publisher.give(worker))  # type: ignore[arg-type]


async def test_it_gets_what_the_others_serve_while_the_trainer_has_it() -> None:
    world = World()
    await world.publisher.publish(None, version=4)
    world.engines.workers[1].lose()
    await world.publisher.give(await world.again(1))  # type: ignore[arg-type]
    assert world.published == [(4, True, 2), (4, True, 2)]
    # Whoever is there already is connected no more.
    await world.publisher.publish(None, version=5)
    assert (world.published[-1], world.connected) == ((5, False, 2), 2)


async def test_during_an_update_it_waits_and_then_for_the_publication() -> None:
    """Neither half of an update, nor a version that the other engine does not serve yet."""
    world = World()
    await world.publisher.publish(None, version=4)
    async with world.publisher.updating(5):
        world.updating = True
        world.engines.workers[1].lose()
        given = give(world, await world.again(1))
        await turns()
        world.updating = False
    await turns()
    assert not given.done()
    assert world.published == [(4, True, 2)]
    await world.publisher.publish(None, version=5)
    await asyncio.wait_for(given, 5)
    assert world.published == [(4, True, 2), (5, True, 2)]


async def test_where_none_serves_any_more_it_does_not_wait() -> None:
    world = World()
    await world.publisher.publish(None, version=4)
    async with world.publisher.updating(5):
        pass
    for worker in world.engines.workers:
        worker.lose()
    # Both places are filled, and it moves once.
    found = [await world.again(index) for index in (0, 1)]
    await asyncio.wait_for(asyncio.gather(*(give(world, worker) for worker in found)), 5)
    assert world.published == [(4, True, 2), (5, True, 2)]


async def test_the_loss_of_the_last_other_one_ends_its_waiting() -> None:
    world = World()
    await world.publisher.publish(None, version=4)
    async with world.publisher.updating(5):
        pass
    world.engines.workers[1].lose()
    given = give(world, await world.again(1))
    await turns()
    assert not given.done()
    world.engines.workers[0].lose()
    await asyncio.wait_for(given, 5)
    assert world.published[-1] == (5, True, 2)


async def test_one_that_is_lost_while_it_waits_is_no_longer_waited_for() -> None:
    world = World()
    await world.publisher.publish(None, version=4)
    async with world.publisher.updating(5):
        pass
    world.engines.workers[1].lose()
    worker = await world.again(1)
    given = give(world, worker)
    await turns()
    worker.lose()
    with pytest.raises(WorkerLost, match="engine 1 is lost"):
        await asyncio.wait_for(given, 5)
    assert world.published == [(4, True, 2)]


async def test_a_publication_fills_the_places_of_those_that_are_lost_first() -> None:
    world = World()
    await world.publisher.publish(None, version=4)
    world.engines.workers[0].lose()
    await world.publisher.publish(None, version=5)
    assert world.published == [(4, True, 2), (5, True, 2)]
    assert world.loss() is None
    # What the router makes of the loss later finds it served.
    await world.publisher.give(world.engines.workers[0])
    assert len(world.published) == 2
