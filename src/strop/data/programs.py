"""Small programming tasks, made up: `path: strop.data.programs:problems` in a recipe, for the verifier `code`.

Training and held-out tasks of one seed never meet: a hash of the task (what is to be computed, with its numbers) puts
it on one side. One in five is held out. Another seed cuts elsewhere, so use the same seed for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from strop.data.columns import nearest
from strop.data.order import hashed, permutation, stream_key
from strop.errors import DataError

Style = Literal["function", "stdin", "assert"]
Row = dict[str, Any]

HELD_OUT_IN_1000 = 200
HIGHEST = 12
"""Numbers in tasks are 1 to this."""
HEAD = "def f(x):\n"
"""What every function begins with."""


@dataclass(frozen=True)
class Task:
    """takes: what kind of value `x` is. returns: what is to be computed, in words. expression: the same in Python.
    slip: what a careless programmer writes for it.

    All have `{a}` and `{b}` for numbers; a task without `{b}` exists once for each `{a}`.
    """

    takes: Literal["number", "numbers", "text"]
    returns: str
    expression: str
    slip: str


TASKS = (
    Task("number", "{a} times x plus {b}", "{a} * x + {b}", "{a} * (x + {b})"),
    Task("number", "x minus {a}, times {b}", "(x - {a}) * {b}", "x - {a} * {b}"),
    Task("number", "the square of x minus {a}", "x * x - {a}", "x * 2 - {a}"),
    Task("number", "the remainder of x plus {b} divided by {a}", "(x + {b}) % {a}", "x + {b} % {a}"),
    Task("number", "the larger of x and {a}", "max(x, {a})", "min(x, {a})"),
    Task("number", "the difference of x and {a}, never negative", "abs(x - {a})", "max(x - {a}, 0)"),
    Task("number", "{a} if x is even, else {b}", "{a} if x % 2 == 0 else {b}", "{a} if x % 2 else {b}"),
    Task("number", "the sum of the digits of x times {a}", "sum(map(int, str(x * {a})))",
         "sum(map(int, str(x))) * {a}"),
    Task("numbers", "the sum of the numbers above {a}", "sum(n for n in x if n > {a})",
         "sum(n for n in x if n < {a})"),
    Task("numbers", "how many of the numbers are divisible by {a}", "sum(n % {a} == 0 for n in x)",
         "sum(n % {a} for n in x)"),
    Task("numbers", "the numbers in reverse order, each times {a}", "[n * {a} for n in reversed(x)]",
         "[n * {a} for n in x]"),
    Task("numbers", "the numbers below {a}, sorted", "sorted(n for n in x if n < {a})", "[n for n in x if n < {a}]"),
    Task("numbers", "the largest of the numbers plus {a} minus the smallest", "max(x) + {a} - min(x)",
         "max(x) + {a} + min(x)"),
    Task("numbers", "the numbers, each plus {a}, without those that are then above {b}",
         "[n + {a} for n in x if n + {a} <= {b}]", "[n + {a} for n in x if n <= {b}]"),
    Task("text", "the text {a} times over", "x * {a}", "x + x * {a}"),
    Task("text", "the first {a} characters of the text, in reverse order", "x[:{a}][::-1]", "x[::-1][:{a}]"),
    Task("text", "the number of vowels in the text plus {a}", "sum(c in 'aeiou' for c in x) + {a}",
         "sum(c in 'aeiou' for c in x + {a})"),
    Task("text", "the text without its first {a} and its last {b} characters", "x[{a}:len(x) - {b}]", "x[{a}:{b}]"),
)  # fmt: skip
_WORDS = ("apple", "river", "stone", "banana", "window", "python", "lantern", "orchestra", "umbrella", "blacksmith")
_READS = {"number": "int(input())", "numbers": "[int(n) for n in input().split()]", "text": "input()"}
_TAKEN = {"number": "a whole number x", "numbers": "a list of whole numbers x", "text": "a text x"}
_READ = {
    "number": "a whole number x",
    "numbers": "a line of whole numbers x, separated by spaces",
    "text": "a line of text x",
}


def problems(
    count: int,
    *,
    style: Style = "function",
    tests: int = 5,
    seed: int = 0,
    split: Literal["train", "eval"] = "train",
) -> list[Row]:
    """Distinct tasks, each with tests: rows with `prompt`, `task`, `tests`, `entry_point`, `head`, `body` and `answer`.

    Args:
        count: how many rows.
        style: what the tests are: calls of a function `f`, input and output of a program, or asserts about `f`.
        tests: tests of each task, 1 to 20.
        seed: of the choice, the order, the tests and the split.
        split: `train`, or `eval` for tasks that `train` never holds.

    `task` is the prompt in a few words. `answer` is a program that is right; `head` is what a function begins with, for
    the verifier's `before`, and `body` the rest; `head` and `entry_point` are empty for whole programs.

    Raises:
        DataError: an argument is out of its range, or there are fewer distinct tasks than `count`.
    """
    for name, value, allowed in (
        ("style", style, ("function", "stdin", "assert")),
        ("split", split, ("train", "eval")),
    ):
        if value not in allowed:
            raise DataError(
                f"{name} is {value!r}", where=name, mend=nearest(value, allowed) or f"Use one of {', '.join(allowed)}."
            )
    if not 1 <= tests <= 20:
        raise DataError(f"tests is {tests}", where="tests", mend="Use 1 to 20.")
    every = list(_every_task())
    chosen = _split(len(every), seed, split)
    if len(chosen) < count:
        raise DataError(
            f"there are only {len(chosen):,} distinct tasks in the {split} split, and {count:,} were asked for",
            where="count",
            mend="Ask for fewer.",
        )
    return [_row(every[index], style, _values(every[index].takes, index, tests, seed)) for index in chosen[:count]]


def demonstrations(count: int, *, flawed: float = 0.5, seed: int = 0) -> list[Row]:
    """Functions by a careless programmer: rows with `prompt`, `task`, `head`, `body` and `answer`.

    The tasks are those to train on, in the order of `problems`, again and again. For each row it is drawn anew whether
    the function is right or has a slip, such as an order of operations that was not thought of; so the same task comes
    with both.

    Args:
        count: how many rows.
        flawed: share of rows with a slip.
        seed: that of `problems`.

    Raises:
        DataError: `flawed` is no share.
    """
    if not 0 <= flawed <= 1:
        raise DataError(f"flawed is {flawed}", where="flawed", mend="Use a share, 0 to 1.")
    every = list(_every_task())
    chosen = _split(len(every), seed, "train")
    chances = hashed(np.arange(count, dtype=np.uint64), stream_key(seed, 14)).astype(np.float64) * 2.0**-64
    rows = []
    for number, slips in enumerate((chances < flawed).tolist()):
        task = every[chosen[number % len(chosen)]]
        body = f"    return {task.slip if slips else task.expression}\n"
        rows.append({**_asked(task), "head": HEAD, "body": body, "answer": f"{HEAD}{body}"})
    return rows


def _split(tasks: int, seed: int, split: str) -> list[int]:
    """Numbers of the tasks of a split, in its order."""
    held_out = hashed(np.arange(tasks, dtype=np.uint64), stream_key(seed, 11)) % np.uint64(1000) < HELD_OUT_IN_1000
    order = permutation(tasks, stream_key(seed, 12)).tolist()
    return [index for index in order if bool(held_out[index]) == (split == "eval")]


def _every_task() -> Iterator[Task]:
    """Each task with its numbers filled in."""
    for task in TASKS:
        for a in range(1, HIGHEST + 1):
            for b in range(1, HIGHEST + 1) if "{b}" in task.expression else (0,):
                texts = (text.format(a=a, b=b) for text in (task.returns, task.expression, task.slip))
                yield Task(task.takes, *texts)


def _values(takes: str, index: int, count: int, seed: int) -> list[Any]:
    """Values of `x` to test with."""
    numbers = np.arange(index * 512, index * 512 + count * 16, dtype=np.uint64)
    draws = hashed(numbers, stream_key(seed, 13)).reshape(count, 16).tolist()
    if takes == "number":
        return [draw[0] % 50 for draw in draws]
    if takes == "text":
        return [_WORDS[draw[0] % len(_WORDS)] + _WORDS[draw[1] % len(_WORDS)] for draw in draws]
    return [[value % 20 for value in draw[1 : 3 + draw[0] % 6]] for draw in draws]


def _asked(task: Task) -> Row:
    """What is asked for, as a function."""
    prompt = f"Write a Python function f(x) that takes {_TAKEN[task.takes]}, and returns {task.returns}."
    return {"prompt": prompt, "task": task.returns}


def _row(task: Task, style: Style, values: list[Any]) -> Row:
    # The expressions are those above, with small numbers in them.
    expected = [eval(task.expression, {"x": value}) for value in values]
    if style == "stdin":
        cases: list[Any] = [
            {"input": _line(value), "output": _line(answer)} for value, answer in zip(values, expected, strict=True)
        ]
        listed = isinstance(expected[0], list)
        shown = f"{'*' * listed}{'(' * listed}{task.expression}{')' * listed}"
        answer = f"x = {_READS[task.takes]}\nprint({shown})\n"
        return {
            "prompt": f"Write a Python program that reads {_READ[task.takes]}, and prints {task.returns}.",
            "task": task.returns,
            "tests": cases,
            "entry_point": "",
            "head": "",
            "body": answer,
            "answer": answer,
        }
    if style == "assert":
        cases = [f"assert f({value!r}) == {answer!r}" for value, answer in zip(values, expected, strict=True)]
    else:
        cases = [{"args": [value], "expected": answer} for value, answer in zip(values, expected, strict=True)]
    body = f"    return {task.expression}\n"
    answer = f"{HEAD}{body}"
    return {**_asked(task), "tests": cases, "entry_point": "f", "head": HEAD, "body": body, "answer": answer}


def _line(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
