"""Publication between processes: the publisher's view of ranks and engines that are Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.cluster.group import WorkerGroup
from strop.cluster.handle import WorkerHandle
from strop.errors import RunFailure
from strop.publishing.manifest import Fault, Manifest
from strop.publishing.proof import Probe
from strop.publishing.publisher import Publisher
from strop.publishing.sides import Delivered
from strop.publishing.transports.protocol import Offer
from strop.rollout.together import cancel

if TYPE_CHECKING:
    from strop.loops.processes import Processes


class RemotePublisher:
    """Publishes from trainer ranks to engines, wherever they are.

    An update changes the weights that a publication reads, so that they go one after the other.

    An engine that takes the place of a lost one gets the weights that the others serve, if the trainer has them still.
    Otherwise it waits for the next ones, that no engine goes over to other weights between two publications: there may
    be completions, or evaluations, which are to be of one version. Where no engine serves any more nothing of the kind
    is under way, and the trainer's weights are published at once, under their own number.
    """

    def __init__(self, processes: Processes, probe: Probe, *, wait: float) -> None:
        self._processes = processes
        self._publisher = Publisher(probe, wait=wait)
        self._turn = asyncio.Lock()
        self._held: int | None = None
        self._version: int | None = None
        self._serving: set[WorkerHandle] = set()
        self._published = asyncio.Event()

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """While the trainer's weights become those of a version."""
        async with self._turn:
            yield
            self._held = version

    async def publish(self, trainer: Any, *, version: int) -> dict[str, float]:
        """Make every engine serve `version`; returns metrics.

        Raises:
            RunFailure: an engine does not hold or serve the weights. WorkerLost: a process was lost over it.
        """
        processes = self._processes
        async with self._turn:
            self._held = version
            if processes.engines is None:
                return dict(await processes.trainers.call("publish", version))
            return await self._publish(version)

    async def give(self, worker: WorkerHandle) -> None:
        """Wait until an engine that has just been started serves weights.

        Raises:
            RunFailure, WorkerLost: as `publish`.
        """
        engines = self._processes.engines
        assert engines is not None
        while worker not in self._serving:
            published = self._published
            async with self._turn:
                if worker in self._serving or self._held is None:
                    return
                if worker.lost is not None:
                    raise worker.lost
                others = any(other in self._serving and other.lost is None for other in engines.workers)
                if self._held == self._version or not others:
                    await self._publish(self._held)
                    return
            waited = [other.gone() for other in engines.workers if other.lost is None]
            tasks = [asyncio.ensure_future(one) for one in (published.wait(), *waited)]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(tasks)

    async def _publish(self, version: int) -> dict[str, float]:
        processes = self._processes
        workers = await processes.engines_in_place()
        whole = not self._serving.issuperset(workers)
        self._serving = set()
        try:
            if whole:
                await processes.connect()
            engines = {str(worker.rank): _EngineSide(worker) for worker in workers}
            found = await self._publisher.publish(
                _TrainerSide(processes.trainers), engines, version=version, whole=whole
            )
        except RunFailure as failure:
            # What a loss left half done is not mended here: the run goes on from its last checkpoint.
            if loss := processes.loss():
                raise loss from failure
            raise
        self._version, self._serving = version, set(workers)
        published, self._published = self._published, asyncio.Event()
        published.set()
        return found


class _TrainerSide:
    """The publisher's view of the ranks."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    async def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        return await self._group.call("side.offer", version, takers=takers, whole=whole)

    async def deliver(self) -> Delivered:
        return await self._group.call("side.deliver")

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._group.call("side.score", token_lists)

    async def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._group.call("side.rounding", token_lists)


class _EngineSide:
    """The publisher's view of one engine."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    async def pause(self) -> None:
        await self._worker.call("side.pause")

    async def take(self, offer: Offer) -> None:
        await self._worker.call("side.take", offer)

    async def verify(self, manifest: Manifest) -> list[Fault]:
        return await self._worker.call("side.verify", manifest)

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._worker.call("side.score", token_lists)

    async def commit(self, version: int) -> None:
        await self._worker.call("side.commit", version)

    async def resume(self) -> None:
        await self._worker.call("side.resume")
