"""Several engines behind the protocol of one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from strop.cluster.supervision import WorkerLost
from strop.rollout.busy import Busy, Interval
from strop.rollout.engine import Engine, EngineStats, SampleRequest, SampleResult, WeightUpdate
from strop.rollout.together import Ended, sample_all

REMEMBERED = 4096
"""Prompts whose engine is kept in mind; an older one that comes back may go to another, at the cost of a prefill."""

Restart = Callable[[int, WorkerLost], Awaitable[Engine]]
Reload = Callable[[int, Engine], Awaitable[None]]


def prompt_key(stream: tuple[int, ...]) -> tuple[int, ...]:
    """What all samples and turns of one prompt have in common.

    Streams of training begin with the number of the group and go on with the sample; those of evaluations begin below
    zero, and the prompt comes after that.
    """
    return stream[:1] if stream[:1] >= (0,) else stream[:2]


class EngineRouter:
    """Sends all requests of a prompt to one engine, and what belongs to no request to each.

    Which engine samples does not change what is sampled: draws are keyed by the sample. A new prompt goes to the engine
    with the fewest tokens outstanding, the first of those. Requests of an engine that is lost go to another one, and
    wait for the one that takes its place only where there is no other.

    Args:
        engines: at least one. restart: called with the index of an engine whose process is lost, and why; gives one in
            its place, or raises the loss. reload: returns when that one serves weights that are proved.
    """

    def __init__(
        self, engines: Sequence[Engine], *, restart: Restart | None = None, reload: Reload | None = None
    ) -> None:
        self.engines = list(engines)
        self._restart, self._reload = restart, reload
        self._outstanding = [0] * len(self.engines)
        self._busy = [Busy() for _ in self.engines]
        self._home: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._repairs: dict[int, asyncio.Task[None]] = {}
        self._paused = False
        self.begun_anew = 0
        """Requests that were begun again because their engine was lost."""

    async def generate(self, request: SampleRequest) -> SampleResult:
        """Sample one completion; where its engine is lost on the way, once more on another.

        Raises:
            WorkerLost: it was lost, and nothing may take its place.
        """
        found: list[SampleResult] = []
        await self.generate_all([request], lambda _, result: found.append(result))
        return found[0]

    async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
        """The same of several requests of one prompt; see `sample_all`."""
        left = dict(enumerate(requests))
        while left:
            for repair in self._repairs.values():
                if repair.done():
                    repair.result()
            await self._sample_on(self._engine_for(prompt_key(requests[0].stream)), left, ended)

    async def _sample_on(self, index: int, left: dict[int, SampleRequest], ended: Ended) -> None:
        """Sample on one engine; what it gave is no longer left. Where it is lost, or has yet to take the place of one
        that is, something stays."""
        places, engine = list(left), self.engines[index]
        tokens = {at: len(request.tokens) + request.settings.max_new_tokens for at, request in left.items()}

        def there(at: int, result: SampleResult) -> None:
            place = places[at]
            del left[place]
            self._outstanding[index] -= tokens.pop(place)
            if not left:
                self._busy[index].leave()
            ended(place, result)

        self._outstanding[index] += sum(tokens.values())
        try:
            if index in self._repairs:
                await self._repaired(index)
                return
            self._busy[index].enter()
            try:
                await sample_all(engine, list(left.values()), there)
                if left:
                    raise RuntimeError(f"an engine has answered {len(places) - len(left)} of {len(places)} requests")
            finally:
                if left:
                    self._busy[index].leave()
        except WorkerLost as loss:
            self._repair(index, engine, loss)
            self.begun_anew += len(left)
        finally:
            self._outstanding[index] -= sum(tokens.values())

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        """What requests have so far; of those of a lost engine nothing is known."""

        async def ask(engine: Engine) -> dict[tuple[int, ...], SampleResult]:
            try:
                return await engine.under_way()
            except WorkerLost:
                return {}

        asked = [engine for index, engine in enumerate(self.engines) if index not in self._repairs]
        return {stream: one for found in await asyncio.gather(*map(ask, asked)) for stream, one in found.items()}

    async def score(self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """What the first engine says of each stream; see `score_each`."""
        return (await self.score_each(token_lists, temperature=temperature))[0]

    async def score_each(
        self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[np.ndarray]]:
        """What every engine says: log-probabilities float32 [L] of each stream, the first one NaN."""
        return await self._each(lambda engine: engine.score(token_lists, temperature=temperature))

    async def update_weights(self, update: WeightUpdate) -> int:
        """Give all engines new weights; returns the version that the last of them serves."""
        return int(min(await self._each(lambda engine: engine.update_weights(update))))

    async def pause(self) -> None:
        self._paused = True
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        self._paused = False
        await self._each(lambda engine: engine.resume())

    async def abort(self) -> None:
        await self._each(lambda engine: engine.abort())

    async def sleep(self) -> None:
        await self._each(lambda engine: engine.sleep(), waits=False)

    async def wake(self) -> None:
        await self._each(lambda engine: engine.wake(), waits=False)

    def take_busy(self) -> list[list[Interval]]:
        """When each engine had something to sample, since this was last asked."""
        return [busy.take() for busy in self._busy]

    def take_stats(self) -> EngineStats:
        """Counts of all engines together; seconds are those of the busiest."""
        all_stats = [engine.take_stats() for engine in self.engines]
        total = EngineStats(seconds=max(stats.seconds for stats in all_stats))
        for stats in all_stats:
            total.prompt_tokens += stats.prompt_tokens
            total.sampled_tokens += stats.sampled_tokens
            total.sequences += stats.sequences
            for name, value in stats.extra.items():
                total.extra[name] = total.extra.get(name, 0.0) + value
        return total

    async def close(self) -> None:
        """Close all engines; one that is lost is closed enough."""
        for repair in self._repairs.values():
            repair.cancel()
        await asyncio.gather(*self._repairs.values(), return_exceptions=True)
        found = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, WorkerLost):
                raise error

    def _engine_for(self, key: tuple[int, ...]) -> int:
        index = self._home.get(key)
        if index is None or index in self._repairs:
            there = [at for at in range(len(self.engines)) if at not in self._repairs]
            index = min(there or range(len(self.engines)), key=lambda at: (self._outstanding[at], at))
            self._home[key] = index
            if len(self._home) > REMEMBERED:
                self._home.popitem(last=False)
        self._home.move_to_end(key)
        return index

    async def _each(self, ask: Callable[[Engine], Awaitable[Any]], *, waits: bool = True) -> list[Any]:
        return list(await asyncio.gather(*(self._on(index, ask, waits) for index in range(len(self.engines)))))

    async def _on(self, index: int, ask: Callable[[Engine], Awaitable[Any]], waits: bool) -> Any:
        """Ask an engine, and whatever takes its place, until there is an answer or no place to take.

        Args:
            waits: otherwise an engine that takes a place is not asked. One is awake, and may be waiting for weights
                that are published only when all others are awake.
        """
        while True:
            if index in self._repairs:
                if not waits and not self._repairs[index].done():
                    return None
                await self._repaired(index)
            engine = self.engines[index]
            try:
                return await ask(engine)
            except WorkerLost as loss:
                self._repair(index, engine, loss)

    def _repair(self, index: int, lost: Engine, loss: WorkerLost) -> None:
        """Have an engine take the place of a lost one.

        Raises:
            WorkerLost: none may.
        """
        if self._restart is None:
            raise loss
        # Somebody else's request may have found out before.
        if self.engines[index] is lost and index not in self._repairs:
            self._repairs[index] = asyncio.get_running_loop().create_task(self._restarted(index, loss))

    async def _repaired(self, index: int) -> None:
        """Wait for a repair.

        Raises:
            Whatever it failed with.
        """
        await asyncio.shield(self._repairs[index])

    async def _restarted(self, index: int, loss: WorkerLost) -> None:
        assert self._restart is not None
        engine = await self._restart(index, loss)
        if self._reload is not None:
            await self._reload(index, engine)
        if self._paused:
            await engine.pause()
        self.engines[index] = engine
        # A repair that failed stays, and all who ask are told.
        del self._repairs[index]
