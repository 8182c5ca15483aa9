"""Reward functions of TRL itself, as verifiers."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config.rewards import PythonVerifier
from strop.rewards.protocol import Completed
from strop.rewards.python import PythonFunction

rewards = pytest.importorskip("trl.rewards")
QUESTION = [{"role": "user", "content": "What is 1/3 + 1/3?"}]
TEXTS = [
    "<think>Two thirds.</think>It is \\boxed{\\frac{2}{3}}.",
    "<think>Two thirds. It is \\boxed{\\frac{2}{3}}.",
    "<think>Hm.</think>It is \\boxed{\\frac{1}{3}}.",
    "no idea",
]


def scores(name: str, row: dict[str, Any]) -> list[float | None]:
    verifier = PythonFunction(
        PythonVerifier(kind="python", function=f"trl.rewards:{name}"), where="rewards.verifiers.0"
    )
    found = verifier.verify([Completed(QUESTION, text, row={"prompt": QUESTION, **row}) for text in TEXTS])
    assert {verdict.status for verdict in found} == {"ok"}
    return [verdict.score for verdict in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("think_format_reward", [1.0, 0.0, 1.0, 0.0]),
        ("accuracy_reward", [1.0, 1.0, 0.0, 0.0]),
        ("reasoning_accuracy_reward", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_it_says_what_it_says_in_trl(name: str, expected: list[float]) -> None:
    row = {"solution": "$\\frac{2}{3}$"}
    assert scores(name, row) == expected
    own = getattr(rewards, name)(
        [[{"role": "assistant", "content": t}] for t in TEXTS], solution=["$\\frac{2}{3}$"] * 4
    )
    assert own == expected


def test_one_that_does_not_apply_is_left_out() -> None:
    """TRL's None for a solution that cannot be read."""
    assert scores("accuracy_reward", {"solution": "no mathematics"}) == [None] * 4
