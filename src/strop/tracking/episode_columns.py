"""Columns of a file of episodes, as many as are asked for; also of files that lack some of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import RunFailure, UserError
from strop.tracking.metrics import first_sentence

if TYPE_CHECKING:
    import pyarrow as pa


def read_columns(path: Path, names: Iterable[str]) -> pa.Table:
    """Read columns of `episodes/step-NNNNNN.parquet`, each as `strop.tracking.episodes.schema` has it.

    A column that the file does not have (one of an older format), or that is of another kind, is all null. Columns of
    later versions are not read.

    Raises:
        UserError: there is no such file. RunFailure: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from strop.tracking.episodes import schema

    fields = schema()
    wanted = [fields.field(name) for name in names]
    try:
        with parquet.ParquetFile(path) as file:
            there = set(file.schema_arrow.names)
            table = file.read(columns=[field.name for field in wanted if field.name in there]).combine_chunks()
            rows = file.metadata.num_rows
    except FileNotFoundError:
        raise UserError(
            "the run has no such file of episodes",
            where=str(path),
            mend="`tracking.episodes_every` says how often a run writes one",
        ) from None
    except (OSError, pa.ArrowException, ValueError) as error:
        raise RunFailure(
            f"the file of episodes cannot be read: {first_sentence(error)}",
            where=str(path),
            mend="it was cut or changed after it was written; other steps can still be read",
        ) from error
    return pa.table({field.name: _as(table, field, rows) for field in wanted})


def _as(table: pa.Table, field: pa.Field, rows: int) -> pa.ChunkedArray:
    import pyarrow as pa

    if field.name in table.column_names:
        try:
            return table.column(field.name).cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            pass
    return pa.chunked_array([pa.nulls(rows, field.type)])
