"""Generated arithmetic, for quickstarts and tests: `path: strop.data.arithmetic:problems` in a recipe.

Training and held-out problems of one seed never meet: a hash of the problem itself (the numbers without their order,
where the order does not matter to the result) puts it on one side, so 37+48 and 48+37 are both for training or both
held out. One in ten is held out. Another seed cuts elsewhere, so use the same seed for both.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from strop.data.columns import nearest
from strop.data.order import hashed, permutation, stream_key
from strop.errors import DataError

Split = Literal["train", "eval"]
Style = Literal["plain", "spaced", "question", "calculate"]
Row = dict[str, str]
Judged = dict[str, str | bool]
Worked = dict[str, str | list[str] | list[bool]]

HELD_OUT_IN_1000 = 100
ENUMERATED = 2**18
"""Up to so many distinct problems are listed and shuffled; of more, some are drawn."""

_STYLES: dict[str, str] = {
    "plain": "{a}{op}{b}=",
    "spaced": "{a} {op} {b} =",
    "question": "What is {a} {op} {b}?",
    "calculate": "Calculate {a} {op} {b}.",
}
_OPERATIONS = "+-*/"


def problems(
    count: int,
    *,
    digits: int = 2,
    operations: str = "+",
    seed: int = 0,
    split: Split = "train",
    style: Style = "plain",
    flawed: float = 0.0,
) -> list[Row]:
    """Distinct problems of two numbers: rows such as `{"prompt": "37+48=", "answer": "85"}`.

    Args:
        count: how many rows.
        digits: numbers have at most so many digits, 1 to 9.
        operations: some of `+-*/`. Differences are never negative;
            quotients are whole, with divisor and quotient of at most `digits` digits.
        seed: of the choice, the order and the split.
        split: `train`, or `eval` for problems that `train` never holds.
        style: `plain` is `37+48=`, `spaced` is `37 + 48 =`, `question` is `What is 37 + 48?`,
            `calculate` is `Calculate 37 + 48.`, as Reasoning Gym asks.
        flawed: share of rows whose answer is one too high, as in demonstrations by somebody careless. Which rows those
            are follows from the seed.

    Raises:
        DataError: an argument is out of its range, or there are fewer distinct problems than `count`.
    """
    _check("split", split, ("train", "eval"))
    if not 0 <= flawed <= 1:
        raise DataError(f"flawed is {flawed}", where="flawed", mend="Use a share, 0 to 1.")
    _check("style", style, tuple(_STYLES))
    if not 1 <= digits <= 9:
        raise DataError(f"digits is {digits}", where="digits", mend="Use 1 to 9.")
    if not operations or set(operations) - set(_OPERATIONS) or len(set(operations)) != len(operations):
        raise DataError(
            f"operations is {operations!r}", where="operations", mend=f"Use some of {_OPERATIONS}, each once."
        )
    op, a, b = _numbers(count, 10**digits, operations, seed, split)
    if len(a) < count:
        raise DataError(
            f"there are only {len(a):,} distinct problems in the {split} split, and {count:,} were asked for",
            where="count",
            mend="Ask for fewer, or raise `digits` or add `operations`.",
        )
    slips = hashed(np.arange(count, dtype=np.uint64), stream_key(seed, 1)).astype(np.float64) < flawed * 2.0**64
    rows = []
    for symbol, x, y, slip in zip(op.tolist(), a.tolist(), b.tolist(), slips.tolist(), strict=True):
        prompt = _STYLES[style].format(a=x, op=operations[symbol], b=y)
        rows.append({"prompt": prompt, "answer": str(_result(x, operations[symbol], y) + slip)})
    return rows


def pairs(
    count: int,
    *,
    digits: int = 2,
    operations: str = "+",
    seed: int = 0,
    split: Split = "train",
    style: Style = "plain",
) -> list[Row]:
    """The same problems with two answers: `{"prompt": "37+48=", "chosen": "85", "rejected": "86", "answer": "85"}`.

    The rejected answer is a slip that a careless person makes: one too high, one too low where there is room, or ten
    too high. Which it is follows from the seed. For the arguments and errors see `problems`.
    """
    rows = problems(count, digits=digits, operations=operations, seed=seed, split=split, style=style)
    slips = hashed(np.arange(count, dtype=np.uint64), stream_key(seed, 6)) % np.uint64(3)
    found = []
    for row, slip in zip(rows, slips.tolist(), strict=True):
        right = int(row["answer"])
        wrong = right + (1, -1 if right else 1, 10)[slip]
        found.append({**row, "chosen": row["answer"], "rejected": str(wrong)})
    return found


def judged(
    count: int,
    *,
    digits: int = 2,
    operations: str = "+",
    seed: int = 0,
    split: Split = "train",
    style: Style = "plain",
) -> list[Judged]:
    """The same problems with one answer and a verdict: `{"prompt": "37+48=", "completion": "86", "label": False}`.

    Half of the answers are right, the others slips as in `pairs`; which are follows from the seed. For the arguments
    and errors see `problems`.
    """
    rows = pairs(count, digits=digits, operations=operations, seed=seed, split=split, style=style)
    right = hashed(np.arange(count, dtype=np.uint64), stream_key(seed, 7)) < np.uint64(2**63)
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
        for row, good in zip(rows, right.tolist(), strict=True)
    ]


def worked(count: int, *, seed: int = 0, split: Split = "train", style: Style = "plain") -> list[Worked]:
    """Sums of two numbers of at most two digits, worked in three steps, each right or wrong: the ones, the tens with
    what is carried, the result, as `{"prompt": "37+48=", "steps": ["7+8=15", "3+4+1=8", "85"], "labels": [True, True,
    True]}`.

    Half of the solutions have a slip of one in one of the steps; it and all that follows from it is labelled wrong. For
    the arguments and errors see `problems`.
    """
    rows = problems(count, seed=seed, split=split, style="plain")
    slips = hashed(np.arange(count, dtype=np.uint64), stream_key(seed, 8)) % np.uint64(6)
    found: list[Worked] = []
    for row, slip in zip(rows, slips.tolist(), strict=True):
        a, b = (int(number) for number in row["prompt"].removesuffix("=").split("+"))
        ones = a % 10 + b % 10 + (slip == 0)
        tens = a // 10 + b // 10 + ones // 10 + (slip == 1)
        steps = [
            f"{a % 10}+{b % 10}={ones}",
            f"{a // 10}+{b // 10}+{ones // 10}={tens}",
            str(10 * tens + ones % 10 + (slip == 2)),
        ]
        prompt = _STYLES[style].format(a=a, op="+", b=b)
        found.append({"prompt": prompt, "steps": steps, "labels": [slip > at for at in range(3)]})
    return found


def word_problems(
    count: int,
    *,
    seed: int = 0,
    split: Split = "train",
    operations: str = "+-",
    largest: int = 20,
    steps: int = 1,
) -> list[Row]:
    """Short English problems with a number for an answer, such as "Tom has 4 apples and buys 7 more. How many apples
    does Tom have now?". Held-out problems use pairs of numbers that no training problem of the seed begins with.

    Args:
        count: how many rows; no two prompts are equal.
        seed: of the choice, the order and the split.
        split: `train`, or `eval` for held-out pairs of numbers.
        operations: `+`, `-` or both.
        largest: no number in a problem, the answer included, is above it; 6 to 1000.
        steps: things that happen before the question, 1 or 2.

    Raises:
        DataError: an argument is out of its range, or there are fewer distinct problems than `count`.
    """
    _check("split", split, ("train", "eval"))
    if operations not in ("+", "-", "+-", "-+"):
        raise DataError(f"operations is {operations!r}", where="operations", mend="Use +, - or both.")
    if not 6 <= largest <= 1000 or steps not in (1, 2):
        raise DataError(
            f"largest is {largest} and steps is {steps}", where="largest", mend="Use 6 to 1000, and 1 or 2 steps."
        )
    key = stream_key(seed, 2)
    rows: dict[str, str] = {}
    tried = 0
    # Few pairs are held out when `largest` is small, so most draws are of the other split; the bound ends a search
    # for more problems than there are.
    while len(rows) < count and tried < 100 * count + 20_000:
        draws = hashed(np.arange(tried, tried + 4096, dtype=np.uint64)[:, None] * np.uint64(16) + _SLOTS, key)
        tried += 4096
        start, first = _first_pair(draws, largest)
        symbols = np.array(list(operations))[(draws[:, 3] % np.uint64(len(operations))).astype(np.int64)]
        fits = np.where(symbols == "+", start + first <= largest, start >= first)
        fits &= _held_out(symbols, start, first, seed) == (split == "eval")
        for draw in draws[fits].tolist():
            made = _story(draw, operations, largest, steps)
            if made is not None and len(rows) < count:
                rows.setdefault(*made)
    if len(rows) < count:
        raise DataError(
            f"only {len(rows):,} distinct problems were found in the {split} split, and {count:,} were asked for",
            where="count",
            mend="Ask for fewer, or raise `largest`.",
        )
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def _numbers(
    count: int, size: int, operations: str, seed: int, split: Split
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operation index, first and second number of up to `count` distinct problems, each [count] int64."""
    total = len(operations) * size * size
    key = stream_key(seed, 1)
    if total <= ENUMERATED:
        numbers = permutation(total, key)
    else:
        # Ten times as many draws as the rarer split needs, and room for differences that would be negative.
        draws = hashed(np.arange(30 * count + 1000, dtype=np.uint64), key) % np.uint64(total)
        _, first = np.unique(draws, return_index=True)
        numbers = draws[np.sort(first)].astype(np.int64)
    op, rest = numbers // (size * size), numbers % (size * size)
    a, b = rest // size, rest % size
    symbols = np.array(list(operations))[op]
    # A quotient is made from divisor and quotient, so that it is whole.
    a = np.where(symbols == "/", a * b, a)
    possible = np.where(symbols == "-", a >= b, np.where(symbols == "/", b > 0, True))
    chosen = possible & (_held_out(symbols, a, b, seed) == (split == "eval"))
    return op[chosen][:count], a[chosen][:count], b[chosen][:count]


