"""Fingerprints: whether a source still holds the rows that a checkpoint was made with.

They depend on content only, never on a path or a time stamp, so that a copy on another machine counts as the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash

WHOLE_FILE_BYTES = 64 * 2**20
"""Files up to this size are hashed whole."""
PIECE_BYTES = 2**20
PIECES = 16
"""Of a larger file, so many pieces are hashed, spread evenly from its head to its tail."""
SAMPLED_ROWS = 2000
"""Of a long sequence of rows, about so many are hashed, spread evenly, the first and the last among them."""


def file_fingerprint(path: Path) -> str:
    """Hash of a file's size and content; of a file above 64 MB, of its size and pieces of it."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        else:
            for number in range(PIECES):
                file.seek((size - PIECE_BYTES) * number // (PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def rows_fingerprint(rows: Sequence[dict[str, Any]]) -> str:
    """Hash of the number of rows and of the rows; of more than 2,000, of rows spread evenly over them."""
    count = len(rows)
    digest = xxhash.xxh3_128(str(count).encode())
    for index in sample_indices(count):
        digest.update(json.dumps(rows[index], sort_keys=True, default=_stable, ensure_ascii=False).encode())
    return digest.hexdigest()


def sample_indices(count: int) -> list[int]:
    """Which rows of `count` are hashed, in increasing order."""
    if count <= SAMPLED_ROWS:
        return list(range(count))
    return [(count - 1) * number // (SAMPLED_ROWS - 1) for number in range(SAMPLED_ROWS)]


def combined(fingerprints: Iterable[str]) -> str:
    """Fingerprint of several parts in order."""
    return xxhash.xxh3_128("|".join(fingerprints).encode()).hexdigest()


def _stable(value: Any) -> Any:
    # An object's repr may hold its address, which differs in the next process and would look like changed data.
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return type(value).__qualname__
