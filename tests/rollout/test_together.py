"""Completions of a group are waited for together: each is told of once, and when one fails none is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.together import Ended, as_ended, sample_all


def result(number: int) -> SampleResult:
    return SampleResult([number], [-0.5], [0], "stop")


class OneByOne:
    """An engine that knows single requests only; each waits for its future."""

    def __init__(self, count: int) -> None:
        self.futures: list[asyncio.Future[SampleResult]] = [
            asyncio.get_running_loop().create_future() for _ in range(count)
        ]

    async def generate(self, request: SampleRequest) -> SampleResult:
        return await self.futures[request.stream[0]]


class Together(OneByOne):
    """One that takes all at once."""

    async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
        await as_ended([self.futures[request.stream[0]] for request in requests], ended)


KINDS = pytest.mark.parametrize("kind", [OneByOne, Together])


def begin(engine: OneByOne, ended: Ended) -> asyncio.Task[None]:
    asked = [SampleRequest((1,), SampleSettings(1), (number,)) for number in range(len(engine.futures))]
    return asyncio.get_running_loop().create_task(sample_all(engine, asked, ended))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@KINDS
@pytest.mark.parametrize("count", [0, 1, 4])
async def test_each_is_told_of_when_it_is_there(kind: type[OneByOne], count: int) -> None:
    engine, told = kind(count), list[tuple[int, int]]()
    running = begin(engine, lambda at, found: told.append((at, int(found.tokens[0]))))
    await turns()
    expected = []
    for number in reversed(range(count)):
        assert not running.done()
        engine.futures[number].set_result(result(10 + number))
        await turns()
        expected.append((number, 10 + number))
        assert told == expected
    await running
    assert told == expected


@KINDS
async def test_when_one_fails_the_others_are_given_up(kind: type[OneByOne]) -> None:
    engine, told = kind(4), list[int]()
    running = begin(engine, lambda at, found: told.append(at))
    await turns()
    engine.futures[1].set_result(result(1))
    engine.futures[2].set_exception(RuntimeError("the engine is gone"))
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await running
    await turns()
    assert told == [1]
    assert [future.cancelled() for future in engine.futures] == [True, False, False, True]


@KINDS
async def test_an_error_of_who_is_told_is_one_of_all(kind: type[OneByOne]) -> None:
    def refuse(at: int, found: SampleResult) -> None:
        raise ValueError(f"not {at}")

    engine = kind(3)
    running = begin(engine, refuse)
    await turns()
    engine.futures[2].set_result(result(2))
    with pytest.raises(ValueError, match="not 2"):
        await running
    await turns()
    assert [future.cancelled() for future in engine.futures] == [True, True, False]


@KINDS
async def test_all_are_given_up_with_who_waits(kind: type[OneByOne]) -> None:
    engine = kind(3)
    running = begin(engine, lambda at, found: None)
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await turns()
    assert all(future.cancelled() for future in engine.futures)


@KINDS
async def test_a_request_that_is_cancelled_elsewhere_ends_all(kind: type[OneByOne]) -> None:
    engine = kind(3)
    running = begin(engine, lambda at, found: None)
    await turns()
    engine.futures[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await turns()
    assert all(future.cancelled() for future in engine.futures)


async def test_who_waits_for_one_waits_for_the_engine_itself() -> None:
    """A turn more of the event loop is a step of the engine, and episodes of many turns would lose one with each."""

    class Never(Together):
        async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
            raise AssertionError

    engine, told = Never(1), list[int]()
    running = begin(engine, lambda at, found: told.append(at))
    await turns()
    engine.futures[0].set_result(result(0))
    await turns(1)
    assert told == [0]
    await running


async def test_a_generate_of_ones_own_is_asked_for_each_completion() -> None:
    class Own(Together):
        async def generate(self, request: SampleRequest) -> SampleResult:
            return result(50 + request.stream[0])

    class Both(Own):
        async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
            for at in range(len(requests)):
                ended(at, result(70 + at))

    async def replaced(request: SampleRequest) -> SampleResult:
        return result(60 + request.stream[0])

    patched = Together(2)
    patched.generate = replaced  # type: ignore[method-assign]
    for engine, expected in ((Own(2), [50, 51]), (patched, [60, 61]), (Both(2), [70, 71])):
        told: dict[int, SampleResult] = {}
        await begin(engine, told.__setitem__)
        assert [told[at].tokens for at in range(2)] == [[one] for one in expected]


async def test_of_several_errors_the_first_is_raised_and_none_is_left_unseen(caplog: pytest.LogCaptureFixture) -> None:
    engine = Together(3)
    running = begin(engine, lambda at, found: None)
    await turns()
    for number, future in enumerate(engine.futures):
        future.set_exception(RuntimeError(f"lost {number}"))
    with pytest.raises(RuntimeError, match="lost 0"):
        await running
    await turns()
    engine.futures.clear()
    assert not caplog.records
