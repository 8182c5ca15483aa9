"""The workers of a role, called together: every rank gets the same call, and the first one's result is returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from strop.cluster.data_plane import pack
from strop.cluster.handle import RemoteTraceback, WorkerHandle
from strop.cluster.placement import Placed
from strop.cluster.supervision import Supervisor, WorkerLost
from strop.cluster.worker import Answer
from strop.errors import RunFailure, StropError

GRACE = 1.0
"""Seconds to wait for other failures after the first one: when a process dies, its peers' collectives fail too, and
their errors may arrive before the news of its death."""

Remake = Callable[[WorkerHandle], Awaitable[None]]


class WorkerGroup:
    """N workers of one role. `start` makes it.

    workers: one handle for each rank. failed: why none of them can be called together any more; they are then ended.
    """

    def __init__(
        self, placed: Placed, supervisor: Supervisor, *, run: str, logs: str | None, threads: int | None
    ) -> None:
        self.workers: list[WorkerHandle] = []
        self.failed: StropError | None = None
        self._placed = placed
        self._supervisor = supervisor
        self._run, self._logs, self._threads = run, logs, threads
        self._made: tuple[str, dict[str, Any]] | None = None
        # Ranks must see calls in the same order, and an actor with an event loop promises none.
        self._turn = asyncio.Lock()

    @classmethod
    async def start(
        cls, placed: Placed, supervisor: Supervisor, *, run: str, logs: Path | None, threads: int | None = None
    ) -> WorkerGroup:
        """Start all processes of a role in their places.

        Args:
            run: name of the run. logs: folder of `ROLE-RANK.log`, seen by all nodes. threads: of torch in each
                process; what the placement proposes when not given, and 0 leaves them as they are.
        """
        chosen = placed.threads if threads is None else threads or None
        folder = None if logs is None else str(logs.absolute())
        group = cls(placed, supervisor, run=run, logs=folder, threads=chosen)
        await group.start_all()
        return group

    @property
    def role(self) -> str:
        """Of all its workers."""
        return self._placed.ask.role

    async def start_all(self) -> None:
        """Start every rank anew, in the same places; what they held is gone."""
        await self.close()
        self.failed = None
        started = await asyncio.gather(
            *(self._start(rank) for rank in range(self._placed.ask.count)), return_exceptions=True
        )
        self.workers = [worker for worker in started if isinstance(worker, WorkerHandle)]
        errors = [error for error in started if isinstance(error, BaseException)]
        if not errors:
            try:
                await self._acquaint()
                return
            except BaseException as error:
                errors.append(error)
        await self.close()
        raise errors[0]

    async def make(self, factory: str, /, **kwargs: Any) -> None:
        """Build an object in every rank, at the same time: `factory` is "module:function", and gets `kwargs`.

        It finds its rank where torch.distributed looks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
        """
        self._made = (factory, kwargs)
        payload = self._first.ship(pack((factory, kwargs)))
        async with self._turn:
            await self._together(lambda worker: worker._answer("make", None, payload), "make", None)

    async def call(
        self, method: str, /, *args: Any, timeout: float | None = None, beside: bool = False, **kwargs: Any
    ) -> Any:
        """Call a method of the object of every rank, with the same arguments; returns the result of rank 0.

        Arrays and tensors among the arguments are put into the object store once and must not be written to.

        Args:
            timeout: seconds; `supervision.wait` when not given. beside: at the same time as other calls, and not after
                them; only for a coroutine of the object in which no rank waits for another.

        Raises:
            WorkerLost, StropError: of the rank that failed first. The others, which may wait for it in a collective,
                are ended, and no later call is possible.
        """
        # Two calls whose collectives meet in another order on each rank would wait for each other for ever.
        async with contextlib.nullcontext() if beside else self._turn:
            # The reference must live until all have read it.
            payload = self._first.ship(pack((args, kwargs)))
            answers = await self._together(
                lambda worker: worker.ask(method, payload, worker.rank == 0, self._long(timeout)), method, timeout
            )
        return self._first.result(answers[0])

    async def restart(self, index: int, remake: Remake | None = None, *, counted: bool = True) -> WorkerHandle:
        """Start one worker again, for a role whose members do not talk to each other (engines, environments).

        Args:
            remake: builds what it holds; what `make` built last when not given. counted: against
                `supervision.restarts`; else whoever calls this counts it.

        Raises:
            WorkerLost: as many were restarted as `supervision.restarts` allows.
        """
        old = self.workers[index]
        loss = old.lost or WorkerLost.of(old, "it was to be started again")
        if counted:
            self._supervisor.spend_restart(loss)
        old.lose("it was started again")
        self._supervisor.forget(old)
        worker = self.workers[index] = await self._start(index)
        await self._introduce_alone(worker)
        if remake is not None:
            await remake(worker)
        elif self._made is not None:
            await worker.make(self._made[0], **self._made[1])
        return worker

    def move_logs(self, folder: Path) -> None:
        """Say that the logs, which stay open, have been moved to another folder."""
        self._logs = str(folder.absolute())
        for worker in self.workers:
            if worker.log is not None:
                worker.log = str(folder.absolute() / Path(worker.log).name)

    async def close(self) -> None:
        """End all processes of the role."""
        for worker in self.workers:
            worker.end()
        self.workers = []

    @property
    def _first(self) -> WorkerHandle:
        if self.failed is not None:
            raise self.failed
        if not self.workers:
            raise RunFailure(f"the processes of {self.role} have been ended")
        return self.workers[0]

    async def _start(self, rank: int) -> WorkerHandle:
        return await WorkerHandle.start(self._placed, rank, self._supervisor, run=self._run, logs=self._logs)

    async def _acquaint(self) -> None:
        """Tell each rank of its peers; those of a role that does not work together have none."""
        if not self._placed.ask.together:
            await asyncio.gather(*(self._introduce_alone(worker) for worker in self.workers))
            return
        meeting, world = await self.workers[0].plain("address"), len(self.workers)
        await asyncio.gather(*(self._introduce(worker, worker.rank, world, *meeting) for worker in self.workers))

    async def _introduce_alone(self, worker: WorkerHandle) -> None:
        await self._introduce(worker, 0, 1, *await worker.plain("address"))

    async def _introduce(self, worker: WorkerHandle, rank: int, world: int, address: str, port: int) -> None:
        await worker.plain("environment", rank, world, address, port, self._threads, self._placed.ask.device)

    def _long(self, timeout: float | None) -> float:
        # The group's own time-out comes first, for it names all who are missing.
        return (self._supervisor.settings.wait if timeout is None else timeout) + 5.0

    async def _together(
        self, ask: Callable[[WorkerHandle], Awaitable[Answer]], what: str, timeout: float | None
    ) -> list[Answer]:
        """Ask all ranks; returns their answers, or ends them all and raises what went wrong first."""
        _ = self._first
        limit = self._supervisor.settings.wait if timeout is None else timeout
        tasks = [asyncio.ensure_future(ask(worker)) for worker in self.workers]
        deadline = asyncio.get_running_loop().time() + limit
        waiting = set(tasks)
        try:
            while waiting and not any(_bad(task) for task in tasks):
                left = deadline - asyncio.get_running_loop().time()
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    missing = [w.name for w, task in zip(self.workers, tasks, strict=True) if not task.done()]
                    raise self._fail(_late(what, limit, missing, len(tasks)))
            if not any(_bad(task) for task in tasks):
                return [task.result() for task in tasks]
            if waiting:
                await asyncio.wait(waiting, timeout=GRACE)
            error, cause = self._first_failure(tasks)
            raise self._fail(error) from cause
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _first_failure(self, tasks: Sequence[asyncio.Future[Answer]]) -> tuple[StropError, BaseException | None]:
        """What went wrong first: the loss of a process before what its peers raised because of it."""
        found: list[tuple[bool, float, int, StropError, BaseException | None]] = []
        for worker, task in zip(self.workers, tasks, strict=True):
            if not _bad(task):
                continue
            error = task.exception()
            if error is None:
                answer = task.result()
                found.append((True, answer.at, worker.rank, worker.error(answer), RemoteTraceback(answer.trace)))
            elif isinstance(error, StropError):
                lost = isinstance(error, WorkerLost)
                found.append((not lost, error.at if lost else 0.0, worker.rank, error, None))  # type: ignore[attr-defined]
            else:
                raise error
        _, _, rank, first, cause = min(found, key=lambda entry: entry[:3])
        if len(found) > 1:
            others = ", ".join(str(entry[2]) for entry in sorted(found, key=lambda entry: entry[2]) if entry[2] != rank)
            first.add_note(f"{self.role} {rank} was the first; after it failed {self.role} {others}")
        return first, cause

    def _fail(self, error: StropError) -> StropError:
        self.failed = error
        for worker in self.workers:
            worker.end()
        return error


def _bad(task: asyncio.Future[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or task.result().raised)


def _late(what: str, limit: float, missing: list[str], count: int) -> RunFailure:
    return RunFailure(
        f"{what} was not answered within {limit:g} s by {', '.join(missing)} ({len(missing)} of {count})",
        mend="a larger cluster.supervision.wait, if they were only slow",
    )
