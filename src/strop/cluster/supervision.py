"""Signs of life: every worker is asked for one, and one that gives none, or whose process ended, is reported.

A thread of its own asks, so that a driver that computes, or waits for a collective, still notices. The reports arrive
in the event loops of those who wait for the worker's answers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.cluster.node_loads import NodeLoads
from strop.cluster.session import import_ray
from strop.cluster.worker_logs import tail
from strop.config.cluster import SupervisionSettings
from strop.errors import RunFailure

if TYPE_CHECKING:
    from strop.cluster.handle import WorkerHandle

STEP = 0.25
"""Most seconds between two looks at what was answered."""


class WorkerLost(RunFailure):
    """A process that is gone, or counts as gone.

    role, rank, node (Ray's id), host, pid: which it was. why: in words. last: the last lines of its log.
    at: `time.time()` when it was noticed.
    """

    def __init__(
        self, role: str, rank: int, why: str, *, node: str, host: str, pid: int, log: str | None, last: Sequence[str]
    ) -> None:
        self.role, self.rank, self.node, self.host, self.pid = role, rank, node, host, pid
        self.why, self.last, self.at = why, list(last), time.time()
        what = f"{role} {rank} is lost (process {pid} on {host or 'no node yet'}): {why}"
        if last:
            what += "\n  its last lines:" + "".join(f"\n    {line}" for line in last)
        super().__init__(what, where=log or "", mend="the same command goes on from the last checkpoint")

    @classmethod
    def of(cls, handle: WorkerHandle, why: str) -> WorkerLost:
        """The loss of a worker, with what its log says as far as this machine can read it."""
        log = handle.log
        return cls(
            handle.role, handle.rank, why, node=handle.node, host=handle.host, pid=handle.pid, log=log, last=tail(log)
        )


def show_on_stderr(line: str) -> None:
    """Where warnings of workers go if nobody else wants them."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Restarts:
    """How often lost processes of a run may still be started again; the limit is in `settings`."""

    settings: SupervisionSettings
    spent: int = 0
    _mended: list[WorkerLost] = field(default_factory=list)

    def spend(self, loss: WorkerLost) -> int:
        """Count one whose process is started again; returns how many are left.

        Raises:
            WorkerLost: none was left.
        """
        left = self._count(loss)
        self._mended.append(loss)
        return left

    def set_back(self, loss: WorkerLost) -> int:
        """Count one that the run is set back by, but for one that was counted when its process was started again:
        others may have heard of it nevertheless. Returns how many are left.

        Raises:
            WorkerLost: none was left.
        """
        if any(one is loss for one in self._mended):
            self._mended = [one for one in self._mended if one is not loss]
            return self.settings.restarts - self.spent
        return self._count(loss)

    def _count(self, loss: WorkerLost) -> int:
        limit = self.settings.restarts
        if self.spent >= limit:
            self._mended = [one for one in self._mended if one is not loss]
            loss.mend = f"lost processes were started again {limit} times already (cluster.supervision.restarts)"
            raise loss
        self.spent += 1
        return limit - self.spent


RESTARTS: ContextVar[Restarts | None] = ContextVar("restarts", default=None)
"""Those of the run, which count on when it goes on from a checkpoint with processes that are all new."""


@dataclass
class _Watched:
    handle: WorkerHandle
    pending: Any = None
    sent: float = -1e9
    silent: float = 0.0


class Supervisor:
    """Asks all workers of a run for signs of life, and counts how often lost ones were started again.

    Args:
        settings: intervals and limits. notice: gets each line that a worker warns with; called in another thread.
    """

    def __init__(self, settings: SupervisionSettings, notice: Callable[[str], None] = show_on_stderr) -> None:
        self.settings = settings
        self._notice = notice
        self.loads = NodeLoads()
        """What other machines of the run do; nobody is asked until `loads.begin`."""
        self._restarts = RESTARTS.get() or Restarts(settings)
        self._guard = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervision", daemon=True)
        self._thread.start()

    def watch(self, handle: WorkerHandle) -> None:
        """Ask it from now on, until it is lost."""
        with self._guard:
            self._watched[id(handle)] = _Watched(handle)

    def forget(self, handle: WorkerHandle) -> None:
        """Ask it no more."""
        with self._guard:
            self._watched.pop(id(handle), None)

    def spend_restart(self, loss: WorkerLost) -> int:
        """Count a restart; returns how many are left.

        Raises:
            WorkerLost: none was left.
        """
        with self._guard:
            return self._restarts.spend(loss)

    def close(self) -> None:
        """Ask nobody any more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        step = min(STEP, self.settings.heartbeat / 2)
        before = time.monotonic()
        while not self._stop.wait(step):
            now = time.monotonic()
            # If this process itself stood still, that says nothing of the others.
            elapsed, before = min(now - before, 4 * step), now
            with self._guard:
                watched = list(self._watched.values())
            for one in watched:
                try:
                    why = self._look(one, now, elapsed)
                except Exception as error:
                    why = f"Ray cannot reach it ({type(error).__name__}: {error})"
                if why is not None:
                    self.forget(one.handle)
                    one.handle.lose(why)
            self._look_at_loads([one.handle for one in watched], now)

    def _look_at_loads(self, handles: Sequence[WorkerHandle], now: float) -> None:
        try:
            self.loads.look(handles, now)
        except Exception as error:
            self.loads.end()
            self._notice(f"the load of other machines is not asked for any more ({type(error).__name__}: {error})")

    def _look(self, one: _Watched, now: float, elapsed: float) -> str | None:
        """Ask, and read the answer; returns why the worker counts as lost."""
        ray = import_ray()
        if one.handle.lost is not None:
            return one.handle.lost.why
        one.silent += elapsed
        if one.pending is None and now - one.sent >= self.settings.heartbeat:
            one.pending = one.handle.actor.ping.options(concurrency_group="health").remote()
            one.sent = now
        if one.pending is not None:
            ready, _ = ray.wait([one.pending], timeout=0)
            if ready:
                try:
                    lines = ray.get(one.pending)
                except ray.exceptions.RayActorError as error:
                    return reason_of(error)
                one.pending, one.silent = None, 0.0
                for line in lines:
                    self._notice(line)
        if one.silent >= self.settings.timeout:
            return f"it has not given a sign of life for {self.settings.timeout:g} s"
        return None


def reason_of(error: Exception) -> str:
    """Why Ray says that an actor is gone, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    _, found, detail = str(error).partition("exit detail: ")
    # What follows are guesses at causes, which are the same every time.
    said = detail.split(". Some common")[0] if found else lines[-1] if lines else type(error).__name__
    return f"its process ended ({' '.join(said.split())})"


def local_node() -> str:
    """Ray's id of the node that this process is on; empty where it is on none (`ray://`)."""
    ray = import_ray()
    if ray.util.client.ray.is_connected():
        return ""
    return str(ray.get_runtime_context().get_node_id())


def end(handle: WorkerHandle) -> None:
    """End a worker's process, also one that is stopped or deep in native code and hears nothing."""
    ray = import_ray()
    if not ray.is_initialized():
        return
    try:
        ray.kill(handle.actor, no_restart=True)
    except Exception:  # it is gone, or Ray is
        return
    if not handle.pid:
        return
    if handle.node == local_node():
        kill_process(handle.pid, handle.started)
        return
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(handle.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(kill_process)
    task.options(scheduling_strategy=strategy).remote(handle.pid, handle.started)


def kill_process(pid: int, started: float) -> None:
    """SIGKILL, unless the number belongs to a later process by now. started: seconds since the epoch."""
    import psutil

    try:
        if psutil.Process(pid).create_time() <= started + 1.0:
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
