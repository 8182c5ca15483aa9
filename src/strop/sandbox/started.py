"""One started sandbox, as the host sees it: a process, a socket to it, and the messages on that socket."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.sandbox.protocol import Job, SandboxError

START_SECONDS = 60.0
"""How long a sandbox may take to get ready; a machine that is busy with other things is slow, not broken."""
GRACE_SECONDS = 10.0
"""How much longer than its limit a job may take before everything is killed from outside."""


class Cage(Protocol):
    """What a sandbox is locked into from outside, besides what its command does: limits on the whole of it."""

    def hold(self, pid: int) -> None:
        """Lock up a process that has no children yet."""
        ...

    def out_of_memory(self) -> bool:
        """Whether the kernel ended something in it for its memory."""
        ...

    def remove(self) -> None: ...


@dataclass
class Command:
    """How to start one sandbox.

    argv: the command; the runner's own arguments come after it. descriptors: to be inherited, and closed here once it
    has started. info: descriptor on which the command writes JSON with `child-pid`, the runner's process as the host
    sees it; None where the command is the runner itself. folder: removed with the sandbox.
    """

    argv: Sequence[str]
    setup: dict[str, Any]
    environment: dict[str, str]
    descriptors: list[int] = field(default_factory=list)
    info: int | None = None
    folder: Path | None = None
    cage: Cage | None = None


class Started:
    """A sandbox that was started, for one job.

    Args:
        command: how to start it. A thread must start it that lives as long as it does: the kernel ends the sandbox with
            that thread.
    """

    def __init__(self, command: Command) -> None:
        self.contained: bool = command.setup["contained"]
        self._command = command
        self._control, inside = socket.socketpair()
        self._errors, errors = os.pipe()
        self._buffer = bytearray()
        self._ready = False
        self._watched: int | None = None
        try:
            self._process = subprocess.Popen(
                [*command.argv, str(inside.fileno()), json.dumps(command.setup)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=command.environment,
                pass_fds=[inside.fileno(), *command.descriptors],
                cwd=command.folder or "/",
            )
        except BaseException:
            self._control.close()
            self._release()
            raise
        finally:
            inside.close()
            os.close(errors)
            for descriptor in command.descriptors:
                os.close(descriptor)

    def wait_until_ready(self) -> None:
        """Wait until it can take its job.

        Raises:
            SandboxError: it did not start; the error has what it printed.
        """
        end = time.monotonic() + START_SECONDS
        while not self._ready:
            if not _readable(self._control, end - time.monotonic()):
                raise SandboxError(f"a sandbox was not ready within {START_SECONDS:g} s")
            messages = self.messages(1 << 16)
            self._ready = {"ready": True} in messages
            if messages and not self._ready:
                raise SandboxError(f"a sandbox did not get ready: {messages[0].get('fault', messages[0])}")
        if self._command.info is not None:
            self._watch(self._command.info)

    def _watch(self, info: int) -> None:
        """Get hold of the runner's process, and lock it up.

        Raises:
            SandboxError: it has ended already, or cannot be locked up.
        """
        try:
            pid = int(json.loads(os.read(info, 1 << 12))["child-pid"])
            self._watched = os.pidfd_open(pid)
            # Had it ended, its number could be another process's by now.
            parent = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) != self._process.pid:
                os.close(self._watched)
                self._watched = None
                raise ProcessLookupError("it has ended")
            if self._command.cage is not None:
                self._command.cage.hold(pid)
        except (OSError, ValueError, LookupError) as error:
            raise SandboxError(f"a sandbox could not be taken hold of: {error}") from None

    def fileno(self) -> int:
        return self._control.fileno()

    def give(self, job: Job, link: socket.socket | None) -> None:
        """Hand over the job, with the socket to the other sandbox of a pair.

        Raises:
            SandboxError: it has died while it waited.
        """
        data = json.dumps(job.to_json() | {"partner": None}, separators=(",", ":")).encode()
        data = len(data).to_bytes(4, "big") + data
        self._control.settimeout(START_SECONDS)
        try:
            sent = socket.send_fds(self._control, [data], [link.fileno()]) if link is not None else 0
            self._control.sendall(data[sent:])
        except OSError as error:
            raise SandboxError(f"a sandbox died before it had its job: {error}") from None

    def messages(self, longest: int) -> list[dict[str, Any]]:
        """What it says now; waits if it says nothing.

        Args:
            longest: bytes of a message; one that is longer was not written by the runner.

        Raises:
            SandboxError: it has ended, or says what the runner does not say.
        """
        self._control.settimeout(None)
        try:
            data = self._control.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            raise SandboxError(f"a sandbox ended unexpectedly: {self._printed() or 'it printed nothing'}")
        self._buffer += data
        found = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > longest:
                raise SandboxError(f"a sandbox sent a message of {length} bytes")
            if len(self._buffer) < 4 + length:
                break
            try:
                message = json.loads(self._buffer[4 : 4 + length])
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise SandboxError("a sandbox sent what is no message")
            found.append(message)
            del self._buffer[: 4 + length]
        return found

    def out_of_memory(self) -> bool:
        """Whether the kernel ended something in it for the memory of the whole."""
        return self._command.cage is not None and self._command.cage.out_of_memory()

    def kill(self) -> None:
        """End everything in it, and hear no more of it; what is left to do is `finish`'s."""
        self._control.close()
        self.end()

    def end(self) -> None:
        """End everything in it."""
        if self._watched is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)
        elif self.contained or not self._ready:
            self._process.kill()  # Not ready yet: what it has started ends with it.

    def finish(self) -> None:
        """Wait until all of it is gone, and remove what it leaves."""
        if self._watched is not None:
            _readable(self._watched, GRACE_SECONDS)
            os.close(self._watched)
        try:
            self._process.wait(0.5 if self.contained else GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        """Give back what was made for it; it has ended, or was never there."""
        os.close(self._errors)
        if self._command.info is not None:
            os.close(self._command.info)
        if self._command.cage is not None:
            self._command.cage.remove()
        if self._command.folder is not None:
            shutil.rmtree(self._command.folder, ignore_errors=True)

    def _printed(self) -> str:
        """The end of what the command has printed about itself, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if not _readable(self._errors, 0.0):
            return ""
        return os.read(self._errors, 1 << 16).decode(errors="replace").strip()[-2000:]


def _readable(channel: socket.socket | int, seconds: float) -> bool:
    """Whether there is something to read, or the end of it, within a time; `select` knows no descriptor above 1023."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(1e3 * max(seconds, 0.0)))
