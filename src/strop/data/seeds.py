"""Rows that are nothing but a prompt and a seed, for environments that make their own worlds:
`path: strop.data.seeds:episodes` in a recipe."""

from __future__ import annotations

from typing import Literal

import numpy as np

from strop.data.columns import nearest
from strop.data.order import hashed, stream_key
from strop.errors import DataError

Row = dict[str, str | int]


def episodes(count: int, *, prompt: str, seed: int = 0, split: Literal["train", "eval"] = "train") -> list[Row]:
    """Rows such as `{"prompt": "Find the way.", "seed": 1234}`, each with a seed of its own.

    Args:
        count: how many rows. prompt: the same for all. seed: of the choice of seeds.
        split: `train`, or `eval` for seeds that `train` never holds: those are odd, the others even.

    Raises:
        DataError: an argument is out of its range.
    """
    if split not in ("train", "eval"):
        mend = nearest(str(split), ("train", "eval")) or "Use train or eval."
        raise DataError(f"split is {split!r}", where="split", mend=mend)
    if count < 1:
        raise DataError(f"count is {count}", where="count", mend="Use a number from 1 on.")
    # 2**31 is the largest seed that environments of every kind take.
    drawn = hashed(np.arange(2 * count + 64, dtype=np.uint64), stream_key(seed, 7)) % np.uint64(2**30)
    different = list(dict.fromkeys(drawn.tolist()))[:count]
    if len(different) < count:
        raise DataError(f"there are not {count:,} seeds", where="count", mend="Ask for fewer.")
    return [{"prompt": prompt, "seed": 2 * int(number) + (split == "eval")} for number in different]
