"""The worker's side of `remote_environments.py`: hosts many environments on its event loop, and answers calls of them.

Checks of what an environment returns, and the limits of its time, are here, beside its code: they are those of
`rollout/asking.py`, as in the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from strop.cluster.data_plane import Packed, pack, unpack
from strop.errors import RunFailure, StropError, UserError
from strop.rollout.asking import Failed, InProcess
from strop.rollout.episode import Status

MAKE, CLOSE = "make", "close"
Given = tuple[tuple[Any, ...], Callable[[Any], Any], bool, int | None]
"""What a call is packed with: arguments, the check of what is returned, whether `step_timeout` bounds it, and the
number under which an environment that it returns is kept here (`fork`)."""


@dataclass(frozen=True)
class Call:
    """number: of the call. environment: the number that the driver gave it. given: a packed `Given`."""

    number: int
    environment: int
    method: str
    given: Packed | None = None


@dataclass(frozen=True)
class Outcome:
    """What the call of this number came to: a value, (status, detail) of a failed environment, or a pickled error."""

    number: int
    value: Packed | None = None
    failed: tuple[str, str] | None = None
    error: bytes | None = None


class EnvironmentHost:
    """Environments in a worker, as `EnvironmentLine` speaks to them.

    Args:
        home: makes and asks them. closing: called in the end, in this order: what they share.
    """

    def __init__(self, home: InProcess, closing: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
        self._home = home
        self._closing = closing
        self._made: dict[int, Any] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._of: dict[int, set[asyncio.Task[None]]] = {}
        self._done: list[Outcome] = []
        self._news = asyncio.Event()

    async def submit(self, calls: Sequence[Call]) -> None:
        """Begin; what comes of it is in `finished`."""
        for call in calls:
            before = set(self._of.get(call.environment, ()))
            task = asyncio.get_running_loop().create_task(self._run(call, before))
            self._calls[call.number] = task
            self._of.setdefault(call.environment, set()).add(task)
            task.add_done_callback(partial(self._forget, call))

    async def cancel(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these any more."""
        for number in numbers:
            if task := self._calls.get(number):
                task.cancel()

    async def finished(self, wait: float) -> list[Outcome]:
        """What has finished since the last time, at least one; nothing after `wait` seconds without any."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), wait)
        # What was submitted together often ends in one turn of the event loop.
        await asyncio.sleep(0)
        self._news.clear()
        done, self._done = self._done, []
        return done

    async def close(self) -> None:
        """Close all environments, and what they share."""
        running = list(self._calls.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        made, self._made = list(self._made.values()), {}
        await asyncio.gather(*(self._home.close(environment) for environment in made))
        for close in self._closing:
            await close()

    async def _run(self, call: Call, before: set[asyncio.Task[None]]) -> None:
        try:
            outcome = self._sent(call, await self._answer(call, before))
        except Failed as failure:
            outcome = Outcome(call.number, failed=(str(failure.status), failure.detail))
        except StropError as error:
            outcome = Outcome(call.number, error=_pickled(error))
        except Exception as error:
            trouble = RunFailure(f"an environment could not be asked: {type(error).__name__}: {error}")
            trouble.add_note("".join(traceback.format_exception(error)))
            outcome = Outcome(call.number, error=_pickled(trouble))
        self._done.append(outcome)
        self._news.set()

    async def _answer(self, call: Call, before: set[asyncio.Task[None]]) -> Any:
        if call.method == MAKE:
            made = await self._home.make()
            # Known from here on, so that it is closed whatever follows.
            self._made[call.environment] = made
            if hasattr(made, "drive"):
                raise drives_itself(type(made).__name__)
            return None
        if call.method == CLOSE:
            # A call that was cancelled may still clean up; one that was left behind is at its end for us.
            if before:
                await asyncio.wait(before)
            if (found := self._made.pop(call.environment, None)) is not None:
                await self._home.close(found)
            return None
        assert call.given is not None
        # With memory of its own: rows may hold arrays, and environments may write to them.
        given, check, bounded, child = unpack(call.given, copy=True)
        asked = self._made[call.environment]
        found = await self._home.ask(asked, call.method, *given, check=check, bounded=bounded)
        if child is None:
            return found
        self._made[child] = found
        return None

    def _sent(self, call: Call, found: Any) -> Outcome:
        try:
            return Outcome(call.number, None if found is None else pack(found))
        except Exception as error:
            name = f"{type(self._made.get(call.environment)).__name__}.{call.method}"
            detail = f"{name} returned something that no other process can be sent: {type(error).__name__}: {error}"
            raise Failed(Status.ENVIRONMENT_ERROR, detail) from error

    def _forget(self, call: Call, task: asyncio.Task[None]) -> None:
        self._calls.pop(call.number, None)
        if running := self._of.get(call.environment):
            running.discard(task)
            if not running:
                del self._of[call.environment]


def _pickled(error: StropError) -> bytes:
    """An error as it was, or in words where it cannot be sent."""
    try:
        found = pickle.dumps(error)
        pickle.loads(found)
        return found
    except Exception:
        return pickle.dumps(RunFailure(f"{type(error).__name__}: {error}"))


def drives_itself(name: str) -> UserError:
    """The refusal of what asks the policy for tokens when it wants some."""
    return UserError(
        f"{name} drives itself: it asks the policy for tokens, and cannot be in another process than those who do",
        where="cluster.environments.workers",
        mend="set it to 0, or leave it on auto",
    )
