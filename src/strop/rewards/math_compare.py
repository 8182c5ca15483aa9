"""Whether two answers are the same mathematics: by their text, by exact arithmetic, and last by algebra.

The algebra is math-verify's (sympy below it), which computes whatever it is given: call this in a process that may be
killed. Neither evaluates a text as Python; math-verify's parser for plain expressions, which does, is not used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from strop.rewards.math_limits import too_large
from strop.rewards.math_text import (
    Collection,
    Number,
    as_words,
    assigned,
    plain_words,
    read_collection,
    read_number,
    read_union,
    written_alike,
)

DIGITS = 40
"""Decimal places to which irrational numbers are computed when they must be equal exactly."""


def same(gold: str, answer: str, tolerance: float) -> bool:
    """Whether two cleaned answers (`math_text.clean`) are equal.

    Args:
        gold: the reference answer, which decides how the other is read. tolerance: see `config.MathVerifier`.
    """
    if written_alike(gold, answer):
        return True
    if (words := as_words(gold)) is not None:
        return plain_words(answer) == words
    gold_name, gold_value = assigned(gold)
    answer_name, answer_value = assigned(answer)
    if gold_name and answer_name:
        return gold_name == answer_name and same(gold_value, answer_value, tolerance)
    if gold_name or (answer_name and "=" not in gold):
        return same(gold_value, answer_value, tolerance)
    numbers = read_number(gold), read_number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return same_number(numbers[0], numbers[1], tolerance)
    unions = read_union(gold), read_union(answer)
    if unions[0] is not None and unions[1] is not None:
        return _matched(unions[0], unions[1], lambda a, b: same(a, b, tolerance))
    lists = read_collection(gold), read_collection(answer)
    if lists[0] is not None and lists[1] is not None:
        return _same_collection(lists[0], lists[1], tolerance)
    # A set of one number is that number.
    if lists[0] is not None and numbers[1] is not None:
        return len(lists[0].parts) == 1 and same(lists[0].parts[0], answer, tolerance)
    if lists[1] is not None and numbers[0] is not None:
        return len(lists[1].parts) == 1 and same(gold, lists[1].parts[0], tolerance)
    return same_expression(gold, answer, tolerance)


def same_number(gold: Number, answer: Number, tolerance: float) -> bool:
    """Whether two numbers are equal: exactly, or within the tolerance where one is a decimal.

    A number with a percent sign may also be meant without it, or as a share of one; so 50% equals 50, 0.5 and 1/2, but
    50 and 0.5, neither with a sign, differ.
    """
    decimal = gold.decimal or answer.decimal
    one_sign = gold.percent != answer.percent
    for a, b in ((gold.value, answer.value), *([_shares(gold, answer)] if one_sign else [])):
        if a == b or (decimal and abs(a - b) <= Fraction(tolerance) * max(Fraction(1), abs(a), abs(b))):
            return True
    return False


def _shares(gold: Number, answer: Number) -> tuple[Fraction, Fraction]:
    return (gold.value / 100, answer.value) if gold.percent else (gold.value, answer.value / 100)


def _same_collection(gold: Collection, answer: Collection, tolerance: float) -> bool:
    if gold.brackets != answer.brackets or len(gold.parts) != len(answer.parts):
        return False
    if gold.ordered:
        return all(same(a, b, tolerance) for a, b in zip(gold.parts, answer.parts, strict=True))
    return _matched(gold.parts, answer.parts, lambda a, b: same(a, b, tolerance))


def _matched(golds: tuple[Any, ...], answers: tuple[Any, ...], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether each of some things has an equal of its own among others, in any order."""
    left = list(answers)
    for gold in golds:
        found = next((index for index, answer in enumerate(left) if equal(gold, answer)), None)
        if found is None:
            return False
        del left[found]
    return not left


# --- algebra -------------------------------------------------------------------------------------------------------


def same_expression(gold: str, answer: str, tolerance: float) -> bool:
    """Whether two answers are equal as expressions, equations, sets, intervals or matrices."""
    if too_large(gold) or too_large(answer):
        return False
    expected, found = parse(gold), parse(answer)
    return expected is not None and found is not None and _equal(expected, found, tolerance)


@lru_cache(maxsize=1024)
def parse(latex: str) -> Any:
    """An answer as a sympy object; None if it is none."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    from math_verify import LatexExtractionConfig
    from math_verify import parse as parse_text

    # Their own time-outs are signals, which a computation in C does not see; the worker has the time-out.
    found = parse_text(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _equal(gold: Any, answer: Any, tolerance: float) -> bool:
    from math_verify import verify
    from sympy import Expr, FiniteSet, Interval, MatrixBase, Union

    if isinstance(gold, Expr) and isinstance(answer, Expr) and gold.is_number and answer.is_number:
        return _equal_numbers(gold, answer, tolerance)
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        pairs = zip(gold, answer, strict=True) if gold.shape == answer.shape else ()
        return gold.shape == answer.shape and all(_equal(a, b, tolerance) for a, b in pairs)
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        same_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return same_ends and all(
            _equal(getattr(gold, end), getattr(answer, end), tolerance) for end in ("start", "end")
        )
    if {isinstance(gold, Interval), isinstance(answer, Interval)} == {True, False} and isinstance(
        answer if isinstance(gold, Interval) else gold, FiniteSet
    ):
        return False  # math-verify would take the ends of an open interval for two numbers
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _matched(gold.args, answer.args, lambda a, b: _equal(a, b, tolerance))
    places = DIGITS if tolerance == 0 else max(0, math.floor(-math.log10(tolerance)))
    return bool(
        verify([gold], [answer], float_rounding=min(places, 15), timeout_seconds=None, allow_set_relation_comp=True)
    )


def _equal_numbers(gold: Any, answer: Any, tolerance: float) -> bool:
    from sympy import Float, oo, zoo

    if gold == answer:
        return True
    gold, answer = gold.doit(), answer.doit()
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    if any(number in (oo, -oo, zoo) for number in (gold, answer)):
        return bool(gold == answer)
    rounded = gold.has(Float) or answer.has(Float)
    difference, size = (gold - answer).evalf(DIGITS), max(abs(gold.evalf(DIGITS)), abs(answer.evalf(DIGITS)), 1)
    bound = tolerance if rounded else 10.0 ** (5 - DIGITS)
    return bool(abs(difference) <= bound * size)
