"""The engine's side of `remote_engine.py`: takes many requests in one message, and gives back many results in one.

Token ids, log-probabilities and versions are flat arrays with lengths, so a message of a thousand completions is a few
buffers and not a million Python objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strop.cluster.worker import load
from strop.errors import RunFailure, StropError
from strop.rollout.engine import Engine, EngineStats, SampleRequest, SampleResult, SampleSettings, WeightUpdate

FINISHES = ("stop", "length", "aborted")


@dataclass
class Ragged:
    """Lists of numbers laid end to end: `flat` [sum of lengths], `lengths` [n] int32."""

    flat: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Sequence[float] | np.ndarray], dtype: Any) -> Ragged:
        lengths = np.fromiter(map(len, parts), dtype=np.int32, count=len(parts))
        return cls(np.concatenate([np.zeros(0, dtype), *(np.asarray(one, dtype) for one in parts)]), lengths)

    def arrays(self) -> list[np.ndarray]:
        """Each part again, a view."""
        ends = np.cumsum(self.lengths).tolist()
        return [self.flat[end - length : end] for end, length in zip(ends, self.lengths.tolist(), strict=True)]

    def lists(self) -> list[list[Any]]:
        """Each part again, as a Python list."""
        return [one.tolist() for one in self.arrays()]


@dataclass
class Requests:
    """Many requests: `ids` [n] int64, the prompts that differ, and for each request which of them is its own.

    prompts: int32. prompt_of, settings_of: [n] int32. streams: int64. begun: what was sampled before, by the places
    of the requests that have some.
    """

    ids: np.ndarray
    prompts: Ragged
    prompt_of: np.ndarray
    settings: list[SampleSettings]
    settings_of: np.ndarray
    streams: Ragged
    begun: Results

    @classmethod
    def of(cls, numbered: Sequence[tuple[int, SampleRequest]]) -> Requests:
        prompts: dict[tuple[int, ...], int] = {}
        settings: dict[SampleSettings, int] = {}
        requests = [request for _, request in numbered]
        prompt_of = [prompts.setdefault(r.tokens, len(prompts)) for r in requests]
        settings_of = [settings.setdefault(r.settings, len(settings)) for r in requests]
        return cls(
            np.array([number for number, _ in numbered], dtype=np.int64),
            Ragged.of(list(prompts), np.int32),
            np.array(prompt_of, dtype=np.int32),
            list(settings),
            np.array(settings_of, dtype=np.int32),
            Ragged.of([r.stream for r in requests], np.int64),
            Results.of([(at, r.begun) for at, r in enumerate(requests) if r.begun is not None]),
        )

    def numbered(self) -> list[tuple[int, SampleRequest]]:
        """The requests again, each with its number."""
        prompts = [tuple(prompt) for prompt in self.prompts.lists()]
        begun = dict(self.begun.numbered())
        rows = zip(self.ids.tolist(), self.prompt_of, self.settings_of, self.streams.lists(), strict=True)
        return [
            (number, SampleRequest(prompts[prompt], self.settings[kind], tuple(stream), begun.get(at)))
            for at, (number, prompt, kind, stream) in enumerate(rows)
        ]


@dataclass
class Results:
    """Many results: `ids` [n] int64, tokens int32, logprobs float32, versions int32, `finish` [n] int8 (`FINISHES`).

    errors: what requests failed with instead, by their numbers, as pickles. stats: what the engine did since the last.
    """

    ids: np.ndarray
    tokens: Ragged
    logprobs: Ragged
    versions: Ragged
    finish: np.ndarray
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)

    @classmethod
    def of(
        cls,
        done: Sequence[tuple[int, SampleResult]],
        errors: Sequence[tuple[int, StropError]] = (),
        stats: EngineStats | None = None,
    ) -> Results:
        results = [result for _, result in done]
        return cls(
            np.array([number for number, _ in done], dtype=np.int64),
            Ragged.of([r.tokens for r in results], np.int32),
            Ragged.of([r.logprobs for r in results], np.float32),
            Ragged.of([r.versions for r in results], np.int32),
            np.array([FINISHES.index(r.finish) for r in results], dtype=np.int8),
            [(number, pickle.dumps(error)) for number, error in errors],
            EngineStats() if stats is None else stats,
        )

    def numbered(self) -> list[tuple[int, SampleResult]]:
        """The results again, each with the number of its request."""
        arrays = (self.tokens.arrays(), self.logprobs.arrays(), self.versions.arrays())
        rows = zip(self.ids.tolist(), *arrays, self.finish.tolist(), strict=True)
        return [(number, SampleResult(t, p, v, FINISHES[f])) for number, t, p, v, f in rows]  # type: ignore[arg-type]

    def failed(self) -> list[tuple[int, StropError]]:
        """Requests that failed, and with what."""
        return [(number, pickle.loads(error)) for number, error in self.errors]


class EngineHost:
    """An engine in a worker, as `RemoteEngine` speaks to it.

    Args:
        engine: what samples. name: what messages call it.
    """

    def __init__(self, engine: Engine, name: str = "the engine") -> None:
        self.engine = engine
        self._name = name
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: list[tuple[int, SampleResult]] = []
        self._errors: list[tuple[int, StropError]] = []
        self._news = asyncio.Event()

    async def submit(self, requests: Requests) -> None:
        """Begin; what comes of it is in `finished`."""
        for number, request in requests.numbered():
            self._running[number] = asyncio.get_running_loop().create_task(self._sample(number, request))

    async def cancel(self, ids: np.ndarray) -> None:
        """Nobody waits for these any more."""
        for number in ids.tolist():
            if task := self._running.pop(number, None):
                task.cancel()

    async def finished(self, wait: float) -> Results:
        """What has finished since the last time, at least one result; nothing after `wait` seconds without any."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), wait)
        # Completions that end in one step of the engine wake up one after the other.
        await asyncio.sleep(0)
        self._news.clear()
        done, self._done = self._done, []
        errors, self._errors = self._errors, []
        return Results.of(done, errors, self.engine.take_stats())

    async def under_way(self) -> tuple[Ragged, Results]:
        """(streams int64, what there is so far of each) of requests that have not ended."""
        found = await self.engine.under_way()
        return Ragged.of(list(found), np.int64), Results.of(list(enumerate(found.values())))

    async def score(self, streams: Ragged, temperature: float) -> Ragged:
        """[L] float32 for each stream of int32."""
        found = await self.engine.score(streams.lists(), temperature=temperature)
        return Ragged(np.concatenate([*found, np.zeros(0, np.float32)]).astype(np.float32), streams.lengths)

    async def update_weights(self, update: WeightUpdate) -> int:
        return await self.engine.update_weights(update)

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    async def abort(self) -> None:
        # A request that has just come in must have reached the engine before.
        await asyncio.sleep(0)
        await self.engine.abort()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._running.clear()
        await self.engine.close()

    async def _sample(self, number: int, request: SampleRequest) -> None:
        try:
            result = await self.engine.generate(request)
            # Looked up after the wait: the list is another one after each question for results.
            self._done.append((number, result))
        except StropError as error:
            self._errors.append((number, error))
        except Exception as error:
            failure = RunFailure(f"{self._name} failed: {type(error).__name__}: {error}")
            failure.add_note("".join(traceback.format_exception(error)))
            self._errors.append((number, failure))
        self._running.pop(number, None)
        self._news.set()


def host(*, factory: str, name: str = "the engine", **kwargs: Any) -> EngineHost:
    """An engine by "module:function" and its arguments, ready to be asked from elsewhere; for `WorkerGroup.make`."""
    return EngineHost(load(factory)(**kwargs), name)
