"""Started sandboxes that wait for a job. Each serves one job and is then replaced, so no job can meet another."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

from strop.config.sandbox import LimitSettings
from strop.sandbox.protocol import Job, RunResult, SandboxError, SandboxResult
from strop.sandbox.started import GRACE_SECONDS, Command, Started

_ATTEMPTS = 3
"""Sandboxes that are tried for a job, where one did not start or has died while it waited."""


class Pool:
    """Runs jobs in sandboxes of this machine, `workers` at a time.

    One thread, the keeper, starts sandboxes and clears away used ones; another waits until they are ready; `workers`
    threads run jobs. All are daemons: a program that runs does not keep this process from ending, and ends with it.

    Args:
        name: of the backend.
        command: makes the command that starts a sandbox.
        workers: jobs at the same time.
        warm: sandboxes that are kept started.
    """

    def __init__(self, name: str, command: Callable[[], Command], *, workers: int, warm: int) -> None:
        self.name = name
        self.workers = workers
        self._command = command
        self.warm = warm
        self._starting: queue.SimpleQueue[Started | None] = queue.SimpleQueue()
        self._started = 0
        self._waiting: deque[Started] = deque()
        self._used: deque[Started] = deque()
        self._wanted = 0
        self._broken: _NotBegun | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._owner = os.getpid()
        self._keeper: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[tuple[Job, Future[SandboxResult]] | None] = queue.SimpleQueue()
        self._running: set[Started] = set()
        atexit.register(self.close)

    def start(self) -> None:
        """Start the threads, which start the first sandboxes."""
        with self._changed:
            if self._keeper is None and not self._closed:
                self._keeper = threading.Thread(target=self._keep, name="strop-sandbox-keeper", daemon=True)
                self._keeper.start()
                self._starter = threading.Thread(target=self._prepare, name="strop-sandbox-starter", daemon=True)
                self._starter.start()
                for number in range(self.workers):
                    threading.Thread(target=self._work, name=f"strop-sandbox-{number}", daemon=True).start()

    async def run(self, job: Job) -> SandboxResult:
        """Run a job as soon as a worker is free; see `protocol.Sandbox`."""
        return await asyncio.wrap_future(self.submit(job))

    def submit(self, job: Job) -> Future[SandboxResult]:
        """The same without an event loop."""
        if os.getpid() != self._owner:
            raise SandboxError("a pool of sandboxes cannot be used in a fork of the process that made it")
        self.start()
        future: Future[SandboxResult] = Future()
        with self._changed:
            if self._closed:
                raise SandboxError("the pool of sandboxes is closed")
            self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while (next_one := self._jobs.get()) is not None:
            job, future = next_one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._run(job))
            except BaseException as error:
                future.set_exception(error)

    def _run(self, job: Job) -> SandboxResult:
        for attempt in range(_ATTEMPTS):
            taken: list[Started] = []
            try:
                for one in (job, job.partner):
                    if one is not None:
                        taken.append(self._take())
                return _run(taken, job)
            except _NotBegun as error:
                if attempt == _ATTEMPTS - 1:
                    raise SandboxError(str(error)) from None
            finally:
                self._discard(taken)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End every sandbox, and wait until all of them are gone."""
        atexit.unregister(self.close)
        with self._changed:
            if not self._closed:
                self._closed = True
                for _ in range(self.workers):
                    self._jobs.put(None)
            self._changed.notify_all()
            running = list(self._running)
        if os.getpid() != self._owner or self._keeper is None:
            return
        for one in running:
            one.end()
        for thread in (self._keeper, self._starter):
            thread.join()
        for ended in (self._waiting, self._used):
            while ended:
                one = ended.popleft()
                one.kill()
                one.finish()

    # --- the keeper ---

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._something_to_do)
                if self._closed:
                    break
                used = self._used.popleft() if self._used and not self._lacking() else None
                self._started += used is None
            if used is not None:
                used.finish()
                continue
            try:
                self._starting.put(Started(self._command()))
            except Exception as error:
                self._note(None, _NotBegun(f"a sandbox cannot be started: {error}"))
        self._starting.put(None)

    def _prepare(self) -> None:
        while (one := self._starting.get()) is not None:
            failure = None
            try:
                one.wait_until_ready()
            except SandboxError as error:
                failure = _NotBegun(str(error))
            self._note(one, failure)

    def _note(self, one: Started | None, failure: _NotBegun | None) -> None:
        """A sandbox is ready, or has failed to start."""
        with self._changed:
            self._started -= 1
            self._broken = failure
            if one is not None and (failure is not None or self._closed):
                one.kill()
                self._used.append(one)
            elif one is not None:
                self._waiting.append(one)
            self._changed.notify_all()

    def _lacking(self) -> bool:
        return self._broken is None and len(self._waiting) + self._started < self.warm + self._wanted

    def _something_to_do(self) -> bool:
        return self._closed or bool(self._used) or self._lacking()

    def _take(self) -> Started:
        """The sandbox that has waited longest."""
        with self._changed:
            self._broken = None  # Try again for this job.
            self._wanted += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._waiting or self._broken or self._closed)
                if self._waiting:
                    one = self._waiting.popleft()
                    self._running.add(one)
                    return one
                raise self._broken or SandboxError("the pool of sandboxes is closed")
            finally:
                self._wanted -= 1
                self._changed.notify_all()

    def _discard(self, taken: list[Started]) -> None:
        for one in taken:
            one.kill()
        with self._changed:
            self._running.difference_update(taken)
            closed = self._closed
            if not closed:
                self._used.extend(taken)
            self._changed.notify_all()
        for one in taken if closed else ():
            one.finish()


