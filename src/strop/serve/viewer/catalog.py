"""Which runs there are. A name from outside is looked up here and never becomes part of a path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from strop.errors import UserError
from strop.tracking.pipeline_directory import MANIFEST as PIPELINE


class NotFound(UserError):
    """What was asked for is not there, or not there any more."""


class Catalog:
    """The runs in some folders.

    A run's name is that of its folder, `pipeline/stage` for one of a pipeline, with the folder that it lies in before
    it where two roots have runs of the same name. Links that lead out of a root are left out.

    Args:
        roots: folders of runs or pipelines, or folders that hold them. One that is not there yet holds no runs.
    """

    def __init__(self, roots: Sequence[str | Path]) -> None:
        self.roots = [Path(os.path.realpath(root)) for root in roots]

    def runs(self) -> dict[str, Path]:
        """Name -> folder, of all runs that are there now."""
        found: dict[str, Path] = {}
        seen: set[Path] = set()
        for root in self.roots:
            for name, path in _runs_of(root):
                if path in seen:
                    continue
                seen.add(path)
                unique, number = name, 2
                if unique in found:
                    unique = f"{root.name}/{name}"
                while unique in found:
                    unique, number = f"{root.name}/{name}~{number}", number + 1
                found[unique] = path
        return found

    def find(self, name: str) -> Path:
        """The folder of a run.

        Raises:
            NotFound: there is none of this name.
        """
        path = self.runs().get(name)
        if path is None:
            raise NotFound(
                "there is no run of this name",
                where=name[:200],
                mend="the overview lists the runs that are there; this one may have been deleted",
            )
        return path


def inside(run: Path, relative: str | Path) -> Path:
    """A file of a run, wherever links lead.

    Raises:
        NotFound: it lies outside of the run's folder.
    """
    path = Path(os.path.realpath(run / relative))
    if not path.is_relative_to(os.path.realpath(run)):
        raise NotFound("this file lies outside of the run's folder", where=str(run / relative))
    return path


def _runs_of(root: Path) -> Iterator[tuple[str, Path]]:
    if (root / "run.json").is_file():
        yield root.name, root
    elif (root / PIPELINE).is_file():
        yield from ((f"{root.name}/{path.name}", path) for path in _folders(root) if (path / "run.json").is_file())
    else:
        for folder in _folders(root):
            if (folder / "run.json").is_file() or (folder / PIPELINE).is_file():
                yield from _runs_of(folder)


def _folders(root: Path) -> Iterator[Path]:
    """Folders in a folder, in order of their names; hidden ones are runs that are being made."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            path = Path(os.path.realpath(entry.path)) if entry.is_symlink() else Path(entry.path)
            if path.is_dir() and path.is_relative_to(root):
                yield path
        except OSError:
            continue
