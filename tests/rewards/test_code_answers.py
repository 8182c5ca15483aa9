"""When what was printed or returned is what was expected."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import pytest

from strop.rewards.code_answers import prints_the_same, returns_the_same


@pytest.mark.parametrize(
    ("printed", "expected", "compare", "same"),
    [
        ("1 2\n", "1 2", "lines", True),
        ("1 2  \n3\n\n\n", "1 2\n3", "lines", True),
        ("1\r\n2\r\n", "1\n2\n", "lines", True),
        (" 1 2", "1 2", "lines", False),
        ("1  2", "1 2", "lines", False),
        ("1\n2", "1 2", "lines", False),
        ("1\n\n2", "1\n2", "lines", False),
        ("yes", "YES", "lines", False),
        ("", "", "lines", True),
        ("\n", "", "lines", True),
        ("1\n2", "1 2", "words", True),
        ("  1\t2 \n", "1 2", "words", True),
        ("12", "1 2", "words", False),
        ("1 2\n", "1 2", "exact", False),
        ("1 2", "1 2", "exact", True),
        # Numbers.
        ("0.33333333", "0.33333334", "lines", True),
        ("x 0.3333333 y", "x 0.33333334 y", "lines", True),
        ("0.334", "0.333", "lines", False),
        ("1e-3", "0.001", "lines", True),
        ("2", "2.0", "lines", True),
        ("1000001", "1000000", "lines", False),
        ("1000000.5", "1000000", "lines", False),
        ("0.33333333", "0.33333334", "exact", False),
        ("nan", "0.5", "lines", False),
        ("inf", "1e400", "words", False),
        ("١.0", "1.0", "words", False),
        ("0x10", "16.0", "lines", False),
        ("1_0.0", "10.0", "lines", False),
        ("9" * 1000, "1.0", "lines", False),
    ],
)
def test_output(printed: str, expected: str, compare: Literal["lines", "words", "exact"], same: bool) -> None:
    assert prints_the_same(printed, expected, compare=compare, tolerance=1e-6) is same


def test_no_tolerance_means_to_the_letter() -> None:
    assert not prints_the_same("0.50", "0.5", compare="lines", tolerance=0.0)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (True, 1, True),
        ("a", "a", True),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        (0.1 + 0.2, 0.3, True),
        (2, 2.0, True),
        (2.0, 2, True),
        (1.0, True, False),
        (True, 1.0, False),
        (1_000_000, 1_000_001, False),
        (1e6, 1e6 + 0.1, True),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (math.inf, 1e308, False),
        (10**400, 1.0, False),
        (10**400, 10**400, True),
        ((1, 2), [1, 2], True),
        ([(1, 2.0)], [[1, 2]], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        ("ab", ["a", "b"], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({1: "x"}, {"1": "x"}, True),
        ({"1": "x"}, {1: "x"}, False),
        ({1: "x", "1": "y"}, {"1": "x"}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([("a", 1)], {"a": 1}, False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        (b"a", "a", False),
        (Fraction(1, 2), 0.5, False),
        (Fraction(1, 2), Fraction(1, 2), True),
        (Decimal("NaN"), Decimal("NaN"), False),
        (1 + 2j, 1 + 2j, True),
    ],
)
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert returns_the_same(value, expected, 1e-6) is same
