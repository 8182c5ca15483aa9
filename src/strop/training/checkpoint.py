"""Checkpoints: written whole or not at all.

A checkpoint is written to a temporary folder, flushed to the disk and renamed; then the pointer files `latest` and
`best` are replaced, and only then older checkpoints removed. A crash at any point leaves the previous checkpoint and
the pointers to checkpoints that are there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.errors import RunFailure
from strop.models.save import sync_path

_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    folder: Path,
    step: int,
    write: Callable[[Path], dict[str, Any]],
    *,
    keep: int,
    ranking: Sequence[int] = (),
    keep_best: int = 0,
) -> Path:
    """Write checkpoint `step-NNNNNN` below `folder` and point `latest` at it.

    Args:
        write: writes its files into the folder it is given and returns what goes into `state/state.json`.
        keep: how many of the newest checkpoints up to this step stay.
        ranking: steps, best first. keep_best: how many of those that have a checkpoint stay too; `best` points at the
            first.

    The checkpoint that `latest` names is never touched: asked for the same step again, nothing is written.

    Raises:
        RunFailure: something could not be written; nothing of the new checkpoint is left and the old one is intact.
    """
    name = _name_of(step)
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
            sync_path(path)
        sync_path(temporary)
        # Only a run that was resumed before this step finds the name taken, by a checkpoint that nothing points at.
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        placed = True
        sync_path(folder)
        _point(folder, name, "latest")
        best = point_best(folder, ranking, keep_best)
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
        if _step_of(old) not in best:
            shutil.rmtree(folder / old, ignore_errors=True)
    return target


def checkpoint_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return folder / _name_of(step)


def best_checkpoints(folder: Path, ranking: Sequence[int], keep: int, *, planned: int | None = None) -> list[int]:
    """The first `keep` steps of a ranking that have a checkpoint, or are `planned` to get one."""
    return [step for step in ranking if step == planned or _whole(folder / _name_of(step))][:keep]


def point_best(folder: Path, ranking: Sequence[int], keep: int) -> list[int]:
    """Point `best` at the first step of a ranking that has a checkpoint, or remove it; returns the best steps."""
    best = best_checkpoints(folder, ranking, keep)
    if not best:
        (folder / "best").unlink(missing_ok=True)
    elif _pointed_at(folder, "best") != _name_of(best[0]):
        _point(folder, _name_of(best[0]), "best")
    return best


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


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


def _pointed_at(folder: Path, pointer: str = "latest") -> str | None:
    file = folder / pointer
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def _whole(checkpoint: Path) -> bool:
    return (checkpoint / "state" / "state.json").exists()


def _point(folder: Path, name: str, pointer: str) -> None:
    temporary = folder / f".{pointer}.partial"
    temporary.write_text(name + "\n", encoding="utf-8")
    sync_path(temporary)
    temporary.replace(folder / pointer)
    sync_path(folder)
