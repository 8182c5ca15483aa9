"""The `math` verifier: what is equal, what is not, where the answer is taken from, and what is never computed."""

from __future__ import annotations

import asyncio
import random
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_pairs import DIFFERENT, EQUAL

from strop.config.rewards import MathVerifier, RewardSettings
from strop.rewards.build import build_scorer
from strop.rewards.math_answer import MathAnswer
from strop.rewards.math_compare import same, same_expression
from strop.rewards.math_limits import too_large
from strop.rewards.math_text import clean
from strop.rewards.protocol import Completed, Reward, Verdict


def verdict(answer: Any, completion: str, **options: Any) -> Verdict:
    return MathAnswer(MathVerifier(kind="math", **options)).verify([Completed("", completion, answer=answer)])[0]


def score(answer: Any, written: str, **options: Any) -> float | None:
    return verdict(answer, rf"So it is \boxed{{{written}}}.", **options).score


@pytest.mark.parametrize("kind", EQUAL)
def test_equal(kind: str) -> None:
    assert [pair for pair in EQUAL[kind] if score(*pair) != 1.0] == []


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different(kind: str) -> None:
    assert [pair for pair in DIFFERENT[kind] if score(*pair) != 0.0] == []


@pytest.mark.parametrize("kind", EQUAL)
def test_an_answer_equals_itself(kind: str) -> None:
    assert [gold for gold, _ in EQUAL[kind] if score(gold, str(gold)) != 1.0] == []


@pytest.mark.parametrize(
    ("completion", "boxed", "last", "auto"),
    [
        (r"First \boxed{4}, no, \boxed{5}.", "5", "5", "5"),
        (r"\boxed{5} is my answer. Some 4 more words.", "5", "4", "5"),
        ("The answer is 5.", None, "5", "5"),
        ("The answer is $x = 5$ cm, as 2 + 3 = 5.", None, "x=5", "x=5"),
        ("Answer:\n**5**\n", None, "5", "5"),
        ("The answer is 4. Wait: the final answer is therefore 5, because 4 is even.", None, "5", "5"),
        ("#### 5", None, "5", "5"),
        ("Adding up, 2 + 3 = 5", None, "5", "5"),
        ("It costs $4, then $5.", None, "5", "5"),
        (r"Hence \(x = \frac{1}{2}\) holds.", None, "1/2", "1/2"),
        (r"$$\frac{1}{2}$$", None, "1/2", "1/2"),
        (r"\boxed{\frac{1}{2}} and so \boxed{ 5", "1/2", "5", "1/2"),
        (r"\boxed{5", None, "5", "5"),
        (r"\boxed{\boxed{5}}", "5", "5", "5"),
        (r"\boxed 5 it is", "5", "5", "5"),
        (r"\boxed{\{1, 2\}}", "{1,2}", "2", "{1,2}"),
        (r"The answer is \boxed{5}", "5", "5", "5"),
        ("no idea", None, None, None),
        ("", None, None, None),
    ],
)
def test_where_the_answer_is_taken_from(completion: str, boxed: str | None, last: str | None, auto: str | None) -> None:
    for take, expected in (("boxed", boxed), ("last", last), ("auto", auto)):
        found = verdict(expected if expected is not None else "5", completion, take=take)
        assert found.score == (0.0 if expected is None else 1.0), (take, found)
        if expected is None:
            assert "no " in found.detail
            assert found.components == {"answers": 0.0}


def test_the_last_of_several_answers_counts_and_they_are_told() -> None:
    stuffed = " ".join(rf"\boxed{{{number}}}" for number in range(10))
    assert verdict("9", stuffed).score == 1.0
    assert [verdict(str(number), stuffed).score for number in range(9)] == [0.0] * 9
    assert verdict("9", stuffed).components == {"answers": 10.0}
    assert "10 different answers" in verdict("9", stuffed).detail
    twice = verdict("5", r"\boxed{5} that is \boxed{ 5 }")
    assert (twice.score, twice.detail, twice.components) == (1.0, "", {"answers": 1.0})
    said = verdict("4", "The answer is 3. The answer is 4.")
    assert (said.score, said.components) == (1.0, {"answers": 2.0})


def test_tolerance() -> None:
    assert score("1/3", "0.33") == 0.0
    assert score("1/3", "0.33", tolerance=0.01) == 1.0
    assert score(r"\pi", "3.14", tolerance=0.01) == 1.0
    assert score(r"\{\pi, 1\}", r"\{3.14, 1\}", tolerance=0.01) == 1.0
    assert score("[1/3, 2)", "[0.33, 2)", tolerance=0.01) == 1.0
    assert score("1/3", "0.3333333", tolerance=0) == 0.0
    assert score("1/2", "0.5", tolerance=0) == 1.0
    # Exact numbers have none.
    assert score("1234567", "1234568", tolerance=0.01) == 0.0
    assert score(r"\frac{1}{3}", r"\frac{33}{100}", tolerance=0.01) == 0.0
    assert score(r"\sqrt{2}", r"\frac{141}{100}", tolerance=0.01) == 0.0


def test_reference_answers() -> None:
    assert score(["1/2", "5"], "5") == 1.0
    assert score(["1/2", "5"], "6") == 0.0
    assert score("2 + 3 = 5\n#### 5", "5") == 1.0
    assert score(r"so $x = \boxed{5}$", "5") == 1.0
    assert score("$5$", "5") == 1.0
    for nothing in (None, "", [], {"a": 1}, "#### "):
        assert verdict(nothing, r"\boxed{5}").status == "verifier_error"


