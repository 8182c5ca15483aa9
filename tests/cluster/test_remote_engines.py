"""Engines in other processes: the same samples as in this one, also when one of them is lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cluster_waiting import Start, shared_group
from toys import tiny_engine

from strop.cluster.handle import WorkerHandle
from strop.cluster.placement import Ask
from strop.cluster.remote_engine import RemoteEngine
from strop.cluster.router import EngineRouter, prompt_key
from strop.cluster.supervision import WorkerLost
from strop.errors import RunFailure
from strop.rollout.engine import EngineStats, SampleRequest, SampleResult, SampleSettings, WeightUpdate

FACTORY = "strop.cluster.engine_host:host"


def requests(prompts: int = 5, samples: int = 3, new: int = 24) -> list[SampleRequest]:
    made = []
    for number in range(prompts):
        prompt = tuple(np.random.default_rng(number).integers(3, 45, size=4 + 7 * number).tolist())
        for sample in range(samples):
            made.append(SampleRequest(prompt, SampleSettings(new + sample), (number, sample, 0)))
    return made


async def sample(engine: Any, asked: list[SampleRequest]) -> list[SampleResult]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(request) for request in asked)))


async def here(asked: list[SampleRequest]) -> list[SampleResult]:
    """What an engine of this process samples."""
    engine = tiny_engine(seed=3)
    found = await sample(engine, asked)
    await engine.close()
    return found


def same(found: list[SampleResult], expected: list[SampleResult]) -> None:
    def told(results: list[SampleResult]) -> list[tuple[list[int], list[int], str]]:
        return [(list(r.tokens), list(r.versions), r.finish) for r in results]

    assert told(found) == told(expected)
    for ours, theirs in zip(found, expected, strict=True):
        # Prompts that enter together are packed together, which rounds otherwise.
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)


class Hosted:
    """Groups of one to a few remote engines, and how they are started again."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.reloaded: list[int] = []

    async def begin(self, count: int, **limits: Any) -> list[RemoteEngine]:
        self.group = await self._start(count, "engine", together=False, make=False, **limits)
        await self.group.make(FACTORY, factory="toys:tiny_engine", seed=3)
        return [RemoteEngine(worker) for worker in self.group.workers]

    async def again(self, index: int, loss: WorkerLost) -> RemoteEngine:
        assert loss.rank == index
        return RemoteEngine(await self.group.restart(index))

    async def reload(self, index: int, engine: Any) -> None:
        self.reloaded.append(index)
        await engine.update_weights(WeightUpdate(4))


@pytest.fixture
def hosted(start: Start) -> Hosted:
    return Hosted(start)


@pytest.fixture(scope="module")
def worker(ray_session: Any) -> Iterator[WorkerHandle]:
    """A worker with an engine, for the tests that leave it as it was."""
    with shared_group(Ask("engine", 1, "cpu", together=False), FACTORY, factory="toys:tiny_engine", seed=3) as group:
        yield group.workers[0]


@pytest.fixture
async def engine(worker: WorkerHandle) -> RemoteEngine:
    """That engine, with the weights of version 0."""
    engine = RemoteEngine(worker)
    await engine.update_weights(WeightUpdate(0))
    await worker.call("engine.take_stats")
    return engine


async def test_samples_scores_and_versions_are_those_of_an_engine_in_this_process(engine: RemoteEngine) -> None:
    asked = requests()
    same(await sample(engine, asked), await here(asked))
    local = tiny_engine(seed=3)
    streams = [[3, 4, 5, 6], [7], [9, 8]]
    theirs = await engine.score(streams, temperature=0.7)
    for ours, other in zip(await local.score(streams, temperature=0.7), theirs, strict=True):
        assert other.dtype == np.float32
        np.testing.assert_allclose(ours, other, atol=1e-5)
    assert await engine.update_weights(WeightUpdate(5)) == 5
    (found,) = await sample(engine, asked[:1])
    assert set(found.versions) == {5}
    stats = engine.take_stats()
    assert stats.sequences == len(asked) + 1
    assert stats.sampled_tokens >= sum(len(r.tokens) for r in await here(asked))
    assert engine.take_stats().sequences == 0


