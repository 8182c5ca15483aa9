"""What a worker prints: into a file of its own, with role and rank before each line; warnings also to the driver."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

MOST_NOTICES = 100
"""Warnings kept until the driver asks; of more, the last ones."""

# A process of its own, so that the last words of one that is killed are written too.
_COPY = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
head = sys.argv[2].encode() + b" | "
with open(sys.argv[1], "ab", buffering=0) as file:
    for line in sys.stdin.buffer:
        file.write(head + line if line.endswith(b"\\n") else head + line + b"\\n")
"""


def log_file(folder: str | Path, role: str, rank: int) -> Path:
    """`ROLE-RANK.log` in the folder of the logs."""
    return Path(folder) / f"{role}-{rank}.log"


def tail(path: str | Path | None, lines: int = 15) -> list[str]:
    """The last lines of a log, as far as this machine can see it."""
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


class Notices(logging.Handler):
    """Warnings and errors, by `logging` or `warnings`, on standard error here and kept for the driver."""

    def __init__(self, head: str) -> None:
        super().__init__(logging.WARNING)
        self._head = head
        self._lines: deque[str] = deque(maxlen=MOST_NOTICES)
        self._guard = threading.Lock()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.captureWarnings(True)
        root = logging.getLogger()
        # Otherwise every warning is printed twice, by this one and by the one that Ray or a library set.
        root.handlers = [h for h in root.handlers if type(h) is not logging.StreamHandler]
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            print(text, file=sys.stderr, flush=True)
            self.add(text)
        except Exception:
            self.handleError(record)

    def add(self, text: str) -> None:
        with self._guard:
            self._lines.extend(f"{self._head} | {line}" for line in text.rstrip().splitlines())

    def take(self) -> list[str]:
        """Lines since the last time, each with role and rank."""
        with self._guard:
            lines = list(self._lines)
            self._lines.clear()
        return lines


def redirect(role: str, rank: int, folder: str | None, notices: Notices) -> str | None:
    """Send standard output and error of this process, libraries in C included, to its file; returns the path."""
    if folder is None:
        return None
    path = log_file(folder, role, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        notices.add(f"no log is kept at {path} ({error}); Ray has what this process prints")
        return None
    read, write = os.pipe()
    subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _COPY, str(path), f"{role} {rank}"],
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    return str(path)
