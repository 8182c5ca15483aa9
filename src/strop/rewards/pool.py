"""A pool of worker processes for checks that may hang, crash or fill the memory.

Invariants, each with a test in `tests/rewards/test_pool.py`:

1. Every item gets exactly one answer: its verdicts, a time-out, or an error.
2. An item's time-out counts from when a worker begins with it, not from when it was submitted.
3. A worker that exceeds it is killed with its process group and replaced. So is one that died.
4. Only the item that a worker was at is blamed; those that were sent with it go to another worker.
5. After `close`, or when this process has ended in whatever way, no worker is left.
"""

from __future__ import annotations

import atexit
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from strop.config.rewards import VerifierSettings
from strop.errors import RunFailure, StropError
from strop.rewards.process import Died, Worker, raise_failure
from strop.rewards.protocol import Completed, Verdict
from strop.rewards.worker import verdicts_of

AT_ONCE = 16
"""Items that are sent to a worker together, at most."""
OF_A_WORKER = 10_000
"""Items after which a worker is replaced, for parsers keep what they have seen."""
MOVES = 3
"""How often an item goes to another worker because its own had ended before."""

Verdicts = list[Verdict]


@dataclass(frozen=True, eq=False)
class Check:
    """What is done with items: the settings of a verifier, and the seconds that one item may take."""

    settings: VerifierSettings
    timeout: float


@dataclass(eq=False)
class _Batch:
    """The items of one `submit`: what is known of each, and how many are not known yet."""

    future: Future[list[Verdicts]]
    found: list[Verdicts]
    left: int


@dataclass(eq=False)
class _Item:
    check: Check
    payload: bytes
    completions: int
    batch: _Batch
    index: int
    moves: int = 0


