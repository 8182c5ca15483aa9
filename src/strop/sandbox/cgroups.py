"""Control groups: the kernel's own limits on a whole sandbox, where this process may make groups.

They count what no limit of a single process does: memory of the kernel and of pipes and sockets, and every process.
Without them the runner looks at the sandbox every 20 ms instead; with them it still does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path

from strop.config.sandbox import LimitSettings

SLACK_MIB = 32
"""Above the limit that the runner keeps: the runner itself, and page tables."""
_PREFIX = "strop-sandbox-"

# Files by version of the interface: what holds each limit, and where the kernel counts what it ended.
_MEMORY = {1: "memory.limit_in_bytes", 2: "memory.max"}
_SWAP = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}


class Cgroups:
    """Makes one group for each sandbox.

    Args:
        version: 1 or 2.
        parents: folder below which the groups are made, by controller: `memory` and `pids`; version 2 has one for both.
    """

    def __init__(self, version: int, parents: Mapping[str, Path]) -> None:
        self.version = version
        self.parents = dict(parents)
        self._numbers = itertools.count()

    def cage(self, limits: LimitSettings) -> Group:
        """A group for the next sandbox, which has these limits as a whole."""
        name = f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        return Group(self.version, {kind: parent / name for kind, parent in self.parents.items()}, limits)


class Group:
    """The group of one sandbox, a folder in each hierarchy; see `started.Cage`."""

    def __init__(self, version: int, folders: Mapping[str, Path], limits: LimitSettings) -> None:
        self.version = version
        self.folders = dict(folders)
        self.limits = limits

    def hold(self, pid: int) -> None:
        """Make the group and put a process into it.

        Raises:
            OSError: the kernel does not allow it.
        """
        for folder in dict.fromkeys(self.folders.values()):
            folder.mkdir()
        memory, most = self.folders["memory"], (self.limits.memory_mib + SLACK_MIB) << 20
        (memory / _MEMORY[self.version]).write_text(str(most))
        with contextlib.suppress(OSError):  # A kernel without swap has no such file.
            (memory / _SWAP[self.version]).write_text("0" if self.version == 2 else str(most))
        (self.folders["pids"] / "pids.max").write_text(str(self.limits.processes + 2))
        for folder in dict.fromkeys(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel ended something in it for its memory."""
        try:
            text = (self.folders["memory"] / _EVENTS[self.version]).read_text()
        except OSError:
            return False
        counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
        return int(counts.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """Remove the group; its processes have ended, though the kernel may not have noticed yet."""
        for folder in dict.fromkeys(self.folders.values()):
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)


def find_cgroups(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> Cgroups | None:
    """Where groups can be made: below this process's own, or beside it; None where nowhere.

    Nothing that is there is changed: a controller that is not enabled below a group stays so.

    Args:
        root: where control groups are mounted.
        own: what `/proc/self/cgroup` says.
    """
    if own is None:
        try:
            own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        except OSError:
            return None
    mine: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        mine.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    if "" in mine:
        group = root / mine[""]
        unified = _first_that_works([group, group.parent], root, "memory.max", "pids.max")
        if unified is not None:
            return Cgroups(2, {"memory": unified, "pids": unified})
    if not {"memory", "pids"} <= mine.keys():
        return None
    memory = _first_that_works([root / "memory" / mine["memory"], root / "memory"], root, "memory.limit_in_bytes")
    pids = _first_that_works([root / "pids" / mine["pids"], root / "pids"], root, "pids.max")
    return Cgroups(1, {"memory": memory, "pids": pids}) if memory is not None and pids is not None else None


def _first_that_works(folders: list[Path], root: Path, *needed: str) -> Path | None:
    """The first folder below which a group can be made that has the files."""
    for folder in folders:
        if not folder.is_relative_to(root) or not folder.is_dir():
            continue
        _sweep(folder)
        trial = folder / f"{_PREFIX}{os.getpid()}-trial"
        try:
            trial.mkdir()
        except OSError:
            continue
        try:
            if all(os.access(trial / name, os.W_OK) for name in needed):
                return folder
        finally:
            trial.rmdir()
    return None


def _sweep(folder: Path) -> None:
    """Remove groups of processes that were killed before they could."""
    for group in folder.glob(f"{_PREFIX}*"):
        pid = group.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
