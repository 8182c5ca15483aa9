"""Waiting for what other processes do, and groups that several tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from strop.cluster.group import WorkerGroup
from strop.cluster.placement import Ask, Placement, place
from strop.cluster.supervision import Supervisor
from strop.config.cluster import SupervisionSettings

Start = Callable[..., Awaitable[WorkerGroup]]


async def until(true: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)


@contextmanager
def shared_group(ask: Ask, function: str, /, **arguments: Any) -> Iterator[WorkerGroup]:
    """A group for tests that leave it as it was, each with an event loop of its own."""
    supervisor = Supervisor(SupervisionSettings())

    async def begin() -> tuple[WorkerGroup, Placement]:
        placement = await place([ask], wait=60)
        group = await WorkerGroup.start(placement.roles[ask.role], supervisor, run="shared", logs=None, threads=0)
        await group.make(function, **arguments)
        return group, placement

    group, placement = asyncio.run(begin())
    yield group
    asyncio.run(group.close())
    supervisor.close()
    placement.release()
