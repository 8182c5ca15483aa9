"""Sources: where rows come from. A row is a dict of columns; a source is a sequence of rows that knows its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from strop.config.data import Columns, DataSource
from strop.data.columns import listed, nearest
from strop.data.fingerprints import combined
from strop.data.gym import open_gym
from strop.data.huggingface import open_huggingface
from strop.data.jsonl import JsonlSource
from strop.data.parquet import ParquetSource
from strop.data.rows import open_python
from strop.data.tasksets import open_taskset
from strop.errors import DataError
from strop.paths import user_path

Kind = Literal["jsonl", "parquet", "huggingface", "python", "reasoning_gym", "verifiers"]

SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_PREFIXES: dict[str, Kind] = {"reasoning-gym:": "reasoning_gym", "verifiers:": "verifiers"}
_UNREADABLE = {".csv": "CSV", ".tsv": "TSV", ".gz": "compressed", ".zst": "compressed", ".xz": "compressed"}
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(Protocol):
    """A sequence of rows.

    columns: names in order of first appearance (of JSON lines and Python rows: in the rows looked at when opening).
    fingerprint: hash of the content, the same for a copy elsewhere. mapping: which columns are prompt and answer.
    blocks: None when any row is cheap to read; else [blocks + 1] int64, the row at which each block begins and, last,
    the number of rows: rows of a block should be read near each other.
    """

    columns: list[str]
    fingerprint: str
    mapping: Columns

    @property
    def blocks(self) -> np.ndarray | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, Any]: ...

    def location(self, i: int) -> str:
        """Where row i is, for messages: `file:line` where there are lines."""
        ...

    def describe(self) -> str:
        """One line: what it is, where, how many rows, which columns."""
        ...


class FirstRows:
    """The first `count` rows of another source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._count = min(count, len(source))
        self.columns = source.columns
        self.mapping = source.mapping
        self.fingerprint = combined([source.fingerprint, str(self._count)])
        self.blocks: np.ndarray | None = None
        if source.blocks is not None:
            self.blocks = np.append(source.blocks[source.blocks < self._count], self._count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < self._count:
            raise IndexError(f"row {i} of {self._count}")
        return self._source[i]

    def location(self, i: int) -> str:
        return self._source.location(i)

    def describe(self) -> str:
        return f"the first {self._count:,} rows of {self._source.describe()}"


class Concatenation:
    """Several sources of JSON lines, one after the other."""

    blocks: np.ndarray | None = None

    def __init__(self, parts: Sequence[Source], *, name: str) -> None:
        self._parts = list(parts)
        self._name = name
        self._starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
        self.columns = list(dict.fromkeys(column for part in parts for column in part.columns))
        self.mapping = Columns()
        self.fingerprint = combined(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> dict[str, Any]:
        part, within = self._find(i)
        return part[within]

    def location(self, i: int) -> str:
        part, within = self._find(i)
        return part.location(within)

    def describe(self) -> str:
        return f"JSON lines {self._name}, {len(self._parts)} files, {len(self):,} rows, columns {listed(self.columns)}"

    def _find(self, i: int) -> tuple[Source, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        part = int(np.searchsorted(self._starts, i, side="right")) - 1
        return self._parts[part], i - int(self._starts[part])


def open_source(settings: DataSource) -> Source:
    """Open a dataset and check what can be checked in about a second.

    Raises:
        DataError: it does not exist, is empty, cannot be read, or lacks a column that `settings.columns` names.
    """
    kind = settings.format if settings.format != "auto" else detect(settings.path)
    source: Source
    if kind == "huggingface":
        source = open_huggingface(settings)
    elif kind == "python":
        source = open_python(settings)
    elif kind == "reasoning_gym":
        source = open_gym(settings)
    elif kind == "verifiers":
        source = open_taskset(settings)
    else:
        source = _open_files(settings, kind)
    if settings.limit is not None and settings.limit < len(source):
        source = FirstRows(source, settings.limit)
    source.mapping = settings.columns
    # Rows may lack an answer, but not the column that a recipe names for it. What counts is the value: a run's own
    # recipe has every default written out.
    if settings.columns.answer != Columns().answer:
        require_column(source, settings.columns.answer, key="columns.answer")
    return source


def require_column(source: Source, name: str, *, key: str) -> None:
    """Raise a DataError that names the columns there are and the nearest one, unless the source has the column."""
    if name not in source.columns:
        hint = nearest(name, source.columns)
        raise DataError(
            f"there is no column {name!r}; the columns are {listed(source.columns)}",
            where=source.location(0),
            mend=f"{hint} Set `{key}` to the column that holds it.".strip(),
        )


def detect(path: str) -> Kind:
    """What kind of dataset a path is, by its form and, for a file of unknown suffix, by its first bytes."""
    for prefix, kind in _PREFIXES.items():
        if path.startswith(prefix):
            return kind
    place = user_path(path)
    if place.is_file():
        return SUFFIXES.get(place.suffix.lower()) or _detect_by_content(place)
    if place.is_dir():
        return _detect_folder(place)
    if _PYTHON_NAME.fullmatch(path):
        return "python"
    known = place.suffix.lower() in SUFFIXES or place.suffix.lower() in _UNREADABLE
    beside_others = "/" in path and place.parent.is_dir()  # `data/train` where there is a folder `data`
    if known or beside_others or path.startswith(".") or not _HUB_NAME.fullmatch(path):
        raise _missing(place)
    return "huggingface"


def _detect_by_content(path: Path) -> Kind:
    suffix = path.suffix.lower()
    if suffix in _UNREADABLE:
        raise DataError(
            f"{_UNREADABLE[suffix]} files are not read",
            where=str(path),
            mend="Unpack it first." if suffix in (".gz", ".zst", ".xz") else "Convert it to JSON lines or Parquet.",
        )
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return "jsonl"
    raise DataError(
        "the file is empty" if not head else f"cannot tell what kind of file this is (suffix {suffix or 'none'!r})",
        where=str(path),
        mend="Give a .jsonl or .parquet file, or set `format`.",
    )


def _detect_folder(path: Path) -> Kind:
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return "huggingface"
    kinds = {SUFFIXES[file.suffix.lower()] for file in _files_in(path)}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds:
        raise DataError(
            "the folder holds both JSON lines and Parquet files",
            where=str(path),
            mend="Point at one file, or set `format` to `jsonl` or `parquet`.",
        )
    deeper = next((file.parent for file in sorted(path.glob("*/*")) if file.suffix.lower() in SUFFIXES), None)
    raise DataError(
        "the folder holds no .jsonl or .parquet files and no saved dataset",
        where=str(path),
        mend=f"Point at {deeper}." if deeper else "Point at a file, or at a folder that holds some.",
    )


def _files_in(path: Path) -> list[Path]:
    files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith((".", "_")))
    # A `.json` beside data files is a description of them more often than data.
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES and file.suffix.lower() != ".json")


def _open_files(settings: DataSource, kind: Literal["jsonl", "parquet"]) -> Source:
    path = user_path(settings.path)
    if path.is_dir():
        files = [file for file in _files_in(path) if SUFFIXES[file.suffix.lower()] == kind]
        if not files:
            raise DataError(f"the folder holds no {kind} files", where=str(path), mend="Point at a folder that does.")
    elif path.is_file():
        files = [path]
    else:
        raise _missing(path)
    try:
        if kind == "parquet":
            return ParquetSource(files)
        if len(files) == 1:
            return JsonlSource(files[0], limit=settings.limit)
        parts: list[Source] = []
        left = settings.limit
        for file in files:
            parts.append(JsonlSource(file, limit=left))
            left = None if left is None else left - len(parts[-1])
            if left == 0:
                break
        return Concatenation(parts, name=str(path))
    except PermissionError as error:
        raise DataError(
            "the file may not be read", where=str(error.filename or path), mend="Check its permissions."
        ) from error


def _missing(path: Path) -> DataError:
    folder = path.parent
    if not folder.is_dir():
        return DataError(
            "there is no such file or folder",
            where=str(path),
            mend=f"The folder {folder} does not exist either; the current folder is {Path.cwd()}.",
        )
    there = [file.name for file in folder.iterdir()]
    return DataError(
        "there is no such file or folder",
        where=str(path),
        mend=nearest(path.name, there) or f"Check the path; the current folder is {Path.cwd()}.",
    )
