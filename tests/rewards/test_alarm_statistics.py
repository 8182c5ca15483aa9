"""What alarms look at, one statistic after the other."""

from __future__ import annotations

import math
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.rewards.alarms.statistics import (
    GRAM,
    NEARLY,
    Outcome,
    _grams,
    candidates,
    dominance,
    length,
    lower_bound,
    mean_and_noise,
    repeated,
    repetition,
    rewarded,
    sameness,
    stuffing,
)


def said(text: str, reward: float = 1.0, *, prompt: int = 0, answer: str | None = None, sample: int = 0) -> Outcome:
    return Outcome(prompt, sample, f"row-{prompt:06d}", text, [ord(c) for c in text], reward, answer)


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("abc", 0.0), ("abcdefgh", 0.0), ("aaaaaaa", 3 / 4), ("12 12 12 12", 5 / 8), ("abcdabcd", 1 / 5)],
)
def test_repeated_grams(text: str, share: float) -> None:
    assert repeated([ord(c) for c in text]) == pytest.approx(share)


def grams(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(len(text) - size + 1)]


@given(texts=st.lists(st.text("ab", max_size=14), min_size=1, max_size=8))
def test_grams_counted_together_are_those_counted_one_by_one(texts: list[str]) -> None:
    shares = []
    for text in texts:
        found = grams(text, GRAM)
        shares.append(1 - len(set(found)) / len(found) if found else 0.0)
    outcomes = [said(text, prompt=number) for number, text in enumerate(texts)]
    assert repetition(outcomes).value == math.fsum(shares) / len(shares)
    assert [repeated(one.tokens) for one in outcomes] == shares
    # What is shorter than an n-gram is one itself, and of no text there is one that is empty.
    sets = [set(grams(text, min(GRAM, len(text)))) if text else set() for text in texts]
    same = [len(a & b) >= NEARLY * len(a | b) for a, b in combinations(sets, 2)]
    found = sameness(outcomes)
    assert (None if found is None else found.value) == (sum(same) / len(same) if same else None)


@pytest.mark.parametrize("vocabulary", [17, 300, 152_000])
def test_different_grams_are_hardly_ever_taken_for_the_same(vocabulary: int) -> None:
    draw = np.random.default_rng(0)
    different = np.unique(draw.integers(vocabulary, size=(60_000, GRAM)), axis=0)
    # Behind each an end of its own: grams that reach over it are not looked at.
    hashes = [_grams(row)[0] for row in different]
    pairs = len(hashes) * (len(hashes) - 1) / 2
    assert len(hashes) - len(set(hashes)) <= 10 * max(1.0, pairs / 2**32)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no number here", 0),
        ("42", 1),
        ("42.", 1),
        ("12 + 30 = 42", 1),
        ("First 3 apples, then 4 more: 3 + 4 = 7, so the answer is 7.", 1),
        (r"\boxed{3} or \boxed{4} or \boxed{3}", 2),
        ("The answer is 3. The answer is 4. The answer is 5.", 3),
        ("0, 1, 2, 3, 4, 5, 6, 7, 8, 9", 10),
        ("It is 3 or 4 or 5", 3),
        ("A B C D", 4),
        ("(A), (B) or (C)", 3),
        ("7 7 7 7", 1),
        ("1,234,567", 1),
        ("-3; 2.5; 10", 3),
        ("I have 3 cats and 4 dogs", 1),
    ],
)
def test_candidates(text: str, count: int) -> None:
    assert candidates(text) == count


def test_a_hostile_text_costs_time_in_proportion_to_its_length() -> None:
    """Were a statistic quadratic, these would take hours."""
    for text in ("1 " * 50_000, "1" + " " * 100_000 + "2", "((((" * 25_000, "1,2" * 30_000, "A or " * 20_000):
        started = time.perf_counter()
        candidates(text)
        repeated([ord(c) for c in text])
        assert time.perf_counter() - started < 60


def test_what_is_rewarded() -> None:
    worth = [said("a", 0.0), said("b", 1.0), said("c", 0.0), said("d", 1.0)]
    assert [one.text for one in rewarded(worth, 0.0)] == ["b", "d"]
    # All right is all rewarded, all wrong is not: the run knows what is the least.
    assert len(rewarded([said("a"), said("b")], 0.0)) == 2
    assert rewarded([said("a", 0.0), said("b", 0.0)], 0.0) == []
    assert rewarded([], 0.0) == []
    # A mean that rounding puts above the one value that there is.
    assert len(rewarded([said("a", 0.1)] * 3, 0.0)) == 3


