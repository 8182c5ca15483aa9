"""Files of sampled completions, `.jsonl` or `.parquet`: there whole or not at all, and gone on with after a stop.

While rows come in they are kept as JSON lines in `.NAME.partial` beside the file, whose first line says what makes
them. The same work goes on behind the last whole group; other work begins anew.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import RunFailure, UserError
from strop.tracking.atomic import replacing

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]

SUFFIXES = (".jsonl", ".parquet")
ROWS_AT_ONCE = 2000
"""Rows of a row group of a Parquet file; so many are held in memory."""
COLUMNS = (
    "prompt",
    "prompt_id",
    "group",
    "sample",
    "prompt_ids",
    "completion",
    "completion_ids",
    "logprobs",
    "temperature",
    "reward",
    "correct",
    "components",
    "status",
    "detail",
    "answer",
    "model",
    "model_fingerprint",
    "weight_version",
)
"""The columns that every row has, in this order; those of the data follow."""


def rollout_row(found: Row, data: Row) -> dict[str, Any]:
    """A row of the file: what was sampled, and the columns of the data. A column of the data that has the name of one
    of the file's and another value is written as `row_NAME`."""
    row = {name: found[name] for name in COLUMNS}
    for name, value in data.items():
        if name not in row:
            row[name] = value
        elif value != row[name]:
            row[f"row_{name}"] = value
    return row


def check_target(path: Path, *, force: bool) -> None:
    """Raise UserError unless a file can be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"{path.name} says neither JSON lines nor Parquet",
            where=f"--out {path}",
            mend="end the name in .jsonl or .parquet",
        )
    if not path.parent.is_dir():
        raise UserError(
            f"there is no folder {path.parent}", where=f"--out {path}", mend=f"make it first: mkdir -p {path.parent}"
        )
    if path.is_dir():
        raise UserError(f"{path} is a folder", where=f"--out {path}", mend="name a file in it")
    if path.exists() and not force:
        raise UserError(
            f"{path.name} exists already", where=str(path.absolute()), mend="name another file, or give --force"
        )
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"the folder {path.parent} may not be written", where=f"--out {path}")


class RolloutFile:
    """Rows on their way into a file; one process at a time.

    Args:
        path: the file. key: what the rows depend on; rows of another key are not gone on with.
        per_group: rows of each group.

    Raises:
        UserError: another process writes this file.
    """

    def __init__(self, path: Path, *, key: str, per_group: int) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        self._header = json.dumps({"rollouts": key}).encode() + b"\n"
        self._per_group = per_group
        self.groups = -1
        """Whole groups that are there."""
        self._handle = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UserError(
                "another process writes this file", where=str(path.absolute()), mend="wait for it, or name another"
            ) from None
        self.groups = self._go_on()

    def append(self, rows: Sequence[Row]) -> None:
        """Write whole groups; they are on the disk when this returns.

        Raises:
            RunFailure: the disk is full, say; the groups before stay. ValueError: these are no whole groups.
        """
        if not rows or len(rows) % self._per_group:
            # Whoever writes until enough groups are there would never come to an end.
            raise ValueError(f"{len(rows)} rows are no whole groups of {self._per_group}")
        data, size = b"".join(_line(row) for row in rows), os.fstat(self._handle).st_size
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise RunFailure(
                f"the completions cannot be written: {error.strerror}",
                where=str(self.path),
                mend="make room on the disk; the same command goes on from here",
            ) from error
        self.groups += len(rows) // self._per_group

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is there so far."""
        with self.partial.open("rb") as file:
            file.readline()
            for line in file:
                yield json.loads(line)

    def finish(self) -> None:
        """Put the file in its place.

        Raises:
            RunFailure: it cannot be written; the rows stay beside it.
        """
        try:
            with replacing(self.path) as temporary:
                if self.path.suffix.lower() == ".parquet":
                    write_parquet(temporary, self.rows)
                else:
                    with self.partial.open("rb") as rows, temporary.open("wb") as file:
                        rows.readline()
                        shutil.copyfileobj(rows, file)
        except OSError as error:
            raise RunFailure(
                f"the completions cannot be written: {error.strerror or error}",
                where=str(self.path),
                mend="make room on the disk; the same command only has to put the file in its place",
            ) from error
        self.partial.unlink()

    def close(self) -> None:
        """Let others write; what is there stays."""
        if self._handle >= 0:
            if self.groups == 0:
                self.partial.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1

    def _go_on(self) -> int:
        """Cut the partial file behind its last whole group, or make it empty; returns the groups that are left."""
        groups = rows = 0
        at = end = len(self._header)
        with self.partial.open("rb") as file:
            if file.readline() != self._header:
                os.ftruncate(self._handle, 0)
                os.write(self._handle, self._header)
                return 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                at, rows = at + len(line), rows + 1
                if rows % self._per_group == 0:
                    groups, end = rows // self._per_group, at
        os.ftruncate(self._handle, end)
        return groups


