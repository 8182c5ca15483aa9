"""Files below one folder and nowhere else: names are checked, and no link is followed on the way."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
SERVED = (
    *("run.json", "config.yaml", "metrics.jsonl", "timeline.jsonl", "load.jsonl", "pipeline.json"),
    *("episodes", "checkpoints", "events"),
)
"""What is served of a run's folder: files of these names, and everything below these folders."""


class NotServed(Exception):
    """A path that is not below the folder, not a plain file, or not meant to be seen."""


def parts_of(path: str) -> list[str]:
    """The names in a relative path. Raises NotServed where one could lead elsewhere, or is hidden."""
    parts = path.split("/")
    for part in parts:
        if not part or part.startswith(".") or "\\" in part or len(part) > 255:
            raise NotServed(path)
        if any(not character.isprintable() for character in part):
            raise NotServed(path)
    return parts


@contextmanager
def folder_below(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """A handle of a folder below `root`; no part of the way is a link.

    Raises:
        NotServed: there is no such folder, or a link is on the way.
    """
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise NotServed(str(root)) from None
    try:
        for part in parts:
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW, dir_fd=handle)
            except (OSError, ValueError):
                raise NotServed("/".join(parts)) from None
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def open_below(root: Path, parts: Sequence[str]) -> int:
    """A handle to read a plain file below `root`; the caller closes it.

    Raises:
        NotServed: there is no such file, it is not a plain one, or a link is on the way.
    """
    if not parts:
        raise NotServed("")
    with folder_below(root, parts[:-1]) as folder:
        try:
            # Without O_NONBLOCK a pipe would wait here for somebody to write to it.
            handle = os.open(parts[-1], os.O_RDONLY | os.O_NONBLOCK | _NO_FOLLOW, dir_fd=folder)
        except (OSError, ValueError):
            raise NotServed("/".join(parts)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotServed("/".join(parts))
    return handle


def files_below(root: Path, parts: Sequence[str], *, depth: int = 4) -> Iterator[tuple[str, int, float]]:
    """(path relative to `root`, bytes, time of change) of each plain file below a folder that is served, in order."""
    with folder_below(root, parts) as folder:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = [*parts, entry.name]
        try:
            parts_of("/".join(path))
            with folder_below(root, parts) as folder:
                found = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
        except (NotServed, OSError):
            continue
        if stat.S_ISREG(found.st_mode):
            yield "/".join(path), found.st_size, found.st_mtime
        elif stat.S_ISDIR(found.st_mode) and depth > 0:
            try:
                yield from files_below(root, path, depth=depth - 1)
            except NotServed:
                continue


def refuse_links(root: Path, parts: Sequence[str], names: Sequence[str]) -> None:
    """Raise NotServed if one of these entries of a folder is a link, or in a folder among them anything is.

    For what is read by its path, by code that would follow.
    """
    with folder_below(root, parts) as folder:
        for name in names:
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISLNK(found.st_mode):
                raise NotServed(name)
            if stat.S_ISDIR(found.st_mode):
                with folder_below(root, [*parts, name]) as inside:
                    if any(entry.is_symlink() for entry in os.scandir(inside)):
                        raise NotServed(name)


def is_below(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, with all links on the way followed, is one of some folders or below it, and nothing on the way
    below that folder is hidden."""
    try:
        real = path.resolve()
        for root in roots:
            home = root.resolve()
            if real.is_relative_to(home) and not any(part.startswith(".") for part in real.relative_to(home).parts):
                return True
    except (OSError, ValueError, RuntimeError):
        return False
    return False
