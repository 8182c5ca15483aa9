"""Checkpoints: written whole or not at all.

A checkpoint is written to a temporary folder, flushed to the disk and renamed; then the pointer file `latest` is
replaced. A crash at any point leaves the previous checkpoint and the pointer to it as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.errors import RunFailure

_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], dict[str, Any]], *, keep: int) -> Path:
    """Write checkpoint `step-NNNNNN` below `folder` and point `latest` at it.

    Args:
        write: writes its files into the folder it is given and returns what goes into `state/state.json`.
        keep: how many of the newest checkpoints up to this step stay.

    The checkpoint that `latest` names is never touched: asked for the same step again, nothing is written.

    Raises:
        RunFailure: something could not be written; nothing of the new checkpoint is left and the old one is intact.
    """
    name = f"step-{step:06d}"
    target, temporary = folder / name, folder / f".{name}.partial"
    if _pointed_at(folder) == name and _whole(target):
        return target
    placed = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        (temporary / "state").mkdir(parents=True)
        state = write(temporary)
        (temporary / "state" / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)
        # Only a run that was resumed before this step finds the name taken, by a checkpoint that nothing points at.
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        placed = True
        _flush(folder)
        _point(folder, name)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if placed and _pointed_at(folder) != name:
            shutil.rmtree(target, ignore_errors=True)
        full = "No space left" in str(error) or "StorageFull" in str(error) or "os error 28" in str(error)
        raise RunFailure(
            f"the checkpoint of step {step} could not be written: {'the disk is full' if full else error}",
            where=str(folder),
            mend="the previous checkpoint is intact; free some space and give the same command again"
            if full
            else "the previous checkpoint is intact; the same command goes on from it",
        ) from error
    # A run that was sent back to an earlier checkpoint finds later ones; they do not count, and are replaced in time.
    for old in [other for other in _all(folder) if _step_of(other) <= step][:-keep]:
        shutil.rmtree(folder / old, ignore_errors=True)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` points at, or None if there is none yet.

    Raises:
        RunFailure: the pointer names a checkpoint that is not there.
    """
    name = _pointed_at(folder)
    if name is None:
        return None
    target = folder / name
    if not name or not _whole(target):
        left = [other for other in _all(folder) if _whole(folder / other)]
        raise RunFailure(
            f"the latest checkpoint, {name or 'of which the name is lost'}, is missing or incomplete",
            where=str(folder / "latest"),
            mend=f"write {left[-1]!r} into this file to go on from there" if left else "start over with --fresh",
        )
    return target


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint`'s writer returned."""
    state: dict[str, Any] = json.loads((checkpoint / "state" / "state.json").read_text(encoding="utf-8"))
    return state


def _all(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(names, key=_step_of)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _pointed_at(folder: Path) -> str | None:
    pointer = folder / "latest"
    return pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None


def _whole(checkpoint: Path) -> bool:
    return (checkpoint / "state" / "state.json").exists()


def _point(folder: Path, name: str) -> None:
    temporary = folder / ".latest.partial"
    temporary.write_text(name + "\n", encoding="utf-8")
    _flush(temporary)
    temporary.replace(folder / "latest")
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