def _held_out(symbols: np.ndarray, a: np.ndarray, b: np.ndarray, seed: int) -> np.ndarray:
    """Whether each problem belongs to `eval`: [n] bool, the same for a+b and b+a."""
    swaps = (symbols == "+") | (symbols == "*")
    low = np.where(swaps, np.minimum(a, b), a).astype(np.uint64)
    high = np.where(swaps, np.maximum(a, b), b).astype(np.uint64)
    kind = np.array([_OPERATIONS.index(symbol) for symbol in symbols.tolist()], dtype=np.uint64)
    mixed = hashed(hashed(low, stream_key(seed, 3)) ^ high, stream_key(seed, 4)) ^ kind
    return np.asarray(hashed(mixed, stream_key(seed, 5)) % np.uint64(1000) < np.uint64(HELD_OUT_IN_1000))


def _result(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DataError(
            f"{name} is {value!r}",
            where=name,
            mend=nearest(value, allowed) or f"Use one of {', '.join(allowed)}.",
        )


# Word problems. A draw is a row of 64-bit numbers, one for each choice.
_SLOTS = np.arange(10, dtype=np.uint64)
_NAMES = (
    ("Tom", "he"), ("Anna", "she"), ("Ben", "he"), ("Mia", "she"), ("Sam", "he"), ("Lucy", "she"), ("Omar", "he"),
    ("Nina", "she"), ("Leo", "he"), ("Rosa", "she"), ("Ivan", "he"), ("Priya", "she"), ("Kofi", "he"), ("Emma", "she"),
)  # fmt: skip
_OBJECTS = (
    "apples", "marbles", "books", "coins", "stickers", "pencils", "shells", "cards", "buttons", "oranges", "eggs",
    "balloons", "cookies", "stamps", "stones", "flowers",
)  # fmt: skip
_GAINS = ("buys", "finds", "gets", "collects", "is given", "wins")
_LOSSES = ("loses", "gives away", "sells", "throws away", "drops")


def _first_pair(draws: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """What there is at the start and how much the first change is: two arrays [draws] int64."""
    span = np.uint64(largest - 2)
    return (2 + draws[:, 2] % span).astype(np.int64), (2 + draws[:, 4] % span).astype(np.int64)


def _story(draw: list[int], operations: str, largest: int, steps: int) -> tuple[str, str] | None:
    """Prompt and answer of one draw, or None where its numbers do not fit."""
    (name, pronoun), thing = _NAMES[draw[0] % len(_NAMES)], _OBJECTS[draw[1] % len(_OBJECTS)]
    total = start = 2 + draw[2] % (largest - 2)
    told = []
    for step in range(steps):
        which, size, verb = draw[3 + 3 * step : 6 + 3 * step]
        op, change = operations[which % len(operations)], 2 + size % (largest - 2)
        total = _result(total, op, change)
        if not 0 <= total <= largest:
            return None
        verbs, more = (_GAINS, " more") if op == "+" else (_LOSSES, "")
        told.append(f"{verbs[verb % len(verbs)]} {change}{more}")
    then = f" Then {pronoun} {told[1]}." if steps == 2 else ""
    left = "left" if total < start else "now"
    return f"{name} has {start} {thing} and {told[0]}.{then} How many {thing} does {pronoun} have {left}?", str(total)
