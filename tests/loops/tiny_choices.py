"""Functions that choose groups; recipes of the tests name them as `tiny_choices:NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ASKED: list[Any] = []
"""What the functions below were asked with."""


def latest(groups: Sequence[Any], count: int) -> list[int]:
    """Those that were admitted last: the worst for the bound."""
    ASKED.append((list(groups), count))
    return [one.number for one in groups][-count:]


def any_past(groups: Sequence[Any], count: int, rng: np.random.Generator) -> np.ndarray:
    """Drawn with the generator that the function is given, as an array of NumPy's."""
    ASKED.append((list(groups), count))
    return rng.permutation([one.number for one in groups])[:count]


def too_few(groups: Sequence[Any], count: int) -> list[int]:
    return [one.number for one in groups][: count - 1]


def twice(groups: Sequence[Any], count: int) -> list[int]:
    return [groups[0].number] * count


def unknown(groups: Sequence[Any], count: int) -> list[int]:
    return [10**6] * count


def objects(groups: Sequence[Any], count: int) -> list[Any]:
    return list(groups[:count])


def true(groups: Sequence[Any], count: int) -> list[bool]:
    return [True] * count


def nothing(groups: Sequence[Any], count: int) -> None:
    return None


def breaks(groups: Sequence[Any], count: int) -> list[int]:
    raise ValueError("no such luck")


def alone(groups: Sequence[Any]) -> list[int]:
    return []


async def later(groups: Sequence[Any], count: int) -> list[int]:
    return []


def bad_past(groups: Sequence[Any], count: int, rng: Any) -> list[int]:
    return [-1] * count