# --- agreement of the quick ways with algebra -------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-9999, 9999).map(lambda n: (Fraction(n), str(n))),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda p: (Fraction(*p), rf"\frac{{{p[0]}}}{{{p[1]}}}")),
    st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda p: (Fraction(*p), f"{p[0]}/{p[1]}")),
    st.integers(-9999, 9999).map(lambda n: (Fraction(n, 100), f"{n / 100:.2f}")),
)


@settings(max_examples=150, deadline=None)
@given(NUMBERS, NUMBERS)
def test_numbers_read_directly_and_through_algebra_agree(a: tuple[Fraction, str], b: tuple[Fraction, str]) -> None:
    expected = a[0] == b[0]
    assert same(clean(a[1]), clean(b[1]), 0.0) is expected
    assert same_expression(clean(a[1]), clean(b[1]), 1e-12) is expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=4),
    st.sampled_from(["()", "[]", "(]", "[)", r"\{\}"]),
    st.randoms(use_true_random=False),
)
def test_collections_read_directly_and_through_algebra_agree(
    parts: list[int], brackets: str, draw: random.Random
) -> None:
    half = len(brackets) // 2
    parts = sorted(parts) if brackets in ("[]", "(]", "[)") else parts
    parts = parts[:2] if brackets in ("(]", "[)") else parts
    shuffled = draw.sample(parts, len(parts))
    a, b = (brackets[:half] + ",".join(map(str, one)) + brackets[half:] for one in (parts, shuffled))
    unordered = half == 2
    expected = parts == shuffled or (unordered and sorted(parts) == sorted(shuffled))
    assert same(clean(a), clean(b), 1e-6) is expected


# --- poison -----------------------------------------------------------------------------------------------------------

BOMBS = [
    "10^{10^{10}}", "10^10^10", "10**10**10", "9^{9^{9^9}}", "((9!)!)!", "99999999!", r"10^{-10^{9}}", r"2^{99999999}",
    r"\binom{10^9}{5\times 10^8}", r"\binom{100000000}{50000000}",
    "(" * 500_000 + ")" * 500_000, "{" * 500_000 + "}" * 500_000,
    "[" * 1_000_000, "x^{" * 300 + "2" + "}" * 300, "((((((((((((1))))))))))))", "1+" * 500_000 + "1", "9" * 1_000_000,
    "(x+y+z+1)^{60}", r"\frac{1}{" * 300 + "2" + "}" * 300, "__import__('os').system('touch CANARY')",
    "().__class__.__bases__[0].__subclasses__()", "exec(\"open('CANARY','w')\")", "\\sqrt{" * 300 + "2" + "}" * 300,
    r"\text{" * 1000 + "}" * 1000, "$" * 1_000_000, "\\" * 1_000_000, "%" * 1_000_000, "1," * 400_000, "\x00" * 1000,
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:24].encode("unicode_escape").decode())
def test_a_bomb_is_wrong_at_once_and_never_executed(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for completion in (bomb, rf"\boxed{{{bomb}}}", f"The answer is {bomb}", f"${bomb}$"):
        for gold in ("5", r"\frac{x}{2}", "(1,2]"):
            started = time.process_time()
            assert verdict(gold, completion).score == 0.0
            assert time.process_time() - started < 4.0
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_alike_need_not_be_computed() -> None:
    assert score("10^{10^{10}}", "10^{10^{10}}") == 1.0
    assert score("(x+y+z+1)^{60}", "(x+y+z+1)^{60}") == 1.0
    assert score("9" * 900, "9" * 900) == 1.0


FINE = [
    "2^{2024}",
    "10^{100}",
    "x^{10}",
    "e^{x^{2}}",
    "2^{2^{4}}",
    "100!",
    r"\binom{20}{10}",
    "(x+1)^{5}",
    "n!",
    "3^{-2}",
]


@pytest.mark.parametrize("fine", FINE)
def test_what_occurs_in_answers_is_computed(fine: str) -> None:
    assert too_large(clean(fine)) == ""


SLOW = [
    r"\prod_{k=1}^{100000000} k",
    r"\sum_{k=1}^{99999} \sqrt{k} \cdot \sin(k)",
    r"99999^{99999^1}\cdot(99999^{99999})^{99999}",
]


def test_what_slips_through_is_ended_and_takes_nothing_with_it() -> None:
    """A pool of two workers; the rest of a batch has its verdicts, and no item takes longer than its time-out."""
    recipe = {"verifiers": [{"kind": "math", "timeout": 1.5}], "workers": 2, "retries": 0}
    texts = [rf"\boxed{{{SLOW[n // 10] if n % 10 == 5 else n}}}" for n in range(30)]
    judge = build_scorer(RewardSettings.model_validate(recipe))

    async def work() -> list[Reward]:
        try:
            return await judge.score([Completed("", text, answer=n) for n, text in enumerate(texts)])
        finally:
            await judge.close()

    started = time.monotonic()
    rewards = asyncio.run(work())
    assert time.monotonic() - started < 60
    assert all(reward.total == 1.0 for n, reward in enumerate(rewards) if n % 10 != 5)
    assert [rewards[n].status for n in (5, 15, 25)].count("timeout") >= 1
    assert not any(rewards[n].correct for n in (5, 15, 25))
