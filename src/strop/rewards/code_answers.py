"""Whether what a program printed or returned is what was expected. The expected answers are never where it ran."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]{1,4})?")


def prints_the_same(
    printed: str, expected: str, *, compare: Literal["lines", "words", "exact"], tolerance: float
) -> bool:
    """Whether a program printed the expected text.

    Args:
        compare: `lines` without white space at the ends of lines and empty lines at the end; `words` without regard to
            white space; `exact` to the letter.
        tolerance: for words of which the expected one has a decimal point or an exponent, except with `exact`.
    """
    if printed == expected or compare == "exact":
        return printed == expected
    if compare == "words":
        return _words_equal(printed.split(), expected.split(), tolerance)
    mine, theirs = _lines(printed), _lines(expected)
    return len(mine) == len(theirs) and all(
        one == other or _words_equal(one.split(" "), other.split(" "), tolerance)
        for one, other in zip(mine, theirs, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _words_equal(printed: list[str], expected: list[str], tolerance: float) -> bool:
    return len(printed) == len(expected) and all(
        one == other or (tolerance > 0 and _decimals_equal(one, other, tolerance))
        for one, other in zip(printed, expected, strict=True)
    )


def _decimals_equal(printed: str, expected: str, tolerance: float) -> bool:
    if not _DECIMAL.fullmatch(expected) or not _NUMBER.fullmatch(printed) or len(printed) > 400:
        return False
    return _close(float(printed), float(expected), tolerance)


def returns_the_same(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether a function returned the expected value.

    A list and a tuple of the same items are the same, because data files have only one of the two; so are the keys of
    a mapping and their texts, where the expected keys are texts. A number with a fraction is compared within the
    tolerance, not-a-number equals itself; everything else must be equal.
    """
    if isinstance(expected, float) or isinstance(value, float):
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, expected))
        return numbers and _close(value, expected, tolerance)
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(returns_the_same(one, other, tolerance) for one, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping) or len(value) != len(expected):
            return False
        if all(isinstance(key, str) for key in expected):
            value = {key if isinstance(key, str) else str(key): item for key, item in value.items()}
        return all(key in value and returns_the_same(value[key], item, tolerance) for key, item in expected.items())
    try:
        return bool(value == expected)
    except (TypeError, ArithmeticError):
        return False


def _close(one: float, other: float, tolerance: float) -> bool:
    try:
        one, other = float(one), float(other)
    except OverflowError:
        return one == other
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=min(tolerance, 1.0), abs_tol=tolerance)