class WorkerPool:
    """Up to `workers` processes, started when there is work for them; see the top of the file.

    Each process has a thread here that speaks with it, so that time-outs hold while an event loop is busy.

    Args:
        workers: processes at the same time. memory: GiB of address space of each.
    """

    def __init__(self, *, workers: int, memory: float = 2.0) -> None:
        self._workers = workers
        self._memory = memory
        self._lock = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._threads: list[threading.Thread] = []
        self._live: set[Worker] = set()
        self._idle = 0
        self._closed = False

    def submit(self, check: Check, items: Sequence[Sequence[Completed]]) -> Future[list[Verdicts]]:
        """Verdicts on each item, in order; an item is some completions that are checked in one call.

        The future fails with a StropError if the check raises one. When it is cancelled, items that no worker has been
        sent are forgotten.

        Raises:
            RunFailure: something in an item cannot be sent to another process.
        """
        batch = _Batch(Future(), [[] for _ in items], len(items))
        if not items:
            batch.future.set_result([])
            return batch.future
        new = [_Item(check, _pickled(item, check), len(item), batch, index) for index, item in enumerate(items)]
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._waiting.extend(new)
            missing = min(len(self._waiting) - self._idle, self._workers - len(self._threads))
            for _ in range(missing):
                self._threads.append(threading.Thread(target=self._serve, name="strop-worker", daemon=True))
                self._threads[-1].start()
            if len(self._threads) == missing:
                atexit.register(self.close)
            self._lock.notify_all()
        return batch.future

    def close(self) -> None:
        """End all workers, whatever they are at; returns when none is left. What was not answered is an error."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            for worker in self._live:
                worker.kill()
            self._lock.notify_all()
        for item in waiting:
            self._fail(item, "verifier_error", "the run has ended")
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)

    def pids(self) -> list[int]:
        """Process ids of the workers there are now."""
        with self._lock:
            return [worker.pid for worker in self._live]

    # What a thread does.

    def _serve(self) -> None:
        worker: Worker | None = None
        while items := self._take():
            try:
                if worker is not None and (worker.items >= OF_A_WORKER or not worker.alive()):
                    self._end(worker)
                    worker = None
                if worker is None:
                    worker = self._start()
                goes_on = self._work(worker, items)
            except Died as error:  # It did not start, or did not build the check.
                goes_on = False
                for item in items:
                    self._fail(item, "verifier_error", str(error))
            except Exception as error:  # A fault of this file must not leave anybody waiting.
                goes_on = False
                for item in items:
                    _fail_batch(item.batch, error)
            if worker is not None and not goes_on:
                self._end(worker)
                worker = None
        if worker is not None:
            self._end(worker)

    def _take(self) -> list[_Item]:
        """Items of one check, the longer the queue the more; empty when the pool is closed."""
        with self._lock:
            while True:
                while self._waiting and self._waiting[0].batch.future.done():  # cancelled, or failed already
                    self._waiting.popleft()
                if self._waiting or self._closed:
                    break
                self._idle += 1
                self._lock.wait()
                self._idle -= 1
            count = min(AT_ONCE, -(-len(self._waiting) // len(self._threads)))
            taken: list[_Item] = []
            while self._waiting and len(taken) < count and (not taken or self._waiting[0].check is taken[0].check):
                taken.append(self._waiting.popleft())
            return taken

    def _work(self, worker: Worker, items: list[_Item]) -> bool:
        """Get answers to some items; returns whether the worker can go on.

        Raises:
            StropError: the check cannot be built. Died: the worker ended while building it.
        """
        check = items[0].check
        problem = worker.prepare(check.settings, check.timeout)
        if problem is not None:
            for item in items:
                self._fail(item, "verifier_error", problem)
            return True
        try:
            worker.begin(check.settings, check.timeout, [item.payload for item in items])
        except Died as error:
            self._put_back(items, str(error))
            return False
        for position, item in enumerate(items):
            try:
                self._settle(item, worker.answer(check.timeout))
            except (TimeoutError, Died) as error:
                # The end first: whoever takes the others then finds memory and cores free.
                worker.end()
                if isinstance(error, Died):
                    self._fail(item, "verifier_error", str(error))
                else:
                    self._fail(item, "timeout", f"no verdict within {check.timeout:g} s")
                self._put_back(items[position + 1 :], "the worker process had ended")
                return False
        return True

    def _settle(self, item: _Item, reply: dict[str, Any]) -> None:
        try:
            raise_failure(reply)
            self._answer(item, verdicts_of(reply, item.completions))
        except StropError as error:
            _fail_batch(item.batch, error)
        except ValueError:
            raise Died(f"a worker answered {str(reply)[:200]!r}") from None

    def _put_back(self, items: list[_Item], why: str) -> None:
        """Give items that no worker has begun with to the next one."""
        for item in items:
            item.moves += 1
        with self._lock:
            again = [item for item in items if item.moves <= MOVES and not self._closed]
            self._waiting.extendleft(reversed(again))
            self._lock.notify_all()
        for item in items:
            if item not in again:
                self._fail(item, "verifier_error", why)

    def _answer(self, item: _Item, verdicts: Verdicts) -> None:
        batch = item.batch
        with self._lock:
            batch.found[item.index] = verdicts
            batch.left -= 1
            done = batch.left == 0
        if done:
            with suppress(InvalidStateError):  # It was cancelled, or has failed.
                batch.future.set_result(batch.found)

    def _fail(self, item: _Item, status: Any, detail: str) -> None:
        self._answer(item, [Verdict(None, status, detail)] * item.completions)

    def _start(self) -> Worker:
        worker = Worker(memory=self._memory)
        with self._lock:
            self._live.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _end(self, worker: Worker) -> None:
        worker.end()
        with self._lock:
            self._live.discard(worker)


def _fail_batch(batch: _Batch, error: Exception) -> None:
    with suppress(InvalidStateError):
        batch.future.set_exception(error)


def _pickled(item: Sequence[Completed], check: Check) -> bytes:
    try:
        return pickle.dumps(list(item))
    except Exception as error:
        raise RunFailure(
            f"a row cannot be sent to a worker process: {error}",
            where=f"verifier {check.settings.name or check.settings.kind}",
            mend="keep values in the rows that can be pickled, or set `isolate: thread`",
        ) from None
