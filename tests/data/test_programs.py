"""Made-up programming tasks: distinct, apart, and right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strop.data.programs import problems
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
        assert row["answer"].startswith(row["head"])


def test_a_wrong_argument_is_told() -> None:
    for wrong in ({"style": "functions"}, {"split": "test"}, {"tests": 0}, {"tests": 21}):
        with pytest.raises(DataError) as caught:
            problems(3, **wrong)  # type: ignore[arg-type]
        assert caught.value.where == next(iter(wrong))