def test_means_point_at_the_completion_that_shows_it_best() -> None:
    outcomes = [said("1"), said("1 2 3"), said("aaaaaaaaaaaa")]
    assert stuffing(outcomes).value == pytest.approx(4 / 3)
    assert stuffing(outcomes).example is outcomes[1]
    assert repetition(outcomes).example is outcomes[2]
    assert length(outcomes).value == pytest.approx(18 / 3)
    assert length(outcomes).example is outcomes[2]


def test_sameness_is_of_prompts_with_different_answers() -> None:
    same = [said("10 20 30", prompt=n, answer=str(n)) for n in range(4)]
    found = sameness(same)
    assert found is not None
    assert found.value == 1.0
    assert found.example is not None
    # The same text is right where the answer is the same, and within a group.
    assert sameness([said("7", prompt=n, answer="7") for n in range(4)]) is None
    assert sameness([said("7", prompt=1), said("7", prompt=1)]) is None
    nearly = [said("the sum of these is certainly 10", prompt=0), said("the sum of these is certainly 11", prompt=1)]
    assert sameness(nearly).value == 1.0  # type: ignore[union-attr]
    other = [said("the sum of these is certainly 10", prompt=0), said("a wholly other text", prompt=1)]
    assert sameness(other).value == 0.0  # type: ignore[union-attr]


def scored(group: int, **components: float) -> Outcome:
    return Outcome(group, 0, "", "", [], sum(components.values()), components=components, decider="right")


def test_dominance_is_a_share_of_the_variance_within_groups() -> None:
    # cov(form, sum) / var(sum) by hand: sums 0, 2, 1, 3; form 0, 2, 0, 2.
    group = [scored(0, right=r, form=f) for r, f in ((0, 0), (0, 2), (1, 0), (1, 2))]
    found = dominance(group)
    assert found is not None
    assert found.value == pytest.approx(4 / 5)
    assert found.about == "form"
    # What differs between groups only makes no advantage.
    assert dominance([*group, scored(1, right=0, form=50), scored(1, right=0, form=50)]).value == found.value  # type: ignore[union-attr]
    assert dominance([scored(0, right=1, form=1)] * 3) is None
    assert dominance([scored(0, right=0), scored(0, right=1)]) is None


def test_a_verifier_that_decides_for_a_role_does_not_dominate_a_match() -> None:
    black = [Outcome(0, n, "", "", [], n, components={"black": n}, decider="black") for n in (0.0, 1.0)]
    white = [Outcome(0, n + 2, "", "", [], n, components={"white": n}, decider="white") for n in (3.0, 9.0)]
    for members in ([*black, *white], [*white, *black]):
        assert dominance(members) is None


@given(st.text("aAB_.,-0123 \\\\=;(", max_size=30))
def test_candidates_of_ascii_are_those_of_the_same_text_before_other_letters(text: str) -> None:
    assert candidates(text) == candidates(f"{text}\nü")


@given(st.lists(st.tuples(st.integers(0, 2), *[st.floats(-5, 5)] * 3), min_size=2, max_size=20))
def test_shares_of_all_components_add_up(rows: list[tuple[int, float, float, float]]) -> None:
    """Each component's share is what remains for it when the other two are one."""

    def share(*mine: int) -> float | None:
        outcomes = [
            Outcome(g, 0, "", "", [], 0.0, components={
                "mine": sum(scores[n] for n in mine),
                "": sum(scores[n] for n in range(3) if n not in mine),
            })
            for g, *scores in rows
        ]  # fmt: skip
        found = dominance(outcomes)
        return None if found is None else found.value

    parts = [share(n) for n in range(3)]
    if None not in parts:
        assert sum(parts) == pytest.approx(1.0, abs=1e-6)  # type: ignore[arg-type]


def test_the_noise_of_a_mean_is_that_of_its_groups() -> None:
    outcomes = [said("", r, prompt=g) for g, r in ((0, 0.0), (0, 1.0), (1, 1.0), (1, 1.0))]
    mean, noise = mean_and_noise(outcomes)
    assert mean == 0.75
    assert noise == pytest.approx(0.25)
    assert math.isinf(mean_and_noise(outcomes[:2])[1])


def test_a_bound_needs_numbers() -> None:
    assert lower_bound(0, 0) == 0.0
    assert lower_bound(0, 50) == 0.0
    # Wilson's interval at z = 2, worked out by hand: (1 + 2 - 2 sqrt(1)) / (1 + 4) for one of one.
    assert lower_bound(1, 1) == pytest.approx(0.2)
    assert lower_bound(5, 10) < lower_bound(50, 100) < lower_bound(500, 1000) < 0.5
