"""What of this machine a sandbox must not reach, and whether it did."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

SECRET = "secret-of-the-host-4711"


class Host:
    """Things on this machine that programs go for; `unharmed` says whether all of them are as they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "canary.txt"
        self.file.write_text(SECRET)
        self.home = Path.home() / f".strop-canary-{os.getpid()}"
        self.home.write_text(SECRET)
        self.bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", SECRET])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract_name = f"strop-canary-{os.getpid()}"
        self.abstract.bind(f"\0{self.abstract_name}")
        self.abstract.listen()
        self.abstract.setblocking(False)
        self.mounts = Path("/proc/self/mountinfo").read_text()
        self.clock = time.time() - time.monotonic()
        self.hostname = socket.gethostname()
        self.kernel = self._kernel()
        self.before = self._system()

    def harm(self) -> list[str]:
        """What is not as it was."""
        found = [f"{path} is changed" for path in (self.file, self.home) if path.read_text() != SECRET]
        if set(os.listdir(self.folder)) != {self.file.name}:
            found.append("there are new files beside the canary")
        if self.bystander.poll() is not None:
            found.append("the bystander was killed")
        for listener in (self.listener, self.abstract):
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                found.append("somebody connected")
        if Path("/proc/self/mountinfo").read_text() != self.mounts:
            found.append("the mounts have changed")
        if abs(time.time() - time.monotonic() - self.clock) > 60 or socket.gethostname() != self.hostname:
            found.append("clock or hostname was set")
        if self._kernel() != self.kernel:
            found.append("settings of the kernel were changed")
        if self._system() != self.before:
            found.append("files of the system were changed")
        return found

    @staticmethod
    def _kernel() -> list[str]:
        names = (
            "kernel/core_pattern",
            "kernel/modprobe",
            "kernel/sysrq",
            "vm/overcommit_memory",
            "kernel/yama/ptrace_scope",
        )
        return [path.read_text() for name in names if (path := Path("/proc/sys", name)).exists()]

    @staticmethod
    def _system() -> dict[str, float]:
        """When the folders were last changed that a program would write to."""
        import strop.sandbox.inside

        folders = [
            "/",
            "/usr",
            "/usr/bin",
            "/etc",
            os.path.dirname(strop.sandbox.inside.__file__),
            os.path.dirname(os.__file__),
        ]
        return {folder: os.stat(folder).st_mtime for folder in folders}

    def close(self) -> None:
        self.bystander.kill()
        self.bystander.wait()
        self.listener.close()
        self.abstract.close()
        self.home.unlink()


def processes_inside() -> list[int]:
    """Processes below this one that are in a process space of their own."""
    mine = os.readlink("/proc/self/ns/pid")
    parents, spaces = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            spaces[int(name)] = os.readlink(f"/proc/{name}/ns/pid")

    def below(pid: int) -> Iterator[int]:
        while pid in parents:
            pid = parents[pid]
            yield pid

    return [pid for pid, space in spaces.items() if space != mine and os.getpid() in below(pid)]


def settles_at(count: int, seconds: float = 15.0, *, beside: Collection[int] = ()) -> bool:
    """Whether the number of processes in sandboxes, beside those, comes to be this within a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(set(processes_inside()) - set(beside)) == count:
            return True
        time.sleep(0.05)
    return False