async def test_requests_of_one_moment_travel_together(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    ask = engine.worker.call

    async def counted(method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        return await ask(method, *args, **kwargs)

    monkeypatch.setattr(engine.worker, "call", counted)
    asked = requests(prompts=8)
    await sample(engine, asked)
    assert calls.count("submit") == 1
    # One question for results never overtakes another.
    assert 1 <= calls.count("finished") <= len(asked)


async def test_a_request_that_fails_is_an_error_of_its_own(engine: RemoteEngine) -> None:
    asked = requests(prompts=1)
    bad = SampleRequest((5,) * 600, SampleSettings(4), (9, 0, 0))
    found = await asyncio.gather(engine.generate(bad), *(engine.generate(r) for r in asked), return_exceptions=True)
    assert isinstance(found[0], RunFailure)
    assert "do not fit the context of 512" in str(found[0])
    same(found[1:], await here(asked))


async def test_pausing_aborting_and_giving_up(engine: RemoteEngine) -> None:
    await engine.pause()
    waiting = [asyncio.ensure_future(engine.generate(r)) for r in requests(prompts=2)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    await engine.resume()
    left = await asyncio.wait_for(asyncio.gather(*waiting[1:]), 60)
    same(left, (await here(requests(prompts=2)))[1:])
    await engine.pause()
    waiting = [asyncio.ensure_future(engine.generate(r)) for r in requests(prompts=2)]
    await asyncio.sleep(0)
    await engine.abort()
    assert {r.finish for r in await asyncio.wait_for(asyncio.gather(*waiting), 60)} == {"aborted"}
    await engine.resume()
    await engine.sleep()
    await engine.wake()
    same(await sample(engine, requests()), await here(requests()))


async def test_samples_are_the_same_when_an_engine_is_lost_on_the_way(hosted: Hosted) -> None:
    engines = await hosted.begin(2)
    router = EngineRouter(engines, restart=hosted.again, reload=hosted.reload)
    asked = requests(prompts=4, new=60)
    await engines[1].pause()  # so that its requests are unanswered for certain
    running = asyncio.ensure_future(sample(router, asked))
    await asyncio.sleep(0.3)
    os.kill(hosted.group.workers[1].pid, signal.SIGKILL)
    found = await running
    expected = await here(asked)
    assert [(list(r.tokens), r.finish) for r in found] == [(list(r.tokens), r.finish) for r in expected]
    # The other engine has sampled what was lost, while an engine took the place, and it serves what `reload` gave it.
    assert {version for r in found for version in r.versions} == {0}
    assert router.begun_anew > 0
    assert len(await router.score_each([[3, 4, 5]])) == 2
    assert hosted.reloaded == [1]
    again = await router.engines[1].generate(asked[0])
    assert set(again.versions) == {4}


async def test_requests_wait_for_a_new_engine_where_there_is_no_other(hosted: Hosted) -> None:
    engines = await hosted.begin(1)
    router = EngineRouter(engines, restart=hosted.again, reload=hosted.reload)
    await engines[0].pause()
    asked = requests(prompts=2, new=20)
    running = asyncio.ensure_future(sample(router, asked))
    await asyncio.sleep(0.3)
    os.kill(hosted.group.workers[0].pid, signal.SIGKILL)
    found = await running
    expected = await here(asked)
    assert [(list(r.tokens), r.finish) for r in found] == [(list(r.tokens), r.finish) for r in expected]
    assert hosted.reloaded == [0]
    assert {version for r in found for version in r.versions} == {4}


async def test_a_group_is_sampled_as_its_completions_are(engine: RemoteEngine) -> None:
    asked, found = requests(prompts=1, new=40), dict[int, SampleResult]()
    await engine.generate_all(asked, found.__setitem__)
    same([found[at] for at in range(len(asked))], await here(asked))
    # A group that is given up leaves nothing behind, here or there.
    endless = asyncio.ensure_future(engine.generate_all(requests(prompts=1, new=200), lambda at, result: None))
    while not await engine.under_way():
        await asyncio.sleep(0.01)
    endless.cancel()
    await asyncio.gather(endless, return_exceptions=True)
    assert not engine._waiting
    while await engine.under_way():
        await asyncio.sleep(0.01)


async def test_what_a_lost_engine_has_answered_of_a_group_is_not_sampled_again(hosted: Hosted) -> None:
    engines = await hosted.begin(2)
    router = EngineRouter(engines, restart=hosted.again, reload=hosted.reload)
    short, *long = requests(prompts=1, new=200)
    asked = [short._replace(settings=SampleSettings(2)), *long]
    told = list[tuple[int, SampleResult]]()
    group = asyncio.ensure_future(router.generate_all(asked, lambda at, result: told.append((at, result))))
    while not told:
        await asyncio.sleep(0.01)
    assert [at for at, _ in told] == [0]
    os.kill(hosted.group.workers[0].pid, signal.SIGKILL)
    await group
    assert sorted(at for at, _ in told) == list(range(len(asked)))
    expected = await here(asked)
    for at, result in told:
        assert list(result.tokens) == list(expected[at].tokens)
    assert router.begun_anew == len(long)


async def test_what_is_under_way_is_told_and_gone_on_with(engine: RemoteEngine) -> None:
    asked = requests(prompts=2, new=200)
    expected = await here(asked)
    running = [asyncio.ensure_future(engine.generate(r)) for r in asked]
    known: dict[tuple[int, ...], SampleResult] = {}
    while len(known) < 2:
        known = await engine.under_way()
        await asyncio.sleep(0.01)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    wanted = {r.stream: list(e.tokens) for r, e in zip(asked, expected, strict=True)}
    for stream, part in known.items():
        assert list(part.tokens) == wanted[stream][: len(part.tokens)]
    found = await asyncio.gather(*(engine.generate(r._replace(begun=known.get(r.stream))) for r in asked))
    assert [list(r.tokens) for r in found] == [list(r.tokens) for r in expected]


async def test_a_stopped_engine_without_a_way_back_is_named(hosted: Hosted) -> None:
    engines = await hosted.begin(1, timeout=5.0)
    router = EngineRouter(engines)
    await router.pause()
    running = asyncio.ensure_future(sample(router, requests()))
    await asyncio.sleep(0.2)
    os.kill(hosted.group.workers[0].pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="engine 0 is lost"):
        await running


class Counting:
    """Notes which requests came, and answers when told to."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []
        self.gate = asyncio.Event()

    async def generate(self, request: SampleRequest) -> SampleResult:
        self.asked.append(request)
        await self.gate.wait()
        return SampleResult([1], [0.0], [0], "stop")

    def take_stats(self) -> EngineStats:
        return EngineStats(sequences=len(self.asked), seconds=float(len(self.asked)), extra={"kv_cache_bytes": 1.0})


async def test_a_prompt_has_one_engine_and_the_load_is_even() -> None:
    engines = [Counting(), Counting(), Counting()]
    router = EngineRouter(engines)  # type: ignore[arg-type]
    asked = requests(prompts=12)
    waiting = [asyncio.ensure_future(router.generate(request)) for request in asked]
    await asyncio.sleep(0)
    homes: dict[tuple[int, ...], set[int]] = {}
    for index, engine in enumerate(engines):
        for request in engine.asked:
            homes.setdefault(prompt_key(request.stream), set()).add(index)
    assert len(homes) == 12
    assert all(len(home) == 1 for home in homes.values())
    assert max(Counter(next(iter(home)) for home in homes.values()).values()) <= 6
    tokens = [sum(len(r.tokens) + r.settings.max_new_tokens for r in engine.asked) for engine in engines]
    largest = max(3 * len(r.tokens) + 3 * r.settings.max_new_tokens for r in asked)
    assert max(tokens) - min(tokens) <= largest
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*waiting)
    stats = router.take_stats()
    assert stats.sequences == 36
    assert stats.seconds == max(len(engine.asked) for engine in engines)


def test_samples_and_turns_of_a_prompt_have_one_key() -> None:
    assert {prompt_key(s) for s in [(7, 0, 0), (7, 3, 0), (7, 3, 0, -2), (7, 1, 0, -1, 0, 4)]} == {(7,)}
    assert prompt_key((-1, 5, 0)) == prompt_key((-1, 5, 2)) == (-1, 5)
    assert prompt_key((-1, 6, 0)) != prompt_key((-1, 5, 0))
