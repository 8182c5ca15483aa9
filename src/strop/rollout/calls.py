"""Calls of code that users wrote: whatever it raises is an outcome, and code that does not return is left behind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from strop.environments.checks import Malformed

T = TypeVar("T")
GRACE = 5.0
"""Seconds that what is cancelled may take to clean up, before it is left behind."""
_left_behind: set[asyncio.Task[Any]] = set()


class Raised(Exception):
    """The code raised `error`, which may be a `SystemExit` or a `CancelledError` of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class TooLong(Exception):
    """The code took too long."""


async def call(work: Callable[[], Any], check: Callable[[Any], T], limit: float | None) -> T:
    """The checked result of `work()`, which is awaited.

    Args:
        limit: seconds; None for any time. Only code that lets the event loop go on can be stopped.

    Raises:
        Raised: it raised something. TooLong: it did not return in time; it is cancelled. CancelledError: the caller is
            cancelled.
    """
    task = start(work, check)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit)
    except asyncio.CancelledError:
        await stop(task, limit)
        raise
    if not done:
        await stop(task, limit)
        raise TooLong
    return result(task)


def start(work: Callable[[], Any], check: Callable[[Any], T]) -> asyncio.Task[T]:
    """A task of its own for the code, so that a cancellation that it makes up is not one of the caller's; `result` has
    what came of it."""
    return asyncio.get_running_loop().create_task(_outcome(work, check))


def result(task: asyncio.Task[T]) -> T:
    """What a task that is done returned.

    Raises:
        Raised: it raised something.
    """
    if task.cancelled():  # by itself: whoever cancels it asks for no result
        raise Raised(asyncio.CancelledError("it cancelled its own task"))
    return task.result()


async def stop(task: asyncio.Task[Any], limit: float | None = None) -> None:
    """Cancel a task. One that goes on nevertheless is left behind, and can no longer stop anything else, not even the
    end of the event loop."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=GRACE if limit is None else min(GRACE, limit))
    finally:
        _left_behind.add(task)
        task.add_done_callback(_forget)
        if not task.done():
            # At its end `asyncio.run` waits for all registered tasks.
            asyncio._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]


async def _outcome(work: Callable[[], Any], check: Callable[[Any], T]) -> T:
    try:
        found = work()
        if not inspect.isawaitable(found):
            raise Malformed("is not `async`")
        return check(await found)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Raised(error) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # The event loop would end with the last two. Ctrl-C in the terminal cancels the run's task instead.
        raise Raised(error) from error


def _forget(task: asyncio.Task[Any]) -> None:
    """Look at how a task ended, since the event loop complains of exceptions that nobody looked at."""
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()
