"""One worker process, as the run sees it: start it, send it items, wait for its answers, end it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from strop.config.rewards import VerifierSettings
from strop.errors import RunFailure
from strop.rewards.frames import Closed, Frames

START_TIMEOUT = 120.0
"""Seconds that a worker may take to start, and to import what a check needs; on a busy machine it takes many."""
LOOK_EVERY = 0.25
"""Seconds between looks at whether a silent worker lives: a process that it started may hold its socket open."""

# The worker finds modules where this process does, whatever has changed its path.
_PROGRAM = (
    "import json, sys; paths, *arguments = json.loads(sys.argv[1]); sys.path[:] = paths; "
    "from strop.rewards.worker import main; main(*arguments)"
)


class Died(Exception):
    """The worker has ended without an answer; the message says how."""


class Worker:
    """A running worker process, the leader of a process group of its own.

    Methods are for one thread, but for `kill`, which any may call.

    Args:
        memory: GiB of address space.

    Raises:
        Died: it did not start.
    """

    def __init__(self, *, memory: float) -> None:
        here, there = socket.socketpair()
        with there:
            arguments = [[os.path.abspath(path) for path in sys.path], there.fileno(), os.getpid(), memory]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(arguments)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run alone, and the group can be killed as one.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._frames = Frames(here)
        self._built: set[int] = set()
        self._lock = threading.Lock()
        self._forgotten = False
        self.items = 0
        """Items that it was sent."""
        try:
            self.answer(START_TIMEOUT)
        except (Died, TimeoutError) as error:
            self.end()
            raise Died(f"a worker process did not start: {error or 'it said nothing'}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def prepare(self, settings: VerifierSettings, timeout: float) -> str | None:
        """Let it build a check, unless it has; returns what went wrong.

        Raises:
            RunFailure: the check cannot be built. Died: it ended, or took too long.
        """
        key = id(settings)
        if key in self._built:
            return None
        self._send(key, settings, timeout, ())
        try:
            reply = self.answer(START_TIMEOUT)
        except TimeoutError:
            raise Died(f"it did not build {settings.kind!r} within {START_TIMEOUT:g} s") from None
        if "error" in reply:
            return str(reply["error"])
        raise_failure(reply)
        self._built.add(key)
        return None

    def begin(self, settings: VerifierSettings, timeout: float, payloads: Sequence[bytes]) -> None:
        """Send it items, each a pickle of completions, for a check that it has built.

        Raises:
            Died: it has ended, or does not read.
        """
        self.items += len(payloads)
        self._send(id(settings), None, timeout, payloads)

    def answer(self, timeout: float) -> dict[str, Any]:
        """Its next answer.

        Raises:
            TimeoutError: it took longer, and may have ended itself for that. Died: it has ended.
        """
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            try:
                reply = json.loads(self._frames.receive(timeout=max(0.0, min(left, LOOK_EVERY))))
            except TimeoutError:
                if not self.alive():
                    raise self._ending() from None
                if left <= 0:
                    raise
            except (Closed, ValueError):
                raise self._ending() from None
            else:
                if isinstance(reply, dict):
                    return reply
                raise Died("it answered something else")

    def kill(self) -> None:
        """Kill it and every process that it started."""
        # Once it is forgotten its number may be another's.
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._forgotten:
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, wait for it, and forget it."""
        self.kill()
        self._process.wait()
        with self._lock:
            self._forgotten = True
        self._frames.close()

    def _send(self, key: int, settings: VerifierSettings | None, timeout: float, payloads: Sequence[bytes]) -> None:
        message = pickle.dumps((key, settings, timeout, tuple(payloads)))
        try:
            self._frames.send(message, timeout=START_TIMEOUT)
        except (Closed, TimeoutError):
            raise Died(str(self._ending())) from None

    def _ending(self) -> Exception:
        """How it ended; it is killed if it has only closed its socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.kill()
        code = self._process.wait()
        if code >= 0:
            return Died(f"the worker process ended with exit code {code}")
        if -code == signal.SIGALRM:  # Its own alarm was first, on a machine too busy to let this process kill it.
            return TimeoutError("the worker process ended itself")
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        return Died(f"the worker process was killed by {name}")


def raise_failure(reply: dict[str, Any]) -> None:
    """Raise the StropError that a worker had, if it had one."""
    if "failure" in reply:
        failure = reply["failure"]
        raise RunFailure(str(failure["what"]), where=str(failure["where"]), mend=str(failure["mend"]))
