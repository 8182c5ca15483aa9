"""JSON lines: an index of byte offsets, rows read by seeking, so that a file may be larger than the memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from strop.config.data import Columns
from strop.data.columns import listed
from strop.errors import DataError

CHUNK_BYTES = 8 * 2**20
"""Bytes read at a time while the index is built."""
LONGEST_LINE_BYTES = 64 * 2**20
CHECK_ALL_BYTES = 50 * 2**20
"""In a file up to this size every line is parsed when it is opened; in a larger one the first `CHECK_ROWS`."""
CHECK_ROWS = 5000
_WHITE = np.frombuffer(b" \t\r\n\x0b\x0c", dtype=np.uint8)


@dataclass
class LineIndex:
    """Where the rows of a file are.

    starts: [rows] int64, byte offset of each line that is not blank. lines: [rows] int64, its line number from 1, or
    None when no line is blank and row i is line i + 1. digest: hash of the bytes up to the last row. end: byte offset
    after the last row.
    """

    starts: np.ndarray
    lines: np.ndarray | None
    digest: str
    end: int


class JsonlSource:
    """Rows of one `.jsonl` file; only the index is held in memory, 8 bytes a row.

    Args:
        path: the file.
        limit: read only the first rows, so many; the rest of the file is not looked at.

    Raises:
        DataError: the file is empty, not UTF-8, a line is not valid JSON or not an object.
    """

    blocks: np.ndarray | None = None

    def __init__(self, path: Path, *, limit: int | None = None) -> None:
        self.path = path
        self.mapping = Columns()
        self._index = build_index(path, limit)
        self.fingerprint = self._index.digest
        if not len(self._index.starts):
            raise DataError(
                "the file is empty" if path.stat().st_size == 0 else "the file holds only blank lines",
                where=str(path),
                mend="Give a file with one JSON object on each line.",
            )
        self.columns, self.checked = self._check()

    def __len__(self) -> int:
        return len(self._index.starts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        # Opened anew for each row: safe across threads and forks, and some 20 microseconds.
        with self.path.open("rb") as file:
            file.seek(int(self._index.starts[i]))
            return self._parse(file.readline(), i)

    def location(self, i: int) -> str:
        """`file:line` of row i."""
        lines = self._index.lines
        return f"{self.path}:{i + 1 if lines is None else lines[i]}"

    def describe(self) -> str:
        return f"JSON lines {self.path}, {len(self):,} rows, columns {listed(self.columns)}"

    def _check(self) -> tuple[list[str], int]:
        rows = len(self) if self._index.end <= CHECK_ALL_BYTES else min(len(self), CHECK_ROWS)
        columns: dict[str, None] = {}
        with self.path.open("rb") as file:
            for i in range(rows):
                file.seek(int(self._index.starts[i]))
                columns.update(dict.fromkeys(self._parse(file.readline(), i)))
        return list(columns), rows

    def _parse(self, line: bytes, i: int) -> dict[str, Any]:
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"the line is not UTF-8 text (byte {error.start + 1})",
                where=self.location(i),
                mend="Save the file with the encoding UTF-8.",
            ) from error
        except json.JSONDecodeError as error:
            raise self._broken(line.decode("utf-8"), error, i) from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
            raise DataError(f"the JSON cannot be read: {error}", where=self.location(i)) from error
        if not isinstance(row, dict):
            array = isinstance(row, list) and len(self) == 1
            raise DataError(
                "the file is one JSON array, not JSON lines"
                if array
                else f"the line is not a JSON object but a {_json_type(row)}",
                where=self.location(i),
                mend=_ARRAY_MEND
                if array
                else 'Each line must be an object such as {"prompt": "...", "answer": "..."}.',
            )
        return row

    def _broken(self, line: str, error: json.JSONDecodeError, i: int) -> DataError:
        where = f"{self.location(i)}:{error.colno}"
        # A pretty-printed document breaks on its first line already; that its lines must be joined helps more than
        # where the first one ends.
        if i == 0 and len(self) > 1 and line.strip() in ("[", "{"):
            return DataError("the file is one JSON document, not JSON lines", where=where, mend=_ARRAY_MEND)
        near = line[max(0, error.pos - 20) : error.pos + 20].strip()
        return DataError(
            f"not valid JSON: {error.msg} at column {error.colno}, near {near!r}",
            where=where,
            mend="Mend or delete that line; each line must be one whole JSON object.",
        )


def build_index(path: Path, limit: int | None = None) -> LineIndex:
    """Find the lines of a file that are not blank, in one pass and with constant memory beside the index."""
    digest = xxhash.xxh3_128()
    starts: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    rows = base = line = 0
    pending = b""
    with path.open("rb") as file:
        last = False
        while not last and (limit is None or rows < limit):
            chunk = file.read(CHUNK_BYTES)
            last = not chunk
            buffer = pending + (chunk or (b"\n" if pending else b""))
            if base == 0 and not last:
                _refuse_other_encodings(buffer, path)
            ends = np.flatnonzero(np.frombuffer(buffer, dtype=np.uint8) == 10)
            if not len(ends):
                pending = buffer
                _refuse_endless_line(pending, line, path)
                continue
            begins = np.concatenate(([0], ends[:-1] + 1))
            if base == 0 and buffer.startswith(b"\xef\xbb\xbf"):
                begins[0] = 3
            kept = np.flatnonzero(~_blank(buffer, begins, ends))
            used = int(ends[-1]) + 1
            if limit is not None and rows + len(kept) >= limit:
                kept = kept[: limit - rows]
                used = int(ends[kept[-1]]) + 1
            digest.update(buffer[:used])
            starts.append(begins[kept] + base)
            numbers.append(kept + line + 1)
            rows += len(kept)
            line += len(ends)
            base += used
            pending = buffer[used:]
    all_starts = np.concatenate(starts).astype(np.int64) if starts else np.zeros(0, dtype=np.int64)
    all_lines = np.concatenate(numbers).astype(np.int64) if numbers else None
    if all_lines is not None and len(all_lines) and all_lines[-1] == len(all_lines):
        all_lines = None
    return LineIndex(all_starts, all_lines, digest.hexdigest(), base)


def _blank(buffer: bytes, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    first = np.frombuffer(buffer, dtype=np.uint8)[np.minimum(begins, ends)]
    blank = np.zeros(len(begins), dtype=bool)
    for i in np.flatnonzero(np.isin(first, _WHITE)):
        blank[i] = not buffer[begins[i] : ends[i]].strip()
    return blank


def _refuse_other_encodings(head: bytes, path: Path) -> None:
    for magic, found, mend in (
        (b"\xff\xfe", "UTF-16 text", "Save the file with the encoding UTF-8."),
        (b"\xfe\xff", "UTF-16 text", "Save the file with the encoding UTF-8."),
        (b"\x1f\x8b", "compressed by gzip", f"Unpack it first: gunzip -k {path.name}"),
        (b"\x28\xb5\x2f\xfd", "compressed by zstd", f"Unpack it first: zstd -d {path.name}"),
        (b"PAR1", "a Parquet file", "Set `format: parquet`, or rename it to .parquet."),
    ):
        if head.startswith(magic):
            raise DataError(f"the file is {found}, not JSON lines", where=str(path), mend=mend)


def _refuse_endless_line(pending: bytes, line: int, path: Path) -> None:
    if len(pending) > LONGEST_LINE_BYTES:
        raise DataError(
            f"the line is longer than {LONGEST_LINE_BYTES // 2**20} MB",
            where=f"{path}:{line + 1}",
            mend=_ARRAY_MEND,
        )


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "list", str: "text", bool: "truth value", int: "number", float: "number"}[type(value)]


_ARRAY_MEND = (
    "Write one object on each line, for instance: "
    'python -c "import json,sys; [print(json.dumps(r)) for r in json.load(sys.stdin)]" < in.json > out.jsonl'
)
