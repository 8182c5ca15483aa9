"""Trains the recipes that standard input names, one in a line, and says in which folder: so torch is imported once.

Line: {"recipe": file, "overrides": ["key=value", ...], "strict": bool}; answer: the run's folder, or what was raised.
strict: nothing is rounding in float32 that was not measured, and the last bit of an engine's scores is another: on some
processors none differs by itself.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

import strop
from strop.config.loading import load_config
from strop.errors import StropError
from strop.loops import assembly
from strop.loops.remote_publisher import _EngineSide

plain = _EngineSide.score


async def rounded(engine: _EngineSide, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.nextafter(scores, np.float32(0)) for scores in await plain(engine, token_lists)]


@contextmanager
def strictly(strict: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if strict:
            patch.setitem(assembly.PROBE_FLOOR, "float32", 1e-12)
            patch.setattr(_EngineSide, "score", rounded)
        yield


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            with strictly(asked["strict"]):
                summary = strop.train(load_config(asked["recipe"], overrides=asked["overrides"]))
            answer = {"folder": str(summary.folder)}
        except StropError as error:
            answer = {"error": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
