"""The driver's side of one environment worker: calls of the environments in it, and the news of its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strop.cluster.data_plane import Packed, unpack
from strop.cluster.environment_host import CLOSE, Call, Outcome
from strop.cluster.handle import WorkerHandle
from strop.cluster.outbox import Outbox
from strop.cluster.supervision import WorkerLost
from strop.errors import StropError
from strop.rollout.asking import Failed
from strop.rollout.episode import Status

POLL = 10.0
"""Seconds that a question for results stays open while there are none."""
STUCK = 30.0
"""Seconds beyond `step_timeout` and `POLL` after which a worker that answers nothing counts as blocked for ever."""


class Gone(Exception):
    """The worker that an environment lived in is lost: its episode has to be begun again."""


@dataclass(eq=False)
class Life:
    """One episode, however often it is begun. key: its prompt's. deaths: of workers that were busy with it.

    stuck: whether the last of them was blocked, and did not end by itself. why: it was lost.
    """

    key: tuple[int, ...]
    deaths: int = 0
    stuck: bool = False
    why: str = ""


@dataclass
class _Waiting:
    future: asyncio.Future[Any]
    life: Life
    sent: bool = False


@dataclass
class EnvironmentLine:
    """Speaks to the `EnvironmentHost` of one worker.

    Calls of one turn of the event loop go in one message; one question at a time is open for results, and its answer
    brings all that finished since the last. It stays open while episodes live there, so that a loss is noticed at once.

    worker: whose object is the host. limit: seconds that an environment may take for one answer. inhabited: whether
    episodes live there. lost: called once, with the loss, the episodes that the worker was busy with, and whether its
    event loop was blocked.
    """

    worker: WorkerHandle
    limit: float
    inhabited: Callable[[], bool]
    lost: Callable[[WorkerLost, set[Life], bool], None]
    messages: int = 0
    _numbers: Any = field(default_factory=itertools.count)
    _unsent: list[Call] = field(default_factory=list)
    _given_up: list[int] = field(default_factory=list)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _poll: asyncio.Task[None] | None = None
    _ended: Exception | None = None
    _stuck: bool = False

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.worker, self._flush, self._fail)

    def number(self) -> int:
        """For a new environment."""
        return int(next(self._numbers))

    async def ask(self, life: Life, environment: int, method: str, given: Packed | None = None) -> Any:
        """What a call of an environment came to.

        Raises:
            Failed: as the environment did. Gone: the worker is lost. StropError: it was raised there.
        """
        if self._ended is not None:
            raise self._ended
        number = self.number()
        waiting = self._waiting[number] = _Waiting(asyncio.get_running_loop().create_future(), life)
        self._unsent.append(Call(number, environment, method, given))
        self._outbox.soon()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            # A close is not called back.
            if self._waiting.pop(number, None) is not None and method != CLOSE:
                self._given_up.append(number)
                self._outbox.soon()
            raise

    def tell_to_close(self, environment: int) -> None:
        """Have an environment closed, if it is there, without waiting for it."""
        if self._ended is None:
            self._unsent.append(Call(self.number(), environment, CLOSE))
            self._outbox.soon()

    def look(self) -> None:
        """See whether the worker was lost while nobody asked it anything."""
        if self.worker.lost is not None:
            self._fail(self.worker.lost)

    async def close(self) -> None:
        """Close what is there; the process is ended by who started it. A lost one is closed enough."""
        try:
            await self._outbox.sent()
            if self.worker.lost is None and self._ended is None:
                with contextlib.suppress(WorkerLost):
                    async with asyncio.timeout(self.limit + STUCK):
                        await self.worker.call("close")
        except TimeoutError:  # blocked, by code that does not return
            pass
        finally:
            if self._poll is not None:
                self._poll.cancel()
            for waiting in self._waiting.values():
                waiting.future.cancel()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        given_up, self._given_up = self._given_up, []
        # What was given up before it was sent is unknown over there.
        forgotten = {call.number for call in unsent if call.number in given_up}
        calls = [call for call in unsent if call.number not in forgotten]
        given_up = [number for number in given_up if number not in forgotten]
        for call in calls:
            if waiting := self._waiting.get(call.number):
                waiting.sent = True
        if calls:
            self._send("submit", calls)
        if given_up:
            self._send("cancel", given_up)
        if self._ended is None and self._waiting and (self._poll is None or self._poll.done()):
            self._poll = asyncio.get_running_loop().create_task(self._collect())

    def _send(self, method: str, message: Any) -> None:
        self.messages += 1
        self._outbox.send(method, message, timeout=POLL + self.limit + 2 * STUCK)

    async def _collect(self) -> None:
        """Ask for results as long as somebody waits for one, or may."""
        try:
            while self._waiting or self.inhabited():
                async with asyncio.timeout(POLL + self.limit + STUCK):
                    found: list[Outcome] = await self.worker.call(
                        "finished", POLL, timeout=POLL + self.limit + 2 * STUCK
                    )
                for outcome in found:
                    self._settle(outcome)
        except TimeoutError:
            self._stuck = True
            seconds = POLL + self.limit + STUCK
            self._fail(self.worker.lose(f"an environment has blocked its event loop for {seconds:g} s"))
        except Exception as error:
            self._fail(error)

    def _settle(self, outcome: Outcome) -> None:
        waiting = self._waiting.pop(outcome.number, None)
        if waiting is None or waiting.future.done():
            return
        if outcome.error is not None:
            error: StropError = pickle.loads(outcome.error)
            error.add_note(f"raised in {self.worker.name}")
            waiting.future.set_exception(error)
        elif outcome.failed is not None:
            status, detail = outcome.failed
            waiting.future.set_exception(Failed(Status(status), detail))
        elif outcome.value is None:
            waiting.future.set_result(None)
        else:
            try:
                waiting.future.set_result(unpack(outcome.value))
            except Exception as error:
                detail = f"the environment returned what the driver cannot read: {type(error).__name__}: {error}"
                waiting.future.set_exception(Failed(Status.ENVIRONMENT_ERROR, detail))

    def _fail(self, error: Exception) -> None:
        """Nothing more will come of what was asked."""
        if self._ended is not None:
            return
        waiting, self._waiting = list(self._waiting.values()), {}
        self._ended = error
        if isinstance(error, WorkerLost):
            self._ended = Gone(error.what)
            # What had not been sent cannot have done it.
            self.lost(error, {one.life for one in waiting if one.sent}, self._stuck)
        for one in waiting:
            if not one.future.done():
                one.future.set_exception(self._ended)
