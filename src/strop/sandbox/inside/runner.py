"""The first process of a sandbox: takes one job from the host, does its runs, says how each ended, and is gone.

In an isolated sandbox it is process 1 of its own process space: no signal from inside can stop or kill it, and when it
ends the kernel ends everything else. It never runs a program itself: it forks, and the child does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import site
import socket
import sys
import time
from typing import Any

from runs import Run

# What many programs import: every run is a child of this process and has it already.
_WARM = ("bisect", "collections", "functools", "heapq", "itertools", "math", "re", "string", "typing")

_CONTROL = 3
"""Number of the control socket, from the beginning on; it may have come with any number."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


class Runner:
    """One sandbox's life.

    Args:
        control: file descriptor of the socket to the host.
        setup: `contained`, whether this is process 1 of a process space of its own; `user`, the user to become, or
            None; `folder`, where programs work; `scratch`, all folders that they can write; `packages`, more folders to
            import from; `limit_processes`, whether the kernel counts processes for this sandbox alone.
    """

    def __init__(self, control: int, setup: dict[str, Any]) -> None:
        self.control = socket.socket(fileno=control)
        self.setup = setup
        self.contained: bool = setup["contained"]
        if self.contained and os.getpid() != 1:
            raise RuntimeError("this is not a process space of its own")
        self.folder: str = setup["folder"]
        self.link: socket.socket | None = None
        self.testing: Any = None
        self.wake, self._woken = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._woken, False)

    def live(self) -> None:
        """Get ready, wait for the job, do it."""
        self._harden()
        self._send({"ready": True})
        job = self._receive()
        if job is None:
            return
        if job["mode"] in ("serve", "check"):
            import testing

            self.testing = testing
        self._send({"begun": True})
        end = time.monotonic() + job["limits"]["total_seconds"]
        over = False
        for number, given in enumerate(job["inputs"]):
            left = end - time.monotonic()
            channel = self._next_channel(job["mode"], end) if not over and left > 0 else None
            if over or left <= 0 or (channel is None and self.testing is not None):
                self._send({"run": number, "ended": "not_run"})
                continue
            result = Run(self, job, given, channel, left).result()
            over = job["stop_at_failure"] and result["ended"] != "ok" and job["mode"] != "serve"
            over = over or (number + 1 < len(job["inputs"]) and not self._clean())
            self._send({"run": number, **result})
        if self.link is not None:
            self.link.close()  # The other side then knows that its last run is over.
        self._send({"done": True})

    # --- before ---

    def _harden(self) -> None:
        """Give up what is not needed any more, and be of no use to whoever gets at this process."""
        user = self.setup["user"]
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        if sys.platform == "linux":
            import ctypes

            # After the change of user, which undoes both. Children inherit that their memory is nobody's to read.
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        sys.path.extend(self.setup["packages"])
        site.setquit()
        site.sethelper()
        for name in _WARM:
            __import__(name)

    # --- the host ---

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self.control.sendall(len(data).to_bytes(4, "big") + data)

    def _receive(self) -> Any:
        """The job; None when the host has gone. With a job of two sandboxes comes the socket between them."""
        first, descriptors, _, _ = socket.recv_fds(self.control, 4, 1)
        if descriptors:
            self.link = socket.socket(fileno=descriptors[0])
        data = bytearray(first)
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            part = self.control.recv(1 << 20)
            if not part:
                return None
            data += part
        return json.loads(data[4:])

    # --- two sandboxes ---

    def _next_channel(self, mode: str, end: float) -> socket.socket | None:
        """The channel of the next run: the tests' side makes it and hands one end to the program's side."""
        if self.link is None:
            return None
        if mode == "check":
            mine, other = socket.socketpair()
            with other, contextlib.suppress(OSError):
                socket.send_fds(self.link, [b"c"], [other.fileno()])
            return mine
        self.link.settimeout(max(end - time.monotonic(), 0.001))
        try:
            _, descriptors, _, _ = socket.recv_fds(self.link, 1, 1)
        except OSError:
            return None
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    # --- after each run ---

    def kill_all(self, group: int) -> float:
        """End everything that a run has left behind; processor seconds of its own process, if that was among it."""
        seconds = 0.0
        while True:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL) if self.contained else self._kill_outside(group)
            try:
                pid, _, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return seconds
            if pid == group:
                seconds = usage.ru_utime + usage.ru_stime
            elif pid == 0:
                time.sleep(0.0005)

    @staticmethod
    def _kill_outside(group: int) -> None:
        """Where there is no process space of its own: the run's group, and what fell to this process as orphans."""
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as children:
            for pid in children.read().split():
                os.kill(int(pid), signal.SIGKILL)

    def _clean(self) -> bool:
        """Empty the folders that programs can write; whether that worked."""
        for folder in self.setup["scratch"]:
            try:
                with contextlib.suppress(OSError):
                    os.chmod(folder, 0o700)
                for name in os.listdir(folder):
                    path = os.path.join(folder, name)
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path, onerror=_open_up)
                    else:
                        os.unlink(path)
                if os.listdir(folder):
                    return False
            except (OSError, RecursionError):
                return False
        return True


def _open_up(act: Any, path: str, _: Any) -> None:
    """A folder that may not be read or written any more: allow it and try again, once."""
    os.chmod(os.path.dirname(path), 0o700)
    os.chmod(path, 0o700)
    if os.path.isdir(path):
        for name in os.listdir(path):
            inner = os.path.join(path, name)
            if os.path.isdir(inner) and not os.path.islink(inner):
                shutil.rmtree(inner, onerror=_open_up)
            else:
                os.unlink(inner)
        os.rmdir(path)
    else:
        act(path)


def _close_above(highest: int) -> None:
    """Close whatever else was handed down: a run closes low numbers only, and must not get anything of this."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        os.closerange(highest + 1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))
        return
    for number in numbers:
        if number > highest:
            with contextlib.suppress(OSError):
                os.close(number)


def main() -> None:
    """Be the runner that the command line describes: the number of the control socket, and the setup as JSON."""
    given = int(sys.argv[1])
    if given != _CONTROL:
        os.dup2(given, _CONTROL)
    os.set_inheritable(_CONTROL, False)
    _close_above(_CONTROL)
    runner = Runner(_CONTROL, json.loads(sys.argv[2]))
    try:
        runner.live()
    except BrokenPipeError:
        return
    except Exception as error:
        import traceback

        told = "".join(traceback.format_exception(error))
        runner._send({"fault": told[-4000:]})
