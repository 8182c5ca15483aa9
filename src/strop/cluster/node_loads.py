"""The load of the other machines of a run: one process on each is asked for it now and then.

It is asked beside the signs of life and not with them: a driver of cards that hangs must not make a worker look lost.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.cluster.session import import_ray

if TYPE_CHECKING:
    from strop.cluster.handle import WorkerHandle

PATIENCE = 60.0
"""Seconds after which an answer is not waited for any more."""


@dataclass
class _Question:
    asked: float
    handle: WorkerHandle
    pending: Any


class NodeLoads:
    """Asks for loads once `begin` is called. `look` is called in one thread, everything else from any."""

    def __init__(self) -> None:
        self._every = 0.0
        self._probe = self._here = ""
        self._guard = threading.Lock()
        self._questions: dict[str, _Question] = {}
        self._names: dict[str, str] = {}
        self._found: list[tuple[str, dict[str, Any]]] = []
        self._processes: list[int] = []

    def begin(self, every: float, probe: str, here: str) -> None:
        """Ask from now on.

        Args:
            every: seconds. probe: "module:class" of what each worker makes to look at its machine. here: Ray's id of
                this process's node, which is not asked; empty where it is on none.
        """
        self._probe, self._here = probe, here
        self._every = every

    def end(self) -> None:
        """Ask nobody any more."""
        self._every = 0.0

    def processes(self) -> list[int]:
        """Numbers of the run's processes on this machine."""
        with self._guard:
            return list(self._processes)

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, load) of other machines, as they told it since this was last asked."""
        with self._guard:
            found, self._found = self._found, []
            return found

    def look(self, handles: Sequence[WorkerHandle], now: float) -> None:
        """Ask whom it is time to ask, and read answers. now: by `time.monotonic()`."""
        if not self._every:
            return
        nodes: dict[str, list[WorkerHandle]] = {}
        for handle in handles:
            if handle.lost is None:
                nodes.setdefault(handle.node, []).append(handle)
        with self._guard:
            self._processes = [handle.pid for handle in nodes.pop(self._here, [])] if self._here else []
        for node, there in nodes.items():
            question = self._questions.get(node)
            if question is not None and question.pending is not None:
                self._read(node, question, now)
            elif question is None or now - question.asked >= self._every:
                # The same process again, as long as it is there: shares are since it last looked.
                known = question is not None and any(handle is question.handle for handle in there)
                handle = question.handle if question is not None and known else there[0]
                asked = handle.actor.load.options(concurrency_group="health")
                pids = [one.pid for one in there]
                self._questions[node] = _Question(now, handle, asked.remote(self._probe, pids))

    def _read(self, node: str, question: _Question, now: float) -> None:
        ray = import_ray()
        ready, _ = ray.wait([question.pending], timeout=0)
        if not ready and now - question.asked < PATIENCE:
            return
        pending, question.pending = question.pending, None
        if not ready:
            return
        try:
            load = ray.get(pending)
        except Exception:  # whether it is lost is for the signs of life to say
            return
        if load is not None:
            with self._guard:
                self._found.append((self._name(node, question.handle.host), load))

    def _name(self, node: str, host: str) -> str:
        """The machine's own name, unless another one has it."""
        if node not in self._names:
            taken = host in (*self._names.values(), socket.gethostname())
            self._names[node] = f"{host} {node[:8]}" if taken else host
        return self._names[node]
