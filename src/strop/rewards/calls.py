"""Calls of ordinary functions in daemon threads, awaited and, when they take too long, abandoned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Abandoned(Exception):
    """A call that was not waited for any longer."""


class Slots:
    """Places for so many calls at a time, for whichever event loop asks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._now: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def here(self) -> asyncio.Semaphore:
        """The places of the running loop: a semaphore belongs to the loop that waits for it."""
        loop = asyncio.get_running_loop()
        if self._now is None or self._now[0] is not loop:
            self._now = (loop, asyncio.Semaphore(self._count))
        return self._now[1]


async def call(function: Callable[[], T], *, name: str, timeout: float | None = None) -> T:
    """Run a function in a daemon thread of its own.

    Raises:
        Abandoned: it took longer than `timeout` seconds. A thread cannot be killed, so it goes on; being a daemon, it
            does not keep the process alive.
        Whatever the function raised, `SystemExit` included.
    """
    running = _Call(function, asyncio.get_running_loop())
    threading.Thread(target=running.run, name=f"strop-{name}", daemon=True).start()
    await asyncio.wait([running.finished], timeout=timeout)
    # The call itself is asked, not the clock: a loop that was busy elsewhere sees both at once.
    if not running.done:
        raise Abandoned
    if isinstance(running.error, asyncio.CancelledError):
        # It is not the one who waits that was cancelled.
        raise RuntimeError("the call was cancelled from within") from running.error
    if running.error is not None:
        raise running.error
    return running.result[0]


class _Call(Generic[T]):
    """One call; it leaves a result or an error."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._loop = loop
        self.finished: asyncio.Future[None] = loop.create_future()
        self.result: list[T] = []
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return bool(self.result) or self.error is not None

    def run(self) -> None:
        try:
            self.result.append(self._function())
        except BaseException as error:  # A `sys.exit()` in a reward must not pass as a hang.
            self.error = error
        try:
            self._loop.call_soon_threadsafe(self._announce)
        except RuntimeError:  # The loop is closed: nobody waits any more.
            return

    def _announce(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
