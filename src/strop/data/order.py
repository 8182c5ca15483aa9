"""The order in which rows are visited: seeded, exact in every epoch, and resumed from a few numbers.

The order of an epoch is a pure function of (seed, epoch, number of rows, blocks), written out here with integer
arithmetic, so that a checkpoint made with one version of NumPy resumes in the same order with another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from strop.data.sources import Source
from strop.errors import DataError

WINDOW_BLOCKS = 4
"""Blocks whose rows are mixed with each other, where a source is costly to read at random."""


class Cursor:
    """Visits the rows of a source for ever, epoch after epoch; a batch that an epoch cannot fill runs into the next.

    Args:
        source: its length, fingerprint and blocks matter; no row is read.
        seed: of the shuffling.
        shuffle: False visits rows in their own order.
    """

    def __init__(self, source: Source, *, seed: int, shuffle: bool = True) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._order: np.ndarray | None = None

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self._source)

    def next(self) -> tuple[int, int]:
        """The epoch, from 0, and the index in the source of the next row."""
        if self.position == len(self._source):
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if not self._shuffle:
            index = self.position
        else:
            if self._order is None:
                self._order = shuffled(len(self._source), self._source.blocks, seed=self._seed, epoch=self.epoch)
            index = int(self._order[self.position])
        self.position += 1
        return self.epoch, index

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            yield self.next()

    def state(self) -> dict[str, Any]:
        """What `load` needs, as JSON-ready values; its size does not depend on the data."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._source),
            "fingerprint": self._source.fingerprint,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; the next row is the one that would have come then.

        Raises:
            DataError: the data, the seed or the shuffling are not those of the checkpoint.
        """
        mine = self.state()
        if state["rows"] != mine["rows"]:
            self._refuse(f"the data has changed since the checkpoint: it had {state['rows']:,} rows and now has "
                         f"{mine['rows']:,}")  # fmt: skip
        if state["fingerprint"] != mine["fingerprint"]:
            self._refuse("the data has changed since the checkpoint: as many rows as before, but other content")
        for name, key in (("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[name] != mine[name]:
                self._refuse(f"{key} has changed since the checkpoint: it was {state[name]} and is now {mine[name]}")
        self.epoch, self.position, self._order = state["epoch"], state["position"], None

    def _refuse(self, what: str) -> None:
        raise DataError(
            what,
            where=self._source.describe(),
            mend="Bring back what it was to continue this run, or start a new run with --fresh.",
        )


def shuffled(rows: int, blocks: np.ndarray | None, *, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: [rows] int64, a permutation.

    With `blocks` ([blocks + 1], where each begins) the blocks are shuffled, and then the rows within each window of
    `WINDOW_BLOCKS` neighbours in that order: a reader that holds a window reads each block once.
    """
    key = stream_key(seed, epoch)
    if blocks is None:
        return permutation(rows, key)
    visited = permutation(len(blocks) - 1, key)
    parts = []
    for number, first in enumerate(range(0, len(visited), WINDOW_BLOCKS)):
        window = [np.arange(blocks[b], blocks[b + 1]) for b in visited[first : first + WINDOW_BLOCKS]]
        together = np.concatenate(window)
        parts.append(together[permutation(len(together), stream_key(key, number))])
    return np.concatenate(parts).astype(np.int64)


def permutation(count: int, key: int) -> np.ndarray:
    """A permutation of 0..count-1, [count] int64: the order of their hashes under `key`."""
    # The hashes are distinct, so any way of sorting gives the same order.
    return np.argsort(hashed(np.arange(count, dtype=np.uint64), key)).astype(np.int64)


def stream_key(*parts: int) -> int:
    """One 64-bit key from several numbers, of which the order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = hashed(key ^ np.uint64(part % 2**64), 0x5DEECE66D)
    return int(key[0])


def hashed(numbers: np.ndarray, key: int) -> np.ndarray:
    """64-bit hashes of uint64 numbers, distinct for distinct numbers: SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