def write_parquet(path: Path, rows: Any) -> None:
    """Write rows as Parquet, some thousand at a time.

    Args:
        rows: gives an iterator over the rows, and is called twice: the types of the data's columns are only known once
            all of them have been seen. Columns whose values have no common type are written as JSON.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    schema = _schema(rows)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for chunk in _chunks(rows()):
            arrays = [_array([row.get(field.name) for row in chunk], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _schema(rows: Any) -> pa.Schema:
    import pyarrow as pa

    fixed = {
        "prompt_id": pa.string(),
        "group": pa.int64(),
        "sample": pa.int32(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion": pa.string(),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "temperature": pa.float64(),
        "reward": pa.float64(),
        "correct": pa.bool_(),
        "components": pa.map_(pa.string(), pa.float64()),
        "status": pa.string(),
        "detail": pa.string(),
        "model": pa.string(),
        "model_fingerprint": pa.string(),
        "weight_version": pa.int64(),
    }
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    for chunk in _chunks(rows()):
        for name in dict.fromkeys(name for row in chunk for name in row):
            if name not in fixed:
                found[name] = _common(found.get(name), [row.get(name) for row in chunk])
    return pa.schema([(name, fixed.get(name) or _known(kind)) for name, kind in found.items()])


def _common(kind: Any, values: list[Any]) -> Any:
    """The type of a column after more of its values."""
    import pyarrow as pa

    try:
        more = pa.infer_type(values)
        if kind is None:
            return more
        fields = [pa.schema([("x", one)]) for one in (kind, more)]
        return pa.unify_schemas(fields, promote_options="permissive").field("x").type
    except (pa.ArrowException, UnicodeEncodeError):
        # Numbers beside texts, say.
        return _json_type()


def _known(kind: Any) -> Any:
    """A type that Parquet can hold: empty objects and columns of nothing but null have none."""
    import pyarrow as pa

    if kind is None or pa.types.is_null(kind):
        return pa.string()
    return _json_type() if "struct<>" in str(kind) or "null" in str(kind) else kind


def _json_type() -> Any:
    import pyarrow as pa

    return pa.large_string()


def _array(values: list[Any], kind: Any) -> pa.Array:
    import pyarrow as pa

    if kind == _json_type():
        values = [None if value is None else _text(value) for value in values]
    elif pa.types.is_map(kind):
        values = [None if value is None else list(value.items()) for value in values]
    elif pa.types.is_string(kind):
        values = [None if value is None else _whole(str(value)) for value in values]
    return pa.array(values, type=kind)


def _text(value: Any) -> str:
    return _whole(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _whole(text: str) -> str:
    # JSON may hold half of a surrogate pair, which UTF-8 has no bytes for.
    return text.encode("utf-8", "replace").decode()


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk


def _line(row: Row) -> bytes:
    try:
        return json.dumps(dict(row), allow_nan=False, default=_plain).encode() + b"\n"
    except ValueError:
        return json.dumps(_finite(dict(row)), default=_plain).encode() + b"\n"


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """What JSON has no form for: arrays as lists, everything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
