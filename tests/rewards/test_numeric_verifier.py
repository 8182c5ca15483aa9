"""The strict number parser and the `numeric` verifier."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.config.rewards import NumericVerifier
from strop.rewards.numeric import MANY_NUMBERS, MAX_DIGITS, Numeric, find_numbers, parse_answer, parse_number
from strop.rewards.protocol import Completed, Verdict


def verdict(completion: str, answer: Any, **settings: Any) -> Verdict:
    verifier = Numeric(NumericVerifier(kind="numeric", **settings))
    return verifier.verify([Completed(prompt="", completion=completion, answer=answer)])[0]


def values(text: str) -> list[Fraction | None]:
    return [parse_number(spelling) for spelling in find_numbers(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the answer is 12.", ["12"]),
        ("$1,234.50", ["1234.5"]),
        ("-$5 and $-5", ["-5", "-5"]),
        ("\u22127", ["-7"]),
        ("(1,-3)", ["1", "-3"]),
        ("5-3 and 10-12", ["5", "3", "10", "12"]),
        ("x=-3", ["-3"]),
        ("- 3", ["3"]),
        ("1,2,3", ["1", "2", "3"]),
        ("3.14,2.72", ["3.14", "2.72"]),
        ("50%", ["50"]),
        (".5 -.5", ["0.5", "-0.5"]),
        ("so...12", ["12"]),
        ("**12** _13_", ["12", "13"]),
        ("答案是12。", ["12"]),
        ("3/4. Or -1/3", ["3/4", "-1/3"]),
        ("12cm", ["12"]),
        ("1.5e-3 2E+2", ["0.0015", "200"]),
    ],
)
def test_numbers_in_text(text: str, expected: list[str]) -> None:
    assert values(text) == [Fraction(number) for number in expected]


@pytest.mark.parametrize("text", ["x2", "v1.2.3", "12.5.1", "2024/01/02", "a_1", "1..10", "twelve", "nan inf", ""])
def test_not_a_number(text: str) -> None:
    assert values(text) == []


@pytest.mark.parametrize("text", ["5/0", "1e999999999", "1e-999999999", "9" * (MAX_DIGITS + 1)])
def test_a_number_that_equals_nothing_still_is_the_last_number(text: str) -> None:
    assert values(text) == [None]
    # Were it passed over, the 5 before it would count as the answer.
    assert verdict(f"5, then {text}", 5).score == 0.0


@given(st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", "{}.0", "{}.", "= {} kg", "$x = {}$", "{}%"]))
def test_integers_round_trip(number: int, form: str) -> None:
    text = form.format(number)
    assert values(text) == [number]
    assert values(text.replace("-", "\u2212")) == [number]
    assert verdict(text, number, tolerance=0).score == 1.0
    assert verdict(text, number + 1, tolerance=0).score == 0.0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**12), max_value=10**12))
def test_decimals_round_trip(number: Any) -> None:
    for text in (f"{number:f}", f"{number:,f}", f"{number:e}", f"so: {number:f}."):
        assert values(text) == [Fraction(number)]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_answers_are_read_as_they_print(number: float) -> None:
    assert parse_answer(number) == Fraction(repr(number))
    assert verdict(f"about {number}", number, tolerance=0).score == 1.0


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_fractions_round_trip(above: int, below: int) -> None:
    assert values(f"it is {above}/{below},") == [Fraction(above, below)]
    assert verdict(f"{above}/{below}", f"{above * 3}/{below * 3}", tolerance=0).score == 1.0


@given(st.lists(st.integers(-9999, 9999), min_size=1, max_size=20))
def test_take(numbers: list[int]) -> None:
    text = " and ".join(map(str, numbers))
    assert verdict(text, numbers[-1]).score == 1.0
    assert verdict(text, numbers[0], take="first").score == 1.0
    assert verdict(text, numbers[0], take="only").score == float(len(numbers) == 1)


@given(st.text(alphabet="0123456789.,/-+eE$% x\u2212_)", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    for spelling in find_numbers(text):
        value = parse_number(spelling)
        assert value is None or value == parse_number(spelling.replace(",", ""))
    assert verdict(text, 7).score in (0.0, 1.0)


def test_equal_however_written() -> None:
    for answer in (12, 12.0, "12", "12.00", "$12", Fraction(12)):
        for completion in ("12", "12.0", "12.", "1.2e1", "24/2"):
            assert verdict(completion, answer).score == 1.0


def test_tolerance_is_absolute_or_relative() -> None:
    assert verdict("0.05", 0, tolerance=0.1).score == 1.0
    assert verdict("1050", 1000, tolerance=0.1).score == 1.0
    assert verdict("1200", 1000, tolerance=0.1).score == 0.0
    assert verdict("0.333333", "1/3").score == 1.0
    assert verdict("0.3333", "1/3").score == 0.0


def test_nothing_is_evaluated() -> None:
    assert verdict("__import__('os').getpid()", 5).score == 0.0
    assert verdict("2+3", 5).score == 0.0
    assert verdict("9**9**9**9", 9).score == 1.0


def test_printing_every_candidate_is_reported() -> None:
    candidates = " ".join(str(number) for number in range(MANY_NUMBERS + 1))
    assert "different numbers" in verdict(candidates, 5).detail
    assert verdict("5 " * 1000, 5).detail == ""


@pytest.mark.parametrize("answer", [None, "twelve", "1 or 2", True, [12], float("nan"), "5/0", "9" * 1000])
def test_an_answer_that_is_no_number_is_a_verifier_error(answer: Any) -> None:
    failed = verdict("12", answer)
    assert (failed.score, failed.status) == (None, "verifier_error")
    assert "answer" in failed.detail


@pytest.mark.parametrize(
    "text", ["9" * 10_000_000, "1,234" + ",234" * 250_000 + "5", "1." * 500_000, "1e" * 500_000, "-" * 1_000_000]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    # A quadratic search over these would not end within the time of a test run.
    assert verdict(text, 7).score == 0.0
