from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.arithmetic import judged, pairs, problems, word_problems, worked
from strop.errors import DataError

PLAIN = re.compile(r"(\d+)([-+*/])(\d+)=")


def parsed(row: dict[str, str]) -> tuple[int, str, int]:
    match = PLAIN.fullmatch(row["prompt"])
    assert match
    return int(match[1]), match[2], int(match[3])


@settings(max_examples=60, deadline=None)
@given(
    digits=st.integers(2, 7),
    operations=st.sets(st.sampled_from("+-*/"), min_size=1).map(lambda chosen: "".join(sorted(chosen))),
    seed=st.integers(0, 2**40),
    split=st.sampled_from(["train", "eval"]),
)
def test_problems_are_right_distinct_and_within_their_digits(
    digits: int, operations: str, seed: int, split: Any
) -> None:
    rows = problems(120, digits=digits, operations=operations, seed=seed, split=split)
    assert len({row["prompt"] for row in rows}) == 120
    for row in rows:
        a, op, b = parsed(row)
        assert op in operations
        assert b < 10**digits
        result = int(row["answer"])
        assert result >= 0
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[op] == result
        assert (result if op == "/" else a) < 10**digits


@settings(max_examples=20, deadline=None)
@given(digits=st.sampled_from([2, 4]), seed=st.integers(0, 2**40))
def test_train_and_eval_never_meet_not_even_swapped(digits: int, seed: int) -> None:
    sides = []
    for split, count in (("train", 3000), ("eval", 500)):
        rows = problems(count, digits=digits, operations="+*", seed=seed, split=split)  # type: ignore[arg-type]
        sides.append({(op, *sorted((a, b))) for a, op, b in map(parsed, rows)})
    assert not sides[0] & sides[1]


def test_train_and_eval_together_are_all_problems() -> None:
    with pytest.raises(DataError) as train:
        problems(10_001)
    with pytest.raises(DataError) as held_out:
        problems(10_001, split="eval")
    counts = [int(re.search(r"only ([\d,]+)", error.value.what)[1].replace(",", "")) for error in (train, held_out)]  # type: ignore[index]
    assert sum(counts) == 10_000
    assert 700 < counts[1] < 1300
    everything = {
        row["prompt"] for n, split in zip(counts, ("train", "eval"), strict=True) for row in problems(n, split=split)
    }  # type: ignore[arg-type]
    assert len(everything) == 10_000


def test_problems_are_a_function_of_their_arguments() -> None:
    assert problems(50, seed=3) == problems(50, seed=3)
    assert problems(50, seed=3) == problems(80, seed=3)[:50]
    assert problems(50, seed=3) != problems(50, seed=4)
    # Runs are compared across machines and versions by these rows.
    assert problems(2) == [{"prompt": "72+65=", "answer": "137"}, {"prompt": "36+62=", "answer": "98"}]


def test_styles() -> None:
    prompts = {style: problems(1, style=style)[0]["prompt"] for style in ("plain", "spaced", "question")}  # type: ignore[arg-type]
    assert prompts == {"plain": "72+65=", "spaced": "72 + 65 =", "question": "What is 72 + 65?"}


STORY = re.compile(
    r"(\w+) has (\d+) (\w+) and ([a-z ]+?) (\d+)( more)?\.(?: Then s?he ([a-z ]+?) (\d+)( more)?\.)? How many"
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    steps=st.sampled_from([1, 2]),
    largest=st.integers(40, 200),
    operations=st.sampled_from(["+", "-", "+-"]),
    split=st.sampled_from(["train", "eval"]),
)
def test_word_problems_have_the_answer_that_their_words_say(
    seed: int, steps: int, largest: int, operations: str, split: Any
) -> None:
    rows = word_problems(30, seed=seed, steps=steps, largest=largest, operations=operations, split=split)
    assert len({row["prompt"] for row in rows}) == 30
    for row in rows:
        match = STORY.match(row["prompt"])
        assert match, row
        total = int(match[2])
        for number, more in ((5, 6), (8, 9)):
            if match[number]:
                change = int(match[number])
                assert ("+" if match[more] else "-") in operations
                total += change if match[more] else -change
                assert 0 <= total <= largest
        assert (match[8] is not None) == (steps == 2)
        assert row["answer"] == str(total)


