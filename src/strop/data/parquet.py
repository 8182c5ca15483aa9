"""Parquet: rows read by row group, with a few groups held, so that files may be larger than the memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.config.data import Columns
from strop.data.columns import listed
from strop.data.fingerprints import combined, file_fingerprint
from strop.errors import DataError

if TYPE_CHECKING:
    import pyarrow

HELD_BYTES = 128 * 2**20
"""Files whose decoded size is together at most this may be held whole, and are shuffled row by row."""
BLOCK_ROWS = 4096
BLOCK_BYTES = 32 * 2**20
"""Neighbouring small row groups are read together until they have so many rows or bytes."""
HELD_BLOCKS = 8
"""Blocks of larger files that are held; a shuffled order visits `order.WINDOW_BLOCKS` at a time, which is fewer."""


@dataclass(frozen=True)
class Block:
    """Row groups `first` to `last - 1` of a file, which are read together."""

    file: int
    first: int
    last: int
    rows: int
    size: int


class ParquetSource:
    """Rows of one `.parquet` file, or of several one after the other.

    `blocks` is None when the files are small enough to be held; else it has the row at which each block begins and,
    last, the number of rows: reading a row means reading its block, so rows of a block should be read near each other.

    Raises:
        DataError: a file is not Parquet or damaged, the files differ in their columns, or there are no rows.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.mapping = Columns()
        self._metadata = [_read_metadata(path) for path in self.paths]
        schemas = [metadata.schema.to_arrow_schema() for metadata in self._metadata]
        self.columns = list(schemas[0].names)
        for path, schema in zip(self.paths, schemas, strict=True):
            if set(schema.names) != set(self.columns):
                raise DataError(
                    f"the columns differ from those of {self.paths[0].name}: "
                    f"{listed(schema.names)} instead of {listed(self.columns)}",
                    where=str(path),
                    mend="Files of one folder are read as one dataset and need the same columns.",
                )
        self._blocks = [block for number, meta in enumerate(self._metadata) for block in _blocks_of(number, meta)]
        self._starts = np.concatenate(([0], np.cumsum([block.rows for block in self._blocks]))).astype(np.int64)
        if self._starts[-1] == 0:
            raise DataError("there are no rows in it", where=str(self.paths[0]), mend="Give a file with rows.")
        small = sum(block.size for block in self._blocks) <= HELD_BYTES
        self.blocks: np.ndarray | None = None if small else self._starts
        self._most_held = len(self._blocks) if small else HELD_BLOCKS
        self._held: OrderedDict[int, pyarrow.Table] = OrderedDict()
        self._lock = Lock()
        self.blocks_read = 0
        self.fingerprint = combined(file_fingerprint(path) for path in self.paths)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        block = self._block_of(i)
        row: dict[str, Any] = self._table(block).slice(i - int(self._starts[block]), 1).to_pylist()[0]
        return row

    def column(self, name: str) -> list[Any]:
        """One column of all rows; the others are not read."""
        import pyarrow.parquet

        return [
            value
            for path, metadata in zip(self.paths, self._metadata, strict=True)
            for value in pyarrow.parquet.ParquetFile(path, metadata=metadata).read(columns=[name])[name].to_pylist()
        ]

    def location(self, i: int) -> str:
        file = self._blocks[self._block_of(i)].file
        first = next(n for n, block in enumerate(self._blocks) if block.file == file)
        return f"{self.paths[file]}, row {i - int(self._starts[first])} counted from 0"

    def describe(self) -> str:
        place = str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0].parent}, {len(self.paths)} files"
        return f"Parquet {place}, {len(self):,} rows, columns {listed(self.columns)}"

    def _block_of(self, i: int) -> int:
        return int(np.searchsorted(self._starts, i, side="right")) - 1

    def _table(self, number: int) -> pyarrow.Table:
        import pyarrow
        import pyarrow.parquet

        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
                return self._held[number]
            block = self._blocks[number]
            path = self.paths[block.file]
            try:
                with pyarrow.parquet.ParquetFile(path, metadata=self._metadata[block.file]) as file:
                    table = file.read_row_groups(list(range(block.first, block.last))).combine_chunks()
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(
                    f"row groups {block.first} to {block.last - 1} cannot be read: {str(error).splitlines()[0]}",
                    where=str(path),
                    mend="Write the file again; it is damaged or has changed since it was opened.",
                ) from error
            self.blocks_read += 1
            self._held[number] = table
            while len(self._held) > self._most_held:
                self._held.popitem(last=False)
            return table


def _read_metadata(path: Path) -> pyarrow.parquet.FileMetaData:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"not a readable Parquet file: {str(error).splitlines()[0]}",
            where=str(path),
            mend="Write the file again; a download may have been cut short.",
        ) from error


def _blocks_of(file: int, metadata: pyarrow.parquet.FileMetaData) -> list[Block]:
    """Join neighbouring row groups of a file until they are worth reading together."""
    blocks = []
    first = rows = size = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        rows, size = rows + group.num_rows, size + group.total_byte_size
        if rows >= BLOCK_ROWS or size >= BLOCK_BYTES or i == metadata.num_row_groups - 1:
            blocks.append(Block(file, first, i + 1, rows, size))
            first, rows, size = i + 1, 0, 0
    return blocks
