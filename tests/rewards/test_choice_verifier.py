"""The `choice` verifier: which letter a completion chooses."""

from __future__ import annotations

import time
from typing import Any

import pytest

from strop.config.rewards import ChoiceVerifier
from strop.errors import UserError
from strop.rewards.choice import Choice
from strop.rewards.protocol import Completed, Verdict


def verdict(completion: str, answer: Any = "B", **options: Any) -> Verdict:
    return Choice(ChoiceVerifier(kind="choice", **options)).verify([Completed("", completion, answer=answer)])[0]


CHOOSES_B = [
    "B", "b", " (B) ", "**B**", "B.", r"\boxed{B}", r"\boxed{\text{B}}", r"\boxed{(B)}", r"\boxed{B) 12}", r"\boxed{b}",
    "The answer is B", "The answer is (B).", "the correct answer is **B**, since A is wrong", "Answer: B",
    "Answer: (B) Paris",
    "answer is: $B$", "The answer is option B.", "The best choice is B", "#### B", "I choose B over C.",
    "Option B fits best.",
    "Let me think.\n\nB\n", "B. Paris", "B) Paris", "(A) is wrong. So it must be (B)",
    "The answer is A. No, the answer is B.",
    r"\boxed{A} is tempting, but \boxed{B}", "A: no\nC: no\nThe answer is B",
]  # fmt: skip
CHOOSES_NOTHING = [
    "", "Paris", "I do not know", "A man, a plan", "Because of Boyle's law", "answer is Because", "The answer is BCD",
    "b is small",    "\\boxed{Because}", "ABCDE", "An answer",
]  # fmt: skip


@pytest.mark.parametrize("completion", CHOOSES_B)
def test_b_is_chosen(completion: str) -> None:
    assert verdict(completion).score == 1.0
    assert verdict(completion, "A").score == 0.0


@pytest.mark.parametrize("completion", CHOOSES_NOTHING)
def test_nothing_is_chosen(completion: str) -> None:
    for answer in "ABCDE":
        found = verdict(completion, answer)
        assert (found.score, found.detail) == (0.0, "no choice in the completion")


def test_naming_every_letter_does_not_help() -> None:
    everything = "The answer is A. The answer is B. The answer is C."
    assert [verdict(everything, letter).score for letter in "ABC"] == [0.0, 0.0, 1.0]
    found = verdict(everything, "C")
    assert found.components == {"answers": 3.0}
    assert "3 different choices" in found.detail
    assert [verdict(everything, letter, take="only").score for letter in "ABC"] == [0.0, 0.0, 0.0]
    assert verdict("The answer is B. Yes, the answer is B.", take="only").score == 1.0


def test_how_the_answer_column_says_it() -> None:
    for answer in ("B", "b", "(B)", " B. "):
        assert verdict("B", answer).score == 1.0
    for index in (1, "1"):
        assert verdict("B", index, answers="index").score == 1.0
        assert verdict("A", index, answers="index").score == 0.0
    for wrong in (None, "F", "", "Paris", 1, True, ["B"]):
        assert verdict("B", wrong).status == "verifier_error"
    for wrong in (None, 5, -1, "B", 1.5):
        assert verdict("B", wrong, answers="index").status == "verifier_error"


def test_other_letters() -> None:
    assert verdict("The answer is F", "F", letters="ABCDEFGH").score == 1.0
    assert verdict("The answer is F", "A", letters="ABCD").score == 0.0
    assert verdict("(2)", "2", letters="1234").score == 1.0
    assert verdict("The answer is 2.", "2", letters="1234").score == 1.0
    assert verdict("The answer is 25.", "2", letters="1234").score == 0.0


@pytest.mark.parametrize("letters", ["AA", "Aa", "A B", "A-Z", "[^"])
def test_letters_that_are_none_are_refused(letters: str) -> None:
    with pytest.raises(UserError, match="letters"):
        Choice(ChoiceVerifier(kind="choice", letters=letters), where="rewards.verifiers.0")


@pytest.mark.parametrize("piece", ["answer ", "answer is ", "(A", "\\boxed{", "A\n", "choose ", "**", " \t"])
def test_long_texts_take_little_time(piece: str) -> None:
    started = time.process_time()
    verdict(piece * (1_000_000 // len(piece)))
    assert time.process_time() - started < 5
