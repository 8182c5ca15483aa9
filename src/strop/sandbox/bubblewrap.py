"""Sandboxes by bubblewrap: a program sees a read-only system, private folders, no network and no other process.

As an ordinary user the sandbox is a user namespace. As root it is not: root mounts what is needed and the runner then
becomes a user that nobody is, without any capability, which the kernel's limit on processes also applies to.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import shutil
from pathlib import Path

from strop.config.sandbox import LimitSettings
from strop.errors import UserError
from strop.sandbox.cgroups import find_cgroups
from strop.sandbox.interpreter import INSIDE, Interpreter, environment, runner_arguments
from strop.sandbox.seccomp import filter_program
from strop.sandbox.started import Command

FOLDER = "/sandbox"
"""Where programs work: a file system of their own, in memory. `/tmp` leads to it."""
_RUNNER = "/.strop-runner"
_SHARED = "/dev/shm"
_NOBODIES = range(60001, 61184)
"""User numbers that no distribution gives to anybody (systemd: Users, Groups, UIDs and GIDs)."""
_USER = 1000
_CAP_SYS_ADMIN = 21
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/mime.types",
)


class Bubblewrap:
    """Makes the commands that start sandboxes.

    Args:
        interpreter: the Python of the runner and of programs.
        limits: those of the file systems are fixed when a sandbox starts.
        packages: whether programs may import packages.
        as_root: become nobody instead of using a user namespace; decided by what this process may do, if not given.

    Raises:
        UserError: bubblewrap is not installed.
    """

    def __init__(
        self, interpreter: Interpreter, limits: LimitSettings, *, packages: bool, as_root: bool | None = None
    ) -> None:
        path = shutil.which("bwrap")
        if path is None:
            raise UserError(
                "programs of the model need a sandbox, and bubblewrap is not installed",
                where="sandbox.backend",
                mend="apt-get install bubblewrap (or the like); a sandbox service (sandbox.url) and, without any "
                "isolation, sandbox.allow_unsandboxed are the other ways",
            )
        self.path = path
        self.interpreter = interpreter
        self.limits = limits
        self.packages = packages
        self.as_root = _may_mount() if as_root is None else as_root
        self.proc = True
        self.cgroups = find_cgroups()
        machine = platform.machine()
        try:
            self.filter: bytes | None = filter_program(machine)
        except ValueError:
            self.filter = None
        self._users = itertools.cycle(random.SystemRandom().sample(_NOBODIES, len(_NOBODIES)))

    def command(self) -> Command:
        """How to start the next sandbox."""
        info, info_inside = os.pipe()
        descriptors = [info_inside]
        options = ["--info-fd", str(info_inside)]
        if self.filter is not None:
            program, program_inside = os.pipe()
            os.write(program_inside, self.filter)
            os.close(program_inside)
            descriptors.append(program)
            options += ["--seccomp", str(program)]
        setup = {
            "contained": True,
            "user": next(self._users) if self.as_root else None,
            "folder": FOLDER,
            "scratch": [FOLDER, _SHARED],
            "packages": self.interpreter.packages if self.packages else (),
            "limit_processes": self.as_root or _counts_processes_by_namespace(),
        }
        argv = [self.path, *self._isolation(), *self._files(), *options, "--", *self._runner()]
        cage = self.cgroups.cage(self.limits) if self.cgroups is not None else None
        return Command(argv, setup, environment(FOLDER), descriptors, info, cage=cage)

    def _runner(self) -> list[str]:
        return runner_arguments(self.interpreter, _RUNNER)

    def _isolation(self) -> list[str]:
        """Namespaces, and that nothing outlives this process. The runner is process 1."""
        shared = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        ends = ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
        if self.as_root:
            user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--unshare-user", "--uid", str(_USER), "--gid", str(_USER), "--cap-drop", "ALL"]
        return [*shared, *user, *ends]

    def _files(self) -> list[str]:
        """A file system with nothing of this machine but its programs and libraries; all of it read-only but two."""
        size = str(self.limits.disk_mib << 20)
        options = ["--size", str(1 << 20), "--tmpfs", "/"]
        options += ["--ro-bind", "/usr", "/usr"]
        for folder in _SYSTEM:
            if os.path.islink(folder):
                options += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                options += ["--ro-bind", folder, folder]
        for name in _ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        packages = self.interpreter.packages if self.packages else ()
        store = ("/nix/store",) if os.path.isdir("/nix/store") else ()
        for folder in (*store, *self.interpreter.folders, *packages):
            options += _read_only(folder)
        options += ["--ro-bind", str(INSIDE), _RUNNER]
        # Root of a namespace may write to kernel settings that belong to no namespace; so nobody may write in /proc.
        options += ["--proc", "/proc", "--remount-ro", "/proc"] if self.proc else []
        options += ["--dev", "/dev"]
        for folder in (_SHARED, FOLDER):
            options += ["--perms", "1777", "--size", size, "--tmpfs", folder]
        if not any(folder.startswith("/tmp/") for folder in (*self.interpreter.folders, *self.interpreter.packages)):
            options += ["--symlink", FOLDER, "/tmp"]
        return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER]


def _read_only(folder: str) -> list[str]:
    """Show a folder at its own place, if it is not there already.

    The folders above it are made, and hold nothing else.
    """
    if any(folder == shown or folder.startswith(f"{shown}/") for shown in ("/usr", *_SYSTEM)):
        return []
    above = [str(parent) for parent in reversed(Path(folder).parents) if str(parent) != "/"]
    make = [word for parent in above for word in ("--perms", "0755", "--dir", parent)]
    return [*make, "--ro-bind", folder, folder]


def _may_mount() -> bool:
    """Whether this process is root with the right to mount, and not only called so."""
    if os.geteuid() != 0:
        return False
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _counts_processes_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the processes of a user namespace only, and not all of the user's (Linux 5.14)."""
    release = platform.release().split("-")[0].split(".")
    try:
        return (int(release[0]), int(release[1])) >= (5, 14)
    except (IndexError, ValueError):
        return False


def why_not(printed: str, root: Path = Path("/")) -> tuple[str, str]:
    """What keeps bubblewrap from working here, and the mend, from what it printed and what the kernel allows."""

    def kernel(name: str) -> str:
        try:
            return (root / "proc/sys" / name).read_text(encoding="ascii").strip()
        except OSError:
            return ""

    for name, bad, good in (
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("user/max_user_namespaces", "0", "15000"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        if kernel(name) == bad:
            key = name.replace("/", ".")
            return f"{key} is {bad}: users may not make namespaces", f"as root: sysctl -w {key}={good}"
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return (
            f"the container may not make namespaces ({printed})",
            "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined, or with --privileged",
        )
    return printed, "run `bwrap --unshare-all --ro-bind / / true` to see what the kernel refuses"