def test_held_out_word_problems_use_other_numbers() -> None:
    def pairs(split: Any, count: int) -> set[tuple[Any, ...]]:
        matches = [STORY.match(row["prompt"]) for row in word_problems(count, split=split)]
        return {(match[2], bool(match[6]), match[5]) for match in matches if match}

    held_out = pairs("eval", 300)
    assert len(held_out) > 10
    assert not held_out & pairs("train", 3000)


@pytest.mark.parametrize(
    ("function", "arguments", "what"),
    [
        (problems, {"digits": 0}, "digits is 0"),
        (problems, {"operations": "+^"}, "operations is '+^'"),
        (problems, {"split": "evla"}, "split is 'evla'"),
        (problems, {"style": "plian"}, "style is 'plian'"),
        (problems, {"digits": 1, "split": "eval"}, "distinct problems in the eval split"),
        (word_problems, {"largest": 3}, "largest is 3"),
        (word_problems, {"operations": "*"}, "operations is '*'"),
    ],
)
def test_arguments_out_of_range(function: Any, arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError) as error:
        function(60, **arguments)
    assert what in error.value.what
    assert error.value.mend


def test_asking_for_more_word_problems_than_there_are_ends() -> None:
    with pytest.raises(DataError, match="distinct problems were found"):
        word_problems(9000, largest=6, operations="+", split="eval")


def test_flawed_answers_are_one_too_high_in_the_share_asked_for() -> None:
    right, careless = problems(2000, seed=3), problems(2000, seed=3, flawed=0.6)
    assert [row["prompt"] for row in careless] == [row["prompt"] for row in right]
    slips = [int(bad["answer"]) - int(good["answer"]) for bad, good in zip(careless, right, strict=True)]
    assert set(slips) == {0, 1}
    assert 0.56 < sum(slips) / len(slips) < 0.64
    assert (
        sum(int(a["answer"]) - int(b["answer"]) for a, b in zip(problems(50, flawed=1.0), problems(50), strict=True))
        == 50
    )


def test_judged_answers_are_right_where_they_say_so() -> None:
    rows = judged(400, seed=3)
    both = pairs(400, seed=3)
    right = 0
    for row, pair in zip(rows, both, strict=True):
        assert row["prompt"] == pair["prompt"]
        assert row["completion"] == pair["chosen" if row["label"] else "rejected"]
        assert (row["completion"] == pair["answer"]) is row["label"]
        right += bool(row["label"])
    assert 160 < right < 240


@pytest.mark.parametrize("style", ["plain", "question"])
def test_worked_solutions_are_right_up_to_their_slip(style: Any) -> None:
    rows = worked(600, seed=1, style=style)
    firsts = []
    for row in rows:
        a, b = (int(number) for number in re.findall(r"\d+", row["prompt"]))
        ones, tens, result = row["steps"]
        assert ones.startswith(f"{a % 10}+{b % 10}=")
        carried = int(ones.split("=")[1])
        assert tens.startswith(f"{a // 10}+{b // 10}+{carried // 10}=")
        first = carried == a % 10 + b % 10
        second = first and int(tens.split("=")[1]) == a // 10 + b // 10 + carried // 10
        assert row["labels"] == [first, second, second and int(result) == a + b]
        assert row["labels"][2] or int(result) != a + b
        firsts.append(row["labels"].index(False) if False in row["labels"] else 3)
    assert 250 < firsts.count(3) < 350
    assert all(firsts.count(at) > 60 for at in range(3))
    assert {row["prompt"] for row in rows} == {row["prompt"] for row in problems(600, seed=1, style=style)}
