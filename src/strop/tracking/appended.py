"""A file of lines that only grows: what a killed process left torn is cut off, and a full disk leaves it as it was."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from strop.tracking.atomic import replacing


class AppendedFile:
    """A file to append lines to; made if it is not there.

    Raises:
        OSError: it cannot be opened, on creation and in `keep`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = _open_for_append(path)

    def append(self, line: bytes) -> None:
        """Write one line, with its end, or nothing.

        Raises:
            OSError: it cannot be written; what was there stays as it was.
        """
        size = os.fstat(self._handle).st_size
        try:
            written = os.write(self._handle, line)
            if written < len(line):
                raise OSError(28, "No space left on device")
        except OSError:
            os.ftruncate(self._handle, size)
            raise

    def keep(self, lines: Iterable[bytes]) -> None:
        """Let the file have these lines and no others. A crash on the way leaves it as it was."""
        with replacing(self.path) as temporary, temporary.open("wb") as kept:
            kept.writelines(lines)
        os.close(self._handle)
        self._handle = -1
        self._handle = _open_for_append(self.path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _open_for_append(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(handle).st_size
    # Look for the last line end from the back; a line is far shorter than a block.
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
    return handle
