"""The driver's side of one worker: starting it, asking it, and hearing of its end."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import threading
from typing import Any

from strop.cluster.data_plane import SMALL, Packed, pack, unpack
from strop.cluster.placement import Placed
from strop.cluster.session import import_ray
from strop.cluster.supervision import Supervisor, WorkerLost, end, local_node, reason_of
from strop.cluster.worker import Answer, Worker
from strop.errors import RunFailure, StropError


class RemoteTraceback(Exception):
    """The traceback in the worker, shown as the cause of what is raised here."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class WorkerHandle:
    """One worker. `start` makes it.

    role, rank: which it is. host, node, pid, log: where; `lost` is set once it is gone.
    """

    def __init__(self, role: str, rank: int, actor: Any, supervisor: Supervisor) -> None:
        self.role, self.rank, self.actor = role, rank, actor
        self.host, self.node, self.pid, self.started = "", "", 0, 0.0
        self.log: str | None = None
        self.lost: WorkerLost | None = None
        self._supervisor = supervisor
        self._guard = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    @property
    def name(self) -> str:
        """Role and rank, for messages."""
        return f"{self.role} {self.rank}"

    @classmethod
    async def start(
        cls, placed: Placed, rank: int, supervisor: Supervisor, *, run: str, logs: str | None
    ) -> WorkerHandle:
        """Start the process in its place, and wait until it is there.

        Args:
            run: name of the run. logs: folder of the logs, seen by all nodes; None leaves them to Ray.

        Raises:
            WorkerLost: it ended while it started. RunFailure: it was not there in time.
        """
        ray = import_ray()
        role, bundle = placed.ask.role, placed.ask.bundle
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placed.group, placement_group_bundle_index=rank
        )
        kind = ray.remote(concurrency_groups={"health": 4})(Worker).options(
            # Names are unique in a cluster, and the end of an actor frees its name only after a while.
            name=f"{run}/{role}-{rank}/{secrets.token_hex(3)}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        )
        driver = (local_node(), os.getpid())
        handle = cls(role, rank, kind.remote(role, rank, run, logs, driver), supervisor)
        try:
            about = await handle.health("describe", supervisor.settings.wait)
        except BaseException:
            handle.end()
            raise
        handle.host, handle.node, handle.pid = about["host"], about["node"], about["pid"]
        handle.started, handle.log = about["started"], about["log"]
        supervisor.watch(handle)
        return handle

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the hosted object and return its result.

        Args:
            timeout: seconds; `supervision.wait` when not given.

        Raises:
            StropError: as the object raised it. RunFailure: anything else that it raised, or the time was up.
            WorkerLost: the process is gone.
        """
        return self.result(await self.ask(method, self.ship(pack((args, kwargs))), True, timeout))

    async def make(self, factory: str, /, **kwargs: Any) -> None:
        """Build the hosted object, replacing what was there: `factory` is "module:function", run in the worker."""
        payload = self.ship(pack((factory, kwargs)))
        self.result(await self._answer("make", None, payload))

    async def ask(self, method: str, payload: Any, wanted: bool, timeout: float | None = None) -> Answer:
        """Call a method with what `ship` gave; returns the answer as it came.

        Raises:
            WorkerLost, RunFailure: as in `call`, but not for what the object raised.
        """
        return await self._answer("call", timeout, method, payload, wanted)

    def ship(self, packed: Packed) -> Any:
        """What a message is sent as: itself, or a reference to the object store, to be given to several workers."""
        return packed if packed.size < SMALL else import_ray().put(packed)

    async def health(self, method: str, timeout: float) -> Any:
        """Ask what is answered even during a call."""
        reference = getattr(self.actor, method).options(concurrency_group="health").remote()
        return await self._wait(reference, timeout, method)

    async def plain(self, method: str, *args: Any) -> Any:
        """Call a method of the worker itself."""
        return await self._wait(getattr(self.actor, method).remote(*args), None, method)

    def result(self, answer: Answer) -> Any:
        """What an answer holds.

        Raises:
            StropError: what was raised there, or a RunFailure in its place.
        """
        if answer.raised:
            raise self.error(answer) from RemoteTraceback(answer.trace)
        return None if answer.value is None else unpack(answer.value, copy=True)

    def error(self, answer: Answer) -> StropError:
        """The exception that an answer speaks of."""
        if answer.error is not None:
            error: StropError = pickle.loads(answer.error)
            error.add_note(f"raised in {self.name}")
            return error
        failure = RunFailure(f"{self.name} failed: {answer.text}", where=self.log or "")
        failure.add_note(answer.trace)
        return failure

    def lose(self, why: str) -> WorkerLost:
        """Note that the worker is gone, make sure that it is, and tell all who wait for it. From any thread."""
        with self._guard:
            if self.lost is not None:
                return self.lost
            self.lost = WorkerLost.of(self, why)
            waiting, self._waiting = self._waiting, set()
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(_settle, future)
            except RuntimeError:  # that loop is closed: nobody waits there any more
                continue
        end(self)
        return self.lost

    async def gone(self) -> None:
        """Wait until the worker is lost."""
        loop = asyncio.get_running_loop()
        entry = (loop, loop.create_future())
        with self._guard:
            if self.lost is not None:
                return
            self._waiting.add(entry)
        try:
            await entry[1]
        finally:
            with self._guard:
                self._waiting.discard(entry)

    def end(self) -> None:
        """End the process; nothing is reported."""
        self._supervisor.forget(self)
        end(self)

    async def _answer(self, method: str, timeout: float | None, *args: Any) -> Answer:
        if self.lost is not None:
            raise self.lost
        shown = args[0] if method == "call" else method
        found: Answer = await self._wait(getattr(self.actor, method).remote(*args), timeout, shown)
        return found

    async def _wait(self, reference: Any, timeout: float | None, what: str) -> Any:
        """The value of a reference, or the loss of the worker, whichever comes first."""
        ray = import_ray()
        loop = asyncio.get_running_loop()
        answer = asyncio.wrap_future(reference.future())
        # One that nobody waits for any more may still fail.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        gone: asyncio.Future[None] = loop.create_future()
        entry = (loop, gone)
        with self._guard:
            if self.lost is not None:
                raise self.lost
            self._waiting.add(entry)
        limit = self._supervisor.settings.wait if timeout is None else timeout
        try:
            await asyncio.wait({answer, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            with self._guard:
                self._waiting.discard(entry)
        if answer.done():
            try:
                return answer.result()
            except ray.exceptions.RayActorError as error:
                raise self.lose(reason_of(error)) from None
            except ray.exceptions.RayError as error:
                raise RunFailure(f"{self.name} could not be asked for {what}: {error}") from error
        if self.lost is not None:
            raise self.lost
        raise RunFailure(
            f"{self.name} has not answered {what} within {limit:g} s",
            where=self.log or "",
            mend="a larger cluster.supervision.wait, if it was only slow",
        )


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
