"""What a scorer of others evaluates is arithmetic, whatever the policy wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.rewards.harmless import Harmful, check, harmless

HARMFUL = [
    "__import__('os').system('touch harm')",
    "[__import__('os').system('touch harm')]",
    "(lambda: open('harm', 'w'))()",
    "[[x for x in [open('harm', 'w')]]]",
    "S(\"__import__('os').system('touch harm')\")",
    "sympify(\"open('harm', 'w')\")",
    "exec(\"open('harm', 'w')\")",
    "lambdify('x', \"__import__('os').system('touch harm')\")(1)",
    "Symbol('x', cls=lambda name: open('harm', 'w'))",
    "[].__class__.__base__.__subclasses__()",
    "f'{open(chr(104), chr(119))}'",
    "(x := 1)",
]
HUGE = ["10**10**10", "2**(10**6)", "9**999", "1 << 99999", "[0] * 10**9", "'a' * 99999", "1" * 5000]


@pytest.mark.parametrize("source", [*HARMFUL, *HUGE])
def test_a_program_is_no_answer(source: str) -> None:
    with pytest.raises(Harmful):
        check(source)


@pytest.mark.parametrize(
    "source",
    [
        "1 + 2 * (3 - 4) / 5",
        "[[0, 1], [1, 0]]",
        "['a', 'b', 3]",
        "x**2 + 3*x - 1/2",
        "Integer (2 )*Symbol ('x' )**Integer (3 )+exp (Symbol ('x' ))",
        "Function ('f' )(Symbol ('x' ))",
        "sqrt(2) ** -3",
        "2 ** x",
        "no program at all",
        "1 +",
    ],
)
def test_arithmetic_is_an_answer(source: str) -> None:
    check(source)


def test_what_evaluates_inside_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in HARMFUL:
        with pytest.raises((Harmful, SyntaxError)), harmless():
            eval(source)
    with pytest.raises(Harmful), harmless():
        (tmp_path / "harm").write_text("")
    with harmless():
        assert eval("[1, 2 + 3]") == [1, 5]
        # Python makes classes of texts of its own.
        from collections import namedtuple

        assert namedtuple("Pair", "a b")(1, 2).b == 2
    assert eval("(lambda: 1)()") == 1
    assert list(tmp_path.iterdir()) == []


EVALUATING = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""The tasks of Reasoning Gym 0.1.25 that executed some of these, found by trying all of them."""


@pytest.mark.parametrize("task", EVALUATING)
def test_tasks_that_evaluate_answers_execute_none(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    from strop.config.adapted_rewards import ReasoningGymVerifier
    from strop.config.data import DataSource
    from strop.data.gym import open_gym
    from strop.rewards.protocol import Completed
    from strop.rewards.reasoning_gym import ReasoningGym

    source: Any = open_gym(DataSource(path=f"reasoning-gym:{task}", arguments={"size": 2}))
    monkeypatch.chdir(tmp_path)
    verifier = ReasoningGym(ReasoningGymVerifier(kind="reasoning_gym"))
    for row in (source[0], source[1]):
        answers = [*HARMFUL, *HUGE]
        verdicts = verifier.verify([Completed(row["prompt"], answer, row=row) for answer in answers])
        assert {verdict.status for verdict in verdicts} == {"ok"}
        assert max(verdict.score for verdict in verdicts if verdict.score is not None) < 0.1
        if row["answer"] is not None:
            [right] = verifier.verify([Completed(row["prompt"], row["answer"], row=row)])
            assert right.score == 1.0
    assert list(tmp_path.iterdir()) == []