class _NotBegun(SandboxError):
    """A sandbox died before the program began: another one can be tried."""


def _run(taken: list[Started], job: Job) -> SandboxResult:
    """Hand out the jobs and listen until all is said or the time is over."""
    jobs = [job, job.partner][: len(taken)]
    told: dict[Started, _Told] = {
        one: _Told(len(given.inputs)) for one, given in zip(taken, jobs, strict=True) if given
    }
    links = socket.socketpair() if len(taken) > 1 else (None, None)
    try:
        for one, given, link in zip(taken, jobs, links, strict=False):
            assert given is not None
            try:
                one.give(given, link)
            except SandboxError as error:
                raise _NotBegun(str(error)) from None
    finally:
        for link in links:
            if link is not None:
                link.close()
    end = time.monotonic() + job.limits.total_seconds + GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        for one in taken:
            selector.register(one, selectors.EVENT_READ)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                one = cast(Started, key.fileobj)
                if told[one].listen(one, _longest(job.limits)):
                    selector.unregister(one)
    first, *others = (told[one].results(one.out_of_memory()) for one in taken)
    return SandboxResult(first, others[0] if others else ())


def _longest(limits: LimitSettings) -> int:
    """Bytes of the longest message of a runner: every byte of output may take six as JSON."""
    return 12 * (limits.output_kib << 10) + (1 << 16)


class _Told:
    """What one sandbox has said of its runs."""

    def __init__(self, runs: int) -> None:
        self.begun = False
        self._runs: list[RunResult | None] = [None] * runs
        self._rest = RunResult("timeout", stderr="the sandbox did not come to an end")

    def listen(self, one: Started, longest: int) -> bool:
        """Take what it says now; whether that was all."""
        try:
            messages = one.messages(longest)
        except SandboxError as error:
            return self._ended(one, error)
        for message in messages:
            if "fault" in message:
                raise SandboxError(f"the runner failed: {message['fault']}")
            if "done" in message:
                return True
            if "begun" in message:
                self.begun = True
                continue
            try:
                self._note(message)
            except (LookupError, TypeError, ValueError) as problem:
                raise SandboxError(f"a sandbox sent what is no result: {problem!r}") from None
        return False

    def _note(self, message: dict[str, Any]) -> None:
        given: dict[str, Any] = {key: message.get(key) for key in ("ended", "code", "signal")}
        given |= {key: float(message.get(key, 0.0)) for key in ("seconds", "cpu")}
        given |= {
            key: str(message.get(key, "")).encode("latin-1", "replace").decode("utf-8", "replace")
            for key in ("stdout", "stderr", "value")
        }
        self._runs[int(message["run"])] = RunResult(**given)

    def _ended(self, one: Started, error: SandboxError) -> bool:
        """It is gone without a word. What is process 1 cannot be ended from inside."""
        if not self.begun:
            raise _NotBegun(str(error))
        if one.out_of_memory():
            self._rest = RunResult("memory", stderr="the kernel ended the sandbox for its memory")
        elif one.contained:
            raise error
        else:
            self._rest = RunResult("killed", stderr="the process that runs the program was ended")
        return True

    def results(self, out_of_memory: bool) -> tuple[RunResult, ...]:
        """One for each run; what was killed in a sandbox that was out of memory was killed for that."""
        if not self.begun:
            raise SandboxError("a sandbox had its job and did not begin")
        if out_of_memory:
            self._runs = [replace(run, ended="memory") if run and run.ended == "killed" else run for run in self._runs]
        return tuple(run or self._rest for run in self._runs)
