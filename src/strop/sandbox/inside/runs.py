"""One run of a program: a child process with limits, fed and listened to until it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn, Protocol

import programs

WATCH = 0.02
"""Seconds between two looks at what a run uses."""
_CHUNK = 1 << 16
_INODE = 1024
"""Bytes of the kernel's memory that an empty file takes, about."""
_OPEN_FILES = 256
_LEAVE = 0.1
"""Seconds that a served program may take to end when its tests have."""


class Home(Protocol):
    """What a run needs of the runner; see `runner.Runner`."""

    control: socket.socket
    link: socket.socket | None
    testing: Any
    setup: dict[str, Any]
    contained: bool
    folder: str
    wake: int

    def kill_all(self, group: int) -> float: ...


class Run:
    """One run of a job's program: a child with limits, fed and listened to until it ends."""

    def __init__(self, home: Home, job: dict[str, Any], given: str, channel: socket.socket | None, left: float) -> None:
        self.home, self.job, self.given, self.channel = home, job, given, channel
        self.limits: dict[str, Any] = job["limits"]
        self.left = left
        self.kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "value": bytearray()}
        self.ended = ""
        self.status: int | None = None
        self.cpu = 0.0

    def result(self) -> dict[str, Any]:
        """Do the run; how it ended and what it said."""
        for name, content in self.job["files"].items():
            path = os.path.join(self.home.folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content.encode("latin-1"))
        inside, outside = self._pipes()
        began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(inside)
        for descriptor in inside.values():
            os.close(descriptor)
        if self.channel is not None:
            self.channel.close()
        try:
            self._listen(outside, began)
        finally:
            self.cpu = self.home.kill_all(self.pid) or self.cpu
            self._drain(outside)
            for descriptor in outside.values():
                os.close(descriptor)
        return self._told(time.monotonic() - began)

    @staticmethod
    def _pipes() -> tuple[dict[str, int], dict[str, int]]:
        inside, outside = {}, {}
        inside["stdin"], outside["stdin"] = os.pipe()
        for name in ("stdout", "stderr", "value"):
            outside[name], inside[name] = os.pipe()
        for descriptor in outside.values():
            os.set_blocking(descriptor, False)
        return inside, outside

    # --- the child ---

    def _become(self, inside: dict[str, int]) -> NoReturn:
        """In the child: take the channels and the limits, forget the runner, be the program."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result, channel = self._take_channels(inside)
            os.chdir(self.home.folder)
            self._limit()
            job, mode = self.job, self.job["mode"]
            path = os.path.join(self.home.folder, "main.py" if mode == "script" else f"{programs.MODULE}.py")
            if mode in ("script", "call", "serve"):
                with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
                    file.write(job["source"])
            self._forget()
        except BaseException as error:
            os.write(2, f"the run did not start: {error!r}\n".encode())
            os._exit(1)
        if mode == "script":
            programs.run_script(job["source"], path)
        if mode == "command":
            programs.run_command(job["argv"])
        if mode == "call":
            programs.call_function(job["source"], path, self.given, result)
        if mode == "serve":
            self.home.testing.serve_program(job["source"], path, channel)
        self.home.testing.run_test(job["source"], "<tests>", self.given, channel, result)
        os._exit(1)

    def _forget(self) -> None:
        """A program that imports a module of one of our names means one of its own."""
        here = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [self.home.folder, *(path for path in sys.path if path != here)]
        for name in ("runner", "runs", "programs", "plain", "peer", "testing"):
            sys.modules.pop(name, None)

    def _take_channels(self, inside: dict[str, int]) -> tuple[int, int]:
        """Channels 0 to 2; 3 takes what is returned and 4 talks to the other sandbox, and nothing else is open."""
        channel = self.channel.detach() if self.channel is not None else inside["stdin"]
        order = [inside["stdin"], inside["stdout"], inside["stderr"], inside["value"], channel]
        # Out of the way first, so that no number is overwritten before it was copied.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in order]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number, inheritable=number < 3)
        os.closerange(len(order), _OPEN_FILES)
        return 3, 4

    def _limit(self) -> None:
        limits, mebi = self.limits, 1 << 20
        values = {
            resource.RLIMIT_CPU: (limits["cpu_seconds"], limits["cpu_seconds"] + 1),
            resource.RLIMIT_AS: limits["memory_mib"] * mebi,
            resource.RLIMIT_FSIZE: limits["disk_mib"] * mebi,
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            resource.RLIMIT_CORE: 0,
        }
        if self.home.setup["limit_processes"]:
            values[resource.RLIMIT_NPROC] = limits["processes"] + 1  # The runner is one of them.
        for kind, value in values.items():
            soft, hard = value if isinstance(value, tuple) else (value, value)
            _, highest = resource.getrlimit(kind)
            if highest != resource.RLIM_INFINITY:
                soft, hard = min(soft, highest), min(hard, highest)
            # macOS refuses some of them.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (soft, hard))

    # --- the parent ---

    def _listen(self, outside: dict[str, int], began: float) -> None:
        """Feed and listen until the child has ended, a limit is reached, or the host has gone."""
        names = {descriptor: name for name, descriptor in outside.items()}
        poll = select.poll()
        takes_input = self.job["mode"] in ("script", "command")
        feed = memoryview(self.given.encode("utf-8", "surrogatepass")) if takes_input else memoryview(b"")
        poll.register(self.home.wake, select.POLLIN)
        poll.register(self.home.control, select.POLLIN)
        if self.job["mode"] == "serve" and self.home.link is not None:
            poll.register(self.home.link, select.POLLIN)
        for name in ("stdout", "stderr", "value"):
            poll.register(outside[name], select.POLLIN)
        poll.register(outside["stdin"], select.POLLOUT)
        watch, end, over = began + WATCH, began + min(self.limits["wall_seconds"], self.left), "timeout"
        while not self.ended:
            now = time.monotonic()
            if now >= end:
                later = began + self._more_time() if over == "timeout" else 0.0
                if later <= now:
                    self.ended = over
                    return
                end = later
            if now >= watch:
                self._watch()
                watch = time.monotonic() + WATCH
            for descriptor, event in poll.poll(max(min(watch, end) - time.monotonic(), 0) * 1000):
                channel = names.get(descriptor)
                if descriptor == self.home.control.fileno():
                    raise SystemExit(1)  # The host has closed the socket: nobody wants this run any more.
                if descriptor == self.home.wake:
                    os.read(self.home.wake, _CHUNK)
                    self._reap()
                elif channel is None:
                    # The tests' side has gone on, most likely because this one is ending.
                    poll.unregister(descriptor)
                    end, over = min(end, time.monotonic() + _LEAVE), "ok"
                elif channel == "stdin":
                    feed = self._feed(descriptor, feed, event)
                    if not feed:
                        poll.unregister(descriptor)
                        os.close(outside.pop("stdin"))
                elif not self._read(channel, descriptor):
                    poll.unregister(descriptor)

    def _more_time(self) -> float:
        """Seconds that the run may take in view of how long it has stood ready and other work had the processor.

        A busy machine is not its fault; that it keeps the machine busy itself may gain it twice its limit, no more.
        """
        wall = self.limits["wall_seconds"]
        try:
            with open(f"/proc/{self.pid}/schedstat") as file:
                waited = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            waited = 0.0
        return min(wall + min(waited, 2 * wall), self.left)

    @staticmethod
    def _feed(descriptor: int, feed: memoryview, event: int) -> memoryview:
        if event & select.POLLERR:
            return memoryview(b"")
        try:
            return feed[os.write(descriptor, feed[:_CHUNK]) :]
        except BlockingIOError:
            return feed
        except BrokenPipeError:
            return memoryview(b"")

    def _read(self, name: str, descriptor: int) -> bool:
        """Take what a channel has; False at its end."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        limit = self.limits["output_kib"] << 10
        taken = len(self.kept["value"]) if name == "value" else len(self.kept["stdout"]) + len(self.kept["stderr"])
        self.kept[name] += data[: limit - taken]
        if taken + len(data) > limit:
            self.ended = "output_limit"
        return bool(data)

    def _drain(self, outside: dict[str, int]) -> None:
        """What the run had still written when it ended."""
        for name in ("stdout", "stderr", "value"):
            ended = self.ended
            while self._read(name, outside[name]) and self.ended != "output_limit":
                if not select.select([outside[name]], [], [], 0)[0]:
                    break
            if ended not in ("", "ok"):
                self.ended = ended

    def _reap(self) -> None:
        """Collect children that have ended; the run has, when its own child has."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status, self.cpu = status, usage.ru_utime + usage.ru_stime
                self.ended = self.ended or "ok"

    def _watch(self) -> None:
        """Stop a run whose processes and files together take more than it may have."""
        used, count = 0, 0
        for folder in self.home.setup["scratch"] if self.home.contained else ():
            about = os.statvfs(folder)
            used += (about.f_blocks - about.f_bfree) * about.f_frsize + (about.f_files - about.f_ffree) * _INODE
        for name in os.listdir("/proc") if self.home.contained and os.path.isdir("/proc/1") else ():
            if name.isdigit() and name != "1":
                try:
                    with open(f"/proc/{name}/status", "rb") as file:
                        fields = dict(line.split(b":", 1) for line in file if line.startswith((b"Rss", b"Threads")))
                except OSError:
                    continue
                count += int(fields.get(b"Threads", b"1"))
                used += sum(int(fields.get(kind, b"0 kB").split()[0]) << 10 for kind in (b"RssAnon", b"RssShmem"))
        if used > self.limits["memory_mib"] << 20:
            self.ended = "memory"
        elif count > self.limits["processes"]:
            self.ended = "killed"
            self.kept["stderr"] += b"more processes than allowed\n"

    def _told(self, seconds: float) -> dict[str, Any]:
        code = signal_number = None
        if self.status is not None:
            if os.WIFSIGNALED(self.status):
                signal_number = os.WTERMSIG(self.status)
            else:
                code = os.WEXITSTATUS(self.status)
        ended = self.ended
        if ended == "ok":
            last = bytes(self.kept["stderr"]).rstrip().rpartition(b"\n")[2]
            if signal_number == signal.SIGXCPU or (signal_number and self.cpu >= self.limits["cpu_seconds"]):
                ended = "timeout"
            elif signal_number == signal.SIGKILL:
                ended = "killed"
            elif code and last.startswith(b"MemoryError"):
                ended = "memory"
            elif code or signal_number:
                ended = "error"
        kept = {name: bytes(data).decode("latin-1") for name, data in self.kept.items()}
        return {
            "ended": ended,
            "code": code,
            "signal": signal_number,
            "seconds": round(seconds, 6),
            "cpu": round(self.cpu, 6),
            **kept,
        }
