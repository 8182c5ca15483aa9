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
        with _terminated_as_interrupt():
            return asyncio.run(work())
    return _in_a_thread(work)


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
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, so that it is noted as interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
