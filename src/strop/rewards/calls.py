"""Calls of ordinary functions in daemon threads, awaited and, when they take too long, abandoned."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakSet

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


class Crew:
    """Daemon threads that make so many calls at a time; the others wait, and are made in the order in which they came.

    A thread that has made a call takes the next one itself: to be woken for each takes longer than many a verifier. For
    the same reason one is woken when all that is ready in the event loop has asked, and the loop is woken once for all
    calls that end before it comes round. From any event loop.

    Args:
        size: calls at a time; None for any number.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self.begin()
        _crews.add(self)

    def begin(self) -> None:
        """Be without threads and calls, as a child process is."""
        self._lock = threading.Lock()
        self._waiting: deque[_Call[Any]] = deque()
        self._working = 0
        self._coming = False
        self._asked: asyncio.AbstractEventLoop | None = None
        self._ended: dict[asyncio.AbstractEventLoop, list[_Call[Any]]] = {}

    async def call(self, function: Callable[[], T], *, name: str, timeout: float | None = None) -> T:
        """What a function returns, in a thread that does nothing else meanwhile.

        Raises:
            Abandoned: it took longer than `timeout` seconds from when it began. A thread cannot be killed, so it goes
                on, beside the others of this number; being a daemon, it does not keep the process alive.
            Whatever the function raised, `SystemExit` included.
        """
        running = _Call(function, asyncio.get_running_loop(), f"strop-{name}")
        try:
            self._add(running)
            # The call itself is asked first, not the clock: a loop that was busy elsewhere sees both at once.
            while not running.done and (left := running.left(timeout)) != 0:
                await running.moved(left)
        finally:
            self._leave(running)
        if not running.done:
            raise Abandoned
        if isinstance(running.error, asyncio.CancelledError):
            # It is not the one who waits that was cancelled.
            raise RuntimeError("the call was cancelled from within") from running.error
        if running.error is not None:
            raise running.error
        return running.result[0]

    def work(self) -> None:
        """Make the calls that wait, in this thread, until there is none or one of them is not waited for any longer."""
        with self._lock:
            self._coming = False
        while (call := self._take()) is not None:
            with suppress(Exception):  # the system has no more threads: this one makes all calls
                self._fill()
            call.run()
            self._tell_of(call)
            with self._lock:
                if call.left_behind:  # another thread has its place
                    return

    def _add(self, call: _Call[Any]) -> None:
        with self._lock:
            self._waiting.append(call)
            asked, self._asked = self._asked, call.loop
        if asked is not call.loop:
            call.loop.call_soon(self._begin_for, call.loop)

    def _begin_for(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the calls for which an event loop has asked."""
        with self._lock:
            if self._asked is loop:
                self._asked = None
        try:
            self._fill()
        except BaseException as error:
            with self._lock:
                if self._working:  # whoever is there makes all calls
                    return
                calls, self._waiting = self._waiting, deque()
                for call in calls:
                    call.began, call.error = time.monotonic(), error
            for call in calls:
                self._tell_of(call)

    def _tell_of(self, call: _Call[Any]) -> None:
        """Let its event loop know that a call has ended."""
        with self._lock:
            if (ended := self._ended.get(call.loop)) is not None:  # it has yet to come round for another one
                ended.append(call)
                return
            # One that was closed before it came round never will.
            self._ended = {loop: ended for loop, ended in self._ended.items() if not loop.is_closed()}
            self._ended[call.loop] = [call]
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            call.loop.call_soon_threadsafe(self._announce, call.loop)

    def _announce(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop, [])
        for call in ended:
            call.announce()

    def _fill(self) -> None:
        """See that a thread is at work for what waits, if there may be one more.

        One after the other: the next when this one has begun, which is when it is needed. Of calls that take no time
        one thread makes all, and the others would only take the interpreter lock from each other.
        """
        with self._lock:
            if not self._waiting or self._working == self._size or self._coming:
                return
            self._working += 1
            self._coming = True
        try:
            thread = _idle.pop()
        except IndexError:
            try:
                thread = _Thread()
            except BaseException:  # the system has no more of them
                with self._lock:
                    self._working -= 1
                    self._coming = False
                raise
        thread.work_for(self)

    def _take(self) -> _Call[Any] | None:
        with self._lock:
            if not self._waiting:
                self._working -= 1
                return None
            call = self._waiting.popleft()
            call.began = time.monotonic()
            return call

    def _leave(self, call: _Call[Any]) -> None:
        """Nobody waits for a call any longer: one that has not begun never will, and the place of one that has not
        returned is free."""
        with self._lock:
            if call.began is None:
                self._waiting.remove(call)
                return
            if call.done:  # its thread goes on with the next one
                return
            call.left_behind = True
            self._working -= 1
        self._fill()


class _Call(Generic[T]):
    """One call; it leaves a result or an error."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.loop = loop
        self._function = function
        self._name = name
        self._moved: asyncio.Future[None] = loop.create_future()
        self.result: list[T] = []
        self.error: BaseException | None = None
        self.began: float | None = None
        self.left_behind = False

    @property
    def done(self) -> bool:
        return bool(self.result) or self.error is not None

    def left(self, timeout: float | None) -> float | None:
        """Seconds that it may still take; all of them while it waits to begin."""
        if timeout is None or self.began is None:
            return timeout
        return max(0.0, self.began + timeout - time.monotonic())

    async def moved(self, limit: float | None) -> None:
        """Wait until it has ended, or for so many seconds. `asyncio.wait` takes twice as long to set up."""
        if self._moved.done():
            self._moved = self.loop.create_future()
        alarm = None if limit is None else self.loop.call_later(limit, self.announce)
        try:
            await self._moved
        finally:
            if alarm is not None:
                alarm.cancel()

    def run(self) -> None:
        threading.current_thread().name = self._name
        try:
            self.result.append(self._function())
        except BaseException as error:  # A `sys.exit()` in a reward must not pass as a hang.
            self.error = error

    def announce(self) -> None:
        """Let whoever waits look again; in the event loop."""
        if not self._moved.done():
            self._moved.set_result(None)


class _Thread:
    """A thread for one crew after another: starting one takes longer than many a verifier."""

    def __init__(self) -> None:
        self._crews: SimpleQueue[Crew] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def work_for(self, crew: Crew) -> None:
        self._crews.put(crew)

    def _work(self) -> None:
        while True:
            self._crews.get().work()
            _idle.append(self)


_idle: list[_Thread] = []
"""Threads that work for nobody; one that was left behind comes back when its call ends after all."""
_crews: WeakSet[Crew] = WeakSet()
call = Crew().call
"""As many calls at a time as are asked for."""


def _begin_again() -> None:
    _idle.clear()
    for crew in _crews:
        crew.begin()


# A child process has none of its parent's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
