"""Running a coroutine to its end from ordinary code, also from inside a notebook."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine; Ctrl-C and SIGTERM cancel it, and KeyboardInterrupt is raised when it has ended.

    In a notebook, whose own event loop is already running, it runs in a thread of its own.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _in_this_thread(work)
    return _in_a_thread(work)


def _in_this_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    terminated = threading.Event()

    async def watched() -> T:
        with _cancelled_by_sigterm(terminated):
            return await work()

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if terminated.is_set():
            raise KeyboardInterrupt from None
        raise


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    result: list[T] = []
    failure: list[BaseException] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work()

    def target() -> None:
        try:
            result.append(asyncio.run(watched()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target, name="strop")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        # Or stopping a notebook's cell would leave the run going on, unseen.
        for loop, task in running:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if failure:
        raise failure[0]
    return result[0]


@contextmanager
def when_asked_to_leave(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` on SIGUSR1, which clusters send some time before they take a machine away.

    At once, wherever the program is: a run in one process may not come back to the event loop before it has ended.
    """
    usable = hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread()
    if not usable:
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda *_: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def _cancelled_by_sigterm(terminated: threading.Event) -> Iterator[None]:
    """Let SIGTERM cancel the task that this is entered in, as `asyncio.run` lets Ctrl-C; a second one raises at once.

    SIGTERM is not passed on as SIGINT: a process that a script started in the background ignores SIGINT, and would
    ignore both.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def terminate(*_: Any) -> None:
        if terminated.is_set():
            raise KeyboardInterrupt
        terminated.set()
        task.cancel()
        # Or a loop that waits for a file or a clock would sleep on.
        loop.call_soon_threadsafe(lambda: None)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
