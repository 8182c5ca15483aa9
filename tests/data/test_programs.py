"""Made-up programming tasks: distinct, apart, and right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strop.data.programs import demonstrations, problems
from strop.errors import DataError

STYLES = ("function", "stdin", "assert")


@pytest.mark.parametrize("style", STYLES)
def test_tasks_are_distinct_and_held_out_ones_are_others(style: Any) -> None:
    train, held_out = problems(600, style=style), problems(150, style=style, split="eval")
    prompts = [row["prompt"] for row in (*train, *held_out)]
    assert len(set(prompts)) == len(prompts)
    assert all(len(row["tests"]) == 5 for row in (*train, *held_out))


def test_all_tasks_together_are_all_tasks() -> None:
    counts = []
    for split in ("train", "eval"):
        with pytest.raises(DataError, match="distinct tasks in the") as caught:
            problems(10_000, split=split)
        counts.append(int(caught.value.what.split()[3].replace(",", "")))
    assert sum(counts) == 1008
    assert 0.15 < counts[1] / sum(counts) < 0.25


def test_the_seed_decides_and_nothing_else() -> None:
    assert problems(20, seed=3) == problems(20, seed=3)
    assert problems(20, seed=3) != problems(20, seed=4)
    assert problems(20, seed=3)[:10] == problems(10, seed=3)
    assert json.loads(json.dumps(problems(20))) == problems(20)


def test_the_answers_are_right() -> None:
    for row in problems(300, tests=8):
        space: dict[str, Any] = {}
        exec(row["answer"], space)
        for case in row["tests"]:
            assert space["f"](*case["args"]) == case["expected"], row
        assert row["answer"] == row["head"] + row["body"]


@pytest.mark.parametrize("flawed", [0.0, 0.3, 1.0])
def test_demonstrations_have_slips_as_often_as_was_asked_for(flawed: float) -> None:
    tasks = {row["task"]: row for row in problems(799)}
    rows = demonstrations(4000, flawed=flawed)
    slips = [row["body"] != tasks[row["task"]]["body"] for row in rows]
    assert sum(slips) / len(slips) == pytest.approx(flawed, abs=0.03)
    assert len({row["task"] for row in rows}) == 799
    # The same task is shown right and wrong.
    both = [task for task in tasks if len({row["body"] for row in rows if row["task"] == task}) == 2]
    assert bool(both) == (0 < flawed < 1)
    assert rows[:50] == demonstrations(50, flawed=flawed)
    assert all(row["answer"] == row["head"] + row["body"] for row in rows)


def test_tests_tell_nearly_every_slip_from_what_is_right() -> None:
    rows = {row["task"]: row for row in problems(799, tests=10)}
    passed = 0
    for shown in demonstrations(799, flawed=1.0):
        space: dict[str, Any] = {}
        exec(shown["answer"], space)
        passed += all(_gives(space["f"], case) for case in rows[shown["task"]]["tests"])
    # Some, such as 1 * x + 3 with other brackets, are no slips.
    assert passed / 799 < 0.1


def _gives(function: Any, case: dict[str, Any]) -> bool:
    try:
        return bool(function(*case["args"]) == case["expected"])
    except TypeError:
        return False


def test_a_wrong_argument_is_told() -> None:
    for wrong in ({"style": "functions"}, {"split": "test"}, {"tests": 0}, {"tests": 21}):
        with pytest.raises(DataError) as caught:
            problems(3, **wrong)  # type: ignore[arg-type]
        assert caught.value.where == next(iter(wrong))
    with pytest.raises(DataError) as caught:
        demonstrations(3, flawed=1.5)
    assert caught.value.where == "flawed"
