"""Messages to a worker: gathered during a turn of the event loop, and sent in the order in which they were made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from strop.cluster.handle import WorkerHandle


class Outbox:
    """One side's messages to one worker.

    Args:
        flush: sends what was gathered, by `send`. failed: told of a message that could not be delivered.
    """

    def __init__(self, worker: WorkerHandle, flush: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._worker, self._flush, self._failed = worker, flush, failed
        self._soon = False
        self._sending: set[asyncio.Task[None]] = set()

    def soon(self) -> None:
        """Flush after this turn of the event loop, together with what else is asked for in it."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._turn)

    def send(self, method: str, message: Any, *, timeout: float | None = None) -> None:
        """Call a method of the worker's object after all messages before have got there."""
        before = list(self._sending)

        async def send() -> None:
            try:
                if before:
                    await asyncio.wait(before)
                await self._worker.call(method, message, timeout=timeout)
            except Exception as error:
                self._failed(error)

        task = asyncio.get_running_loop().create_task(send())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def sent(self) -> None:
        """Flush, and wait until everything has got there."""
        self._flush()
        if self._sending:
            await asyncio.wait(set(self._sending))

    def _turn(self) -> None:
        self._soon = False
        self._flush()
