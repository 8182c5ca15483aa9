"""Folders of one name that count up: `name`, `name-2`, `name-3`, ... Each says in a JSON file what it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

from strop.errors import UserError
from strop.tracking.atomic import sync_folder, write_text_atomically


def folder_name(series: str, number: int) -> str:
    """The name of a folder of a series."""
    return series if number == 1 else f"{series}-{number}"


def folders_of(root: Path, series: str, manifest: str) -> list[tuple[int, Path]]:
    """Number and folder of each of a series. A copy under another folder name does not count.

    Args:
        manifest: the JSON file that has `series` and `number` in it.
    """
    found = []
    for path in root.glob(f"{_escaped(series)}*"):
        try:
            values = json.loads((path / manifest).read_text(encoding="utf-8"))
            named, number = values["series"], int(values["number"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if named == series and folder_name(named, number) == path.name:
            found.append((number, path))
    return found


def next_number(root: Path, series: str, manifest: str) -> int:
    """The number of the next folder of a series."""
    number = max((number for number, _ in folders_of(root, series, manifest)), default=0) + 1
    while (root / folder_name(series, number)).exists():
        number += 1
    return number


def place(temporary: Path, root: Path, series: str, manifest: str, write: Callable[[int], str]) -> tuple[Path, int]:
    """Rename a prepared folder to the next free name of a series.

    Args:
        write: the text of the manifest for a number; it is in the folder before the folder has its name.

    Raises:
        OSError: it cannot be renamed or written.
    """
    number = next_number(root, series, manifest)
    while True:
        path = root / folder_name(series, number)
        # Renaming onto an empty folder would succeed, so look first; the rename still fails on one that is not empty.
        if not path.exists():
            write_text_atomically(temporary / manifest, write(number))
            try:
                os.rename(temporary, path)
                sync_folder(root)
                return path, number
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
        number += 1


def cannot_be_made(root: Path, error: OSError) -> UserError:
    """What to say when no folder can be made."""
    return UserError(
        f"the run's folder cannot be made: {error.strerror}",
        where=str(root),
        mend="set run.folder to a folder that can be written and has room",
    )


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
