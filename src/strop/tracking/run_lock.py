"""The lock that keeps two processes from training the same run."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from strop.errors import UserError

LOCK_FILE = "run.lock"


class RunLock:
    """An exclusive `flock` on a run's `run.lock`, held until `release` or the end of the process, however it ends.

    Children made by fork close their copy, so that a worker that outlives a killed trainer does not keep the lock.

    Raises:
        UserError: another process holds the lock (its id is named), or the file system knows no locks.
    """

    def __init__(self, run: Path, *, patience: float = 0.5) -> None:
        self.path = run / LOCK_FILE
        try:
            self._handle: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"the run's folder cannot be written: {error.strerror}", where=str(run), mend="see who owns the folder"
            ) from error
        try:
            self._acquire(run, patience)
        except BaseException:
            self._forget()
            raise
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held.add(self)

    def _acquire(self, run: Path, patience: float) -> None:
        assert self._handle is not None
        # `is_locked` of a passing `strop runs list` holds the lock for an instant: that must not stop a run.
        give_up = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise UserError(
                        f"the run is being trained by {_holder(self.path)}",
                        where=str(run),
                        mend="wait for that process or stop it; `--fresh` starts another run beside this one",
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                raise UserError(
                    f"the run's folder cannot be locked: {error.strerror}",
                    where=str(self.path),
                    mend="keep runs on a file system with locks: run.folder=/some/local/folder",
                ) from error

    def release(self) -> None:
        """Let others have the run; a second call does nothing."""
        if self._handle is not None:
            fcntl.flock(self._handle, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def is_locked(run: Path) -> bool:
    """Whether a process is training this run now."""
    try:
        handle = os.open(run / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        where = "" if holder["host"] == socket.gethostname() else f" on {holder['host']}"
        return f"process {holder['pid']}{where}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_close_in_child)
