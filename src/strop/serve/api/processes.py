"""Processes by number and start: a number alone may be another process by now."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Process:
    """One process, for ever: its number, the clock tick it started at, and the boot of the machine."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has a number now; None without one, or if it has ended and nobody has asked how."""
        start = _start_of(pid)
        return None if start is None else cls(pid, start, boot())

    @classmethod
    def read(cls, values: Any) -> Process | None:
        """From what `plain` gave; None if that is not a process."""
        try:
            return cls(int(values["pid"]), int(values["start"]), str(values["boot"]))
        except (KeyError, TypeError, ValueError):
            return None

    def plain(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {"pid": self.pid, "start": self.start, "boot": self.boot}

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.boot == boot() and _start_of(self.pid) == self.start

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to it and to no other; returns whether it was there."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            # The handle holds on to whichever process has the number; only then is it looked at.
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)

    def end_group(self) -> bool:
        """End it and everything in the group that it leads, at once."""
        if not self.alive or os.getpgid(self.pid) != self.pid:
            return self.send(signal.SIGKILL)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True


def boot() -> str:
    """The id of this boot of the machine."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is a name in brackets that may hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
