"""Generated demonstrations of calling a tool, for `recipes/calculator-tool.yaml` and tests."""

from __future__ import annotations

import numpy as np

from strop.data.arithmetic import Row, problems
from strop.data.order import hashed, stream_key
from strop.errors import DataError


def demonstrations(
    count: int,
    *,
    calling: float = 0.5,
    digits: int = 3,
    operations: str = "*",
    seed: int = 0,
    opening: str = "[",
    closing: str = "]",
    result: str = "{result}=",
) -> list[Row]:
    """Turns of somebody who uses a calculator only sometimes, and guesses otherwise.

    Of every two rows one is a first turn: a call, `{"prompt": "347*28=", "answer": "[347*28]"}`, or a guess,
    `{"prompt": "347*28=", "answer": "5120"}`. The other is the turn after a call:
    `{"prompt": "347*28=[347*28]9716=", "answer": "9716"}`.

    Args:
        count: how many rows.
        calling: share of first turns that call.
        digits, operations, seed: of the problems, see `arithmetic.problems`.
        opening, closing, result: as in `environment:`.

    Raises:
        DataError: `calling` is no share, or there are fewer distinct problems than rows.
    """
    if not 0 <= calling <= 1:
        raise DataError(f"calling is {calling}", where="calling", mend="Use a share, 0 to 1.")
    rows = problems(count, digits=digits, operations=operations, seed=seed)
    chances = hashed(np.arange(count, dtype=np.uint64), stream_key(seed, 7)).astype(np.float64) * 2.0**-64
    guesses = [row["answer"] for row in rows]
    found = []
    for number, (row, chance) in enumerate(zip(rows, chances.tolist(), strict=True)):
        call = f"{opening}{row['prompt'].removesuffix('=')}{closing}"
        shown = result.replace("{result}", row["answer"])
        if number % 2:
            found.append({"prompt": f"{row['prompt']}{call}{shown}", "answer": row["answer"]})
        elif chance < calling:
            found.append({"prompt": row["prompt"], "answer": call})
        else:
            # The answer of another problem: of the right kind, and wrong.
            found.append({"prompt": row["prompt"], "answer": guesses[number - 1]})
    return found
