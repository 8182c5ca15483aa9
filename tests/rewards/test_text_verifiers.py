"""The `exact`, `regex` and `format` verifiers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.config.rewards import ExactVerifier, FormatVerifier, RegexVerifier
from strop.errors import UserError
from strop.rewards.exact import Exact
from strop.rewards.format import Format
from strop.rewards.pattern import Pattern
from strop.rewards.protocol import Completed, Verdict


def item(completion: str, answer: Any = None) -> Completed:
    return Completed(prompt="", completion=completion, answer=answer)


def exact(completion: str, answer: Any, **settings: Any) -> Verdict:
    return Exact(ExactVerifier(kind="exact", **settings)).verify([item(completion, answer)])[0]


def pattern(expression: str, completion: str, answer: Any = None) -> Verdict:
    return Pattern(RegexVerifier(kind="regex", pattern=expression)).verify([item(completion, answer)])[0]


def shape(tags: list[str], completion: str) -> float | None:
    return Format(FormatVerifier(kind="format", tags=tags)).verify([item(completion)])[0].score


def test_exact() -> None:
    assert exact(" Paris\n", "Paris").score == 1.0
    assert exact("Paris", "Paris ", strip=False).score == 0.0
    assert exact("paris", "Paris").score == 0.0
    assert exact("PARIS", "Paris", ignore_case=True).score == 1.0
    assert exact("12", 12).score == 1.0
    assert exact("Paris, I think", "Paris").score == 0.0


@pytest.mark.parametrize("answer", [None, ["a", "b"]])
def test_no_answer_is_a_verifier_error(answer: Any) -> None:
    assert exact("None", answer).status == "verifier_error"
    assert pattern("(?P<answer>.*)", "None", answer).status == "verifier_error"


def test_a_pattern_without_the_group_is_searched() -> None:
    assert pattern(r"\d+", "it is 12").score == 1.0
    assert pattern(r"^\d+$", "it is 12").score == 0.0
    assert pattern(r"\d+", "none", answer="none").score == 0.0


def test_the_last_match_counts() -> None:
    assert pattern(r"#### (?P<answer>\S+)", "#### 1 no, #### 2", "2").score == 1.0
    assert pattern(r"#### (?P<answer>\S+)", "#### 2 no, #### 1", "2").score == 0.0
    assert pattern(r"#### (?P<answer>\S+)", "2", "2").score == 0.0
    assert pattern(r"= (?P<answer>.*);|stop", "= 2 ; stop", 2).score == 0.0
    assert pattern(r"= (?P<answer>.*);", "= 2 ;", 2).score == 1.0


def test_endless_backtracking_times_out_alone() -> None:
    verifier = Pattern(RegexVerifier(kind="regex", pattern=r"^(?:a|aa)+$"), timeout=0.6)
    verdicts = verifier.verify([item("aaa"), item("a" * 100 + "b"), item("aaaa"), item("b")])
    assert [verdict.status for verdict in verdicts] == ["ok", "timeout", "ok", "ok"]
    assert [verdict.score for verdict in verdicts] == [1.0, None, 1.0, 0.0]
    verifier = Pattern(RegexVerifier(kind="regex", pattern=r"^(?P<answer>(?:a|aa)+)$"), timeout=0.2)
    assert verifier.verify([item("a" * 100 + "b", "a")])[0].status == "timeout"


def test_a_pattern_that_does_not_compile_shows_the_position() -> None:
    with pytest.raises(UserError) as caught:
        Pattern(RegexVerifier(kind="regex", pattern="a(b["), where="rewards.verifiers.3")
    text = str(caught.value)
    assert "rewards.verifiers.3.pattern" in text
    assert "position 4" in text
    shown, mark = text.splitlines()[1:3]
    assert shown.index("a(b[") + 4 == mark.index("^")


THINK = ["think", "answer"]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think> <answer>b</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think>", 0.5),
        ("<answer>b</answer>", 0.5),
        ("<answer>b</answer><think>a</think>", 0.5),
        ("<think>a<answer>b</answer></think>", 0.5),
        ("<think>a</think><answer>b", 0.5),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.5),
        ("<think>a<answer>b</answer>", 0.5),
        ("</think>a<think><answer>b", 0.0),
        ("a", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion: str, score: float) -> None:
    assert shape(THINK, completion) == score


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x"]), max_size=12))
def test_full_marks_mean_once_each_closed_and_in_order(parts: list[str]) -> None:
    found = shape(THINK, "".join(parts))
    assert found in (0.0, 0.5, 1.0)
    tags = [part for part in parts if part != "x"]
    assert (found == 1.0) == (tags == ["<think>", "</think>", "<answer>", "</answer>"])


@pytest.mark.parametrize("tags", [["<think>"], ["/think"], [""], [" think"], ["think", "think"]])
def test_tags_that_are_no_names_are_refused(tags: list[str]) -> None:
    with pytest.raises(UserError, match="tags"):
        Format(FormatVerifier(kind="format", tags=tags), where="rewards.verifiers.0")
