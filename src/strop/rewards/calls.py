"""Calls of ordinary functions in daemon threads, awaited and, when they take too long, abandoned."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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
    """Run a function in a daemon thread that does nothing else meanwhile.

    Raises:
        Abandoned: it took longer than `timeout` seconds. A thread cannot be killed, so it goes on; being a daemon, it
            does not keep the process alive.
        Whatever the function raised, `SystemExit` included.
    """
    running = _Call(function, asyncio.get_running_loop())
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.run(running, f"strop-{name}")
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


class _Thread:
    """A thread for one call after another: starting one takes longer than many a verifier."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[_Call[Any], str]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def run(self, call: _Call[Any], name: str) -> None:
        self._calls.put((call, name))

    def _work(self) -> None:
        while True:
            call, threading.current_thread().name = self._calls.get()
            call.run()
            # What was asked and answered is not to live until the next call.
            del call
            _idle.append(self)


_idle: list[_Thread] = []
"""Threads whose call has ended; one that is abandoned comes back when it ends after all."""
# A child process has none of its parent's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)
