"""An engine that lives in another process, with the protocol of `rollout/engine.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from strop.cluster.engine_host import Ragged, Requests, Results
from strop.cluster.handle import WorkerHandle
from strop.cluster.outbox import Outbox
from strop.cluster.supervision import WorkerLost
from strop.rollout.engine import EngineStats, SampleRequest, SampleResult, WeightUpdate
from strop.rollout.together import Ended, as_ended

POLL = 10.0
"""Seconds that a question for results stays open while there are none."""


class RemoteEngine:
    """Speaks to an `EngineHost` in a worker.

    Requests of one turn of the event loop go in one message; one question at a time is open for results, and its answer
    brings all that finished since the last.

    Args:
        worker: whose object, or a part of it, is the `EngineHost`. path: of that part, such as "engine".
    """

    def __init__(self, worker: WorkerHandle, path: str = "") -> None:
        self.worker = worker
        self._prefix = f"{path}." if path else ""
        self._next = 0
        self._unsent: list[tuple[int, SampleRequest]] = []
        self._given_up: list[int] = []
        self._waiting: dict[int, asyncio.Future[SampleResult]] = {}
        self._outbox = Outbox(worker, self._flush, self._fail)
        self._poll: asyncio.Task[None] | None = None
        self._stats = EngineStats()

    async def generate(self, request: SampleRequest) -> SampleResult:
        """Sample one completion.

        Raises:
            WorkerLost: the engine's process is gone. StropError: the request failed there.
        """
        number, future = self._submit(request)
        try:
            return await future
        finally:
            self._give_up(number)

    async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
        """See `sample_all`."""
        asked = [self._submit(request) for request in requests]
        try:
            await as_ended([future for _, future in asked], ended)
        finally:
            for number, _ in asked:
                self._give_up(number)

    def _submit(self, request: SampleRequest) -> tuple[int, asyncio.Future[SampleResult]]:
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._unsent.append((number, request))
        self._outbox.soon()
        return number, future

    def _give_up(self, number: int) -> None:
        """Nobody waits for a request any longer; what has an answer is not waiting."""
        if self._waiting.pop(number, None) is not None:
            self._given_up.append(number)
            self._outbox.soon()

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        """What each request has so far."""
        streams, results = await self._forward("under_way")
        return {tuple(stream): one for stream, (_, one) in zip(streams.lists(), results.numbered(), strict=True)}

    async def score(self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        found: Ragged = await self._forward("score", Ragged.of(token_lists, np.int32), temperature)
        return np.split(found.flat, np.cumsum(found.lengths)[:-1]) if len(found.lengths) else []

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take new weights; returns the version that is served from now on."""
        return int(await self._forward("update_weights", update))

    async def pause(self) -> None:
        await self._forward("pause")

    async def resume(self) -> None:
        await self._forward("resume")

    async def abort(self) -> None:
        await self._forward("abort")

    async def sleep(self) -> None:
        await self._forward("sleep")

    async def wake(self) -> None:
        await self._forward("wake")

    def take_stats(self) -> EngineStats:
        """What came with the results so far; the engine's last step may come with the next ones."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    async def close(self) -> None:
        """Close the engine; its process is ended by who started it. One whose process is gone is closed enough."""
        try:
            if self.worker.lost is None:
                with contextlib.suppress(WorkerLost):
                    await self._forward("close")
        finally:
            if self._poll is not None:
                self._poll.cancel()
            for future in self._waiting.values():
                future.cancel()
            self._waiting.clear()

    async def _forward(self, method: str, *args: Any) -> Any:
        """Call a method of the engine after all requests that were made before have got there."""
        await self._outbox.sent()
        return await self.worker.call(self._prefix + method, *args)

    def _flush(self) -> None:
        given_up, self._given_up = self._given_up, []
        wanted = [(number, request) for number, request in self._unsent if number in self._waiting]
        # What was given up before it was sent is unknown over there.
        unsent = {number for number, _ in self._unsent}
        given_up = [number for number in given_up if number not in unsent]
        self._unsent = []
        if wanted:
            self._outbox.send(self._prefix + "submit", Requests.of(wanted))
        if given_up:
            self._outbox.send(self._prefix + "cancel", np.array(given_up, dtype=np.int64))
        if self._waiting and (self._poll is None or self._poll.done()):
            self._poll = asyncio.get_running_loop().create_task(self._collect())

    async def _collect(self) -> None:
        """Ask for results as long as somebody waits for one."""
        try:
            while self._waiting:
                found: Results = await self.worker.call(f"{self._prefix}finished", POLL)
                self._add(found.stats)
                for number, result in found.numbered():
                    future = self._waiting.pop(number, None)
                    if future is not None and not future.done():
                        future.set_result(result)
                for number, error in found.failed():
                    future = self._waiting.pop(number, None)
                    if future is not None and not future.done():
                        future.set_exception(error)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Nothing more will come of what was asked."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def _add(self, stats: EngineStats) -> None:
        self._stats.prompt_tokens += stats.prompt_tokens
        self._stats.sampled_tokens += stats.sampled_tokens
        self._stats.seconds += stats.seconds
        self._stats.sequences += stats.sequences
        # Levels, not counts: the last one is the one that holds.
        self._stats.extra |= stats.extra
