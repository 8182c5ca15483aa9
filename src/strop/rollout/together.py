"""Waiting for several things of which all are needed: when one fails the others are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from strop.rollout.engine import SampleRequest, SampleResult, Samples

T = TypeVar("T")
Ended = Callable[[int, SampleResult], None]
"""Told of a completion that is there, by the place of its request."""


async def all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all; when one fails the others are cancelled, which `gather` alone leaves running.

    It takes half as long as `gather`, which lets the event loop tell it of each that has ended.
    """
    loop = asyncio.get_running_loop()
    found: dict[int, T] = {}
    over = loop.create_future()

    async def one(place: int, awaited: Awaitable[T]) -> None:
        try:
            found[place] = await awaited
        except BaseException as error:
            if not over.done():
                over.set_exception(error)
            raise
        if len(found) == len(work) and not over.done():
            over.set_result(None)

    running = [loop.create_task(one(place, awaited)) for place, awaited in enumerate(work)]
    try:
        if running:
            await over
    except BaseException:
        await cancel(running)
        raise
    return [found[place] for place in range(len(work))]


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def sample_all(engine: Samples, requests: Sequence[SampleRequest], ended: Ended) -> None:
    """Sample completions; each is told of when it is there, and when one fails the others are given up.

    An engine that has `generate_all`, with these arguments, is asked once: a task for each request takes longer than
    all else that is done for it. Where its `generate` has been replaced since, that one is asked.
    """
    if len(requests) == 1:
        # Who waits for the engine itself can ask for the next turn before it takes its next step.
        ended(0, await engine.generate(requests[0]))
        return
    if takes_groups(engine):
        await engine.generate_all(requests, ended)  # type: ignore[attr-defined]
        return

    async def one(at: int, request: SampleRequest) -> None:
        ended(at, await engine.generate(request))

    await all_or_none([one(at, request) for at, request in enumerate(requests)])


def takes_groups(engine: Samples) -> bool:
    """Whether an engine has `generate_all`, and no `generate` that a class derived from its own, or somebody else, has
    put in the place of the one that goes with it."""
    for names in (getattr(engine, "__dict__", {}), *map(vars, type(engine).__mro__)):
        if "generate_all" in names:
            return True
        if "generate" in names:
            return False
    return False


async def as_ended(futures: Iterable[asyncio.Future[SampleResult]], ended: Ended) -> None:
    """Wait for what nobody else waits for; each is told of when it is there.

    When one fails, or cannot be begun, the others are cancelled.
    """
    over = asyncio.get_running_loop().create_future()
    begun: list[asyncio.Future[SampleResult]] = []
    left = 0

    def one(at: int, future: asyncio.Future[SampleResult]) -> None:
        nonlocal left
        left -= 1
        try:
            result = future.result()
            if not over.done():
                ended(at, result)
        except BaseException as error:
            if not over.done():
                over.set_exception(error)
        if not left and not over.done():
            over.set_result(None)

    try:
        begun += futures
        left = len(begun)
        for at, future in enumerate(begun):
            future.add_done_callback(partial(one, at))
        if begun:
            await over
    finally:
        for future in begun:
            future.cancel()
