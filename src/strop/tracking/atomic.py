"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; it takes `path`'s place when the block ends without an error.

    The content is on the disk before the name changes. The temporary name is fixed (`.NAME.tmp`), so what a killed
    process left there is overwritten by the next: there must be one writer only, as the run's lock makes sure.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a small UTF-8 file so that a reader, or a crash, sees the old text or the new one and nothing between."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    sync_file(path)
