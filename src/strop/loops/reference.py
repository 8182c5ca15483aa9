"""A reference that is asked once: its log-probabilities of all the data, kept in the run's folder.

Before the first update the policy is the reference (with adapters: once they are off), so no second model is needed.
The batches are asked as the run will train them, in its order and cuts: the numbers of an example are, bit for bit,
those of the step that trains it first. In later epochs other neighbours in the packed row could move them in the last
digits; they stay as they were first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.data.examples import ExampleRow
from strop.errors import RunFailure
from strop.tracking.atomic import replacing

FILE = "reference.parquet"
_KEY = b"strop.reference"
Ask = Callable[[TokenBatch], Awaitable[Tensor]]
"""Gives the reference's log-probabilities [T] of a batch, 0 where the loss mask is False."""


class AskedReference:
    """Log-probabilities of trained tokens by name: an array for each row, and for each batch of mismatched completions.

    Args:
        path: the file that keeps them. key: says what they depend on; a file with another key does not count.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key = key
        self._known = _read(path, key)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def fill(self, batch: TokenBatch, names: Sequence[str]) -> Tensor:
        """[T] float32, 0 where the loss mask is False.

        Args:
            names: what the batch is made of, in order.
        """
        missing = [name for name in names if name not in self._known]
        if missing:
            raise RunFailure(
                f"the reference was not asked for {missing[0]}",
                where=str(self.path),
                mend="delete the file and give the same command again",
            )
        out = torch.zeros(len(batch.input_ids))
        out[batch.loss_mask] = torch.from_numpy(np.concatenate([self._known[name] for name in names]))
        return out

    async def ask(
        self, work: Iterator[tuple[Sequence[str], Callable[[], TokenBatch]]], ask: Ask, progress: Callable[[int], None]
    ) -> None:
        """Fill in what is not known yet, and keep it.

        Args:
            work: batches, each with the names of what it is made of; a batch that holds nothing new is not made.
            progress: called with the number of batches that are done.
        """
        asked = False
        for done, (names, make) in enumerate(work):
            # Where an interrupt is seen.
            await asyncio.sleep(0)
            if any(name not in self._known for name in names):
                asked = True
                batch = make()
                found = (await ask(batch))[batch.loss_mask].numpy()
                for name, values in zip(names, np.split(found, _edges(batch, len(names))), strict=True):
                    self._known.setdefault(name, values)
            progress(done + 1)
        if asked:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        lengths = [len(values) for values in self._known.values()]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        flat = np.concatenate([np.zeros(0, np.float32), *self._known.values()])
        columns = {
            "name": pa.array(list(self._known)),
            "logprobs": pa.LargeListArray.from_arrays(offsets, pa.array(flat, pa.float32())),
        }
        table = pa.table(columns).replace_schema_metadata({_KEY: self._key.encode()})
        with replacing(self.path) as temporary:
            pq.write_table(table, temporary, compression="zstd")


def _edges(batch: TokenBatch, parts: int) -> list[int]:
    """Where the trained tokens of each part end but the last; the groups of a batch are its parts, or all is one."""
    if parts == 1:
        return []
    counts = torch.zeros(parts, dtype=torch.int64)
    counts.index_add_(0, batch.group_ids[batch.seq_ids], batch.loss_mask.long())
    return counts.cumsum(0)[:-1].tolist()


def _read(path: Path, key: str) -> dict[str, np.ndarray]:
    import pyarrow
    import pyarrow.parquet as pq

    if not path.exists():
        return {}
    try:
        table = pq.read_table(path).combine_chunks()
    except (pyarrow.ArrowException, OSError):
        return {}
    if (table.schema.metadata or {}).get(_KEY) != key.encode() or not len(table):
        return {}
    lists: Any = table.column("logprobs").chunk(0)
    edges, flat = lists.offsets.to_numpy(), lists.values.to_numpy()
    names = table.column("name").to_pylist()
    return {name: flat[a:b] for name, a, b in zip(names, edges[:-1], edges[1:], strict=True)}


def row_names(split: str, rows: Sequence[ExampleRow]) -> list[str]:
    """What the rows of a batch are called: by the split of the data that they are of, and their number in it."""
    return [f"{split}/{row.index}" for row in rows]
