"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from strop.cluster.group import WorkerGroup

Start = Callable[..., Awaitable[WorkerGroup]]


async def until(true: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)
