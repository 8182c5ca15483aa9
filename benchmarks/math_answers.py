"""The math verifier: 10,000 answers a run of worker processes reads in a second, with poison in every hundred.

Every answer is right or wrong by construction: a value is written down as the reference answer, and it or a near miss
is written once more, in another way, into a completion. Every hundredth completion is poison: it is of astronomic size,
nested without end, a megabyte long, or a program that would make a file. The verifier must call every clean answer what
it is, no poisoned one right, and no item may take longer than the time-out. `poisoned` and `clean` are run in turn,
through the pool of workers that a training run uses.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import measure

EVERY = 100
"""One in so many is poison."""


@dataclass(frozen=True)
class Item:
    """A completion with its reference answer. right: what the verifier must say; None for poison, never right."""

    kind: str
    gold: str
    completion: str
    right: bool | None


# --- answers ---------------------------------------------------------------------------------------------------------

Pair = tuple[str, str, bool]
"""The reference answer, another answer, and whether they are equal."""


def integers(r: random.Random) -> Pair:
    """Signs, thousands, powers; a digit changed."""
    value, right = r.randint(-99_999, 99_999), r.random() < 0.5
    other = value if right else value + r.choice([-1000, -10, -1, 1, 10, 1000])
    spellings = [
        f"{other}",
        f"{other:,}",
        f"{other}.0",
        f"{other:,}".replace(",", "{,}"),
        f"{other:,}".replace(",", r",\!"),
    ]
    return f"{value}", r.choice(spellings), right


def fractions(r: random.Random) -> Pair:
    """In and out of LaTeX, not in lowest terms, mixed; turned over or with another numerator."""
    above, below, right = r.randint(1, 40), r.randint(2, 40), r.random() < 0.5
    value = Fraction(above, below)
    wrong = [Fraction(above + 1, below), Fraction(above, below + 1), -value]
    other, scale = value if right else r.choice(wrong), r.randint(1, 3)
    sign, n, d = "-" if other < 0 else "", abs(other.numerator) * scale, other.denominator * scale
    spellings = [
        f"{sign}{n}/{d}",
        rf"{sign}\frac{{{n}}}{{{d}}}",
        rf"{sign}\dfrac{{{n}}}{{{d}}}",
        rf"\frac{{{sign}{n}}}{{{d}}}",
    ]
    if n > d and n % d:
        spellings.append(rf"{sign}{n // d}\frac{{{n % d}}}{{{d}}}")
    return rf"\frac{{{above}}}{{{below}}}", r.choice(spellings), right


def decimals(r: random.Random) -> Pair:
    """Against fractions of a power of ten; the point moved or a digit changed."""
    cents, right = r.randint(1, 9999), r.random() < 0.5
    other = cents if right else r.choice([cents * 10, cents + 1, -cents])
    spellings = [f"{other / 100:.2f}", f"{other / 100:.4f}", rf"\frac{{{other}}}{{100}}", f"{other}/100"]
    return f"{cents / 100:.2f}", r.choice(spellings), right


def percentages(r: random.Random) -> Pair:
    """With the sign, in words, as a share; ten times too large."""
    value, right = r.randint(1, 99), r.random() < 0.5
    other = value if right else value + 100
    return (
        rf"{value}\%",
        r.choice([rf"{other}\%", f"{other} percent", f"{other / 100:.2f}", rf"\frac{{{other}}}{{100}}"]),
        right,
    )


def units(r: random.Random) -> Pair:
    """Lengths, money, angles."""
    value, right = r.randint(2, 500), r.random() < 0.5
    other = value if right else value + r.choice([-1, 1, 7])
    spellings = [
        rf"{other}\text{{ cm}}",
        f"{other} cm",
        rf"\${other}",
        rf"{other}^\circ",
        rf"{other}\text{{ square units}}",
        f"{other} apples",
    ]
    return f"{value}", r.choice(spellings), right


def roots(r: random.Random) -> Pair:
    """Square factors in and out of the root."""
    factor, square, right = r.randint(2, 9), r.choice([2, 3, 5, 6, 7, 10]), r.random() < 0.5
    inside = factor * factor * square + (0 if right else r.choice([1, -1, square]))
    spellings = [rf"\sqrt{{{inside}}}", rf"\frac{{\sqrt{{{4 * inside}}}}}{{2}}", f"sqrt({inside})"]
    return rf"{factor}\sqrt{{{square}}}", r.choice(spellings), right


def multiples_of_pi(r: random.Random) -> Pair:
    """As a product or a quotient."""
    above, below, right = r.randint(1, 12), r.randint(2, 9), r.random() < 0.5
    other = above if right else above + 1
    spellings = [
        rf"{other}\pi/{below}",
        rf"\frac{{{other}\pi}}{{{below}}}",
        rf"\frac{{{other}}}{{{below}}}\pi",
        rf"\pi \cdot \frac{{{other}}}{{{below}}}",
    ]
    return rf"\frac{{{above}\pi}}{{{below}}}", r.choice(spellings), right


def intervals(r: random.Random) -> Pair:
    """Brackets, layout, decimals, inequalities; an end that is open, or another one."""
    low, right = r.randint(-20, 20), r.random() < 0.5
    high = low + r.randint(1, 20)
    opening, closing = r.choice("(["), r.choice(")]")
    a, b, end = low, high, closing
    if not right and r.random() < 0.5:
        end = ")" if closing == "]" else "]"
    elif not right:
        b += 1
    signs = ("<" if opening == "(" else r"\le", "<" if end == ")" else r"\le")
    spellings = [
        f"{opening}{a}, {b}{end}",
        rf"\left{opening}{a},{b}\right{end}",
        rf"x \in {opening}{a}.0,{b}{end}",
        f"{a} {signs[0]} x {signs[1]} {b}",
    ]
    return f"{opening}{low},{high}{closing}", r.choice(spellings), right


def unions(r: random.Random) -> Pair:
    """In any order."""
    low, right = r.randint(-9, 9), r.random() < 0.5
    parts = [rf"(-\infty, {low}]", rf"({low + 3}, {low + 5 + (not right)})", rf"[{low + 9}, \infty)"]
    r.shuffle(parts)
    return rf"(-\infty,{low}]\cup({low + 3},{low + 5})\cup[{low + 9},\infty)", r" \cup ".join(parts), right


def sets(r: random.Random) -> Pair:
    """In any order, with and without braces; an element more, less or other."""
    values, right = r.sample(range(-30, 30), r.randint(2, 5)), r.random() < 0.5
    other = r.sample(values, len(values))
    if not right:
        other = r.choice([other[1:], [*other, 99], [99, *other[1:]]])
    body = ", ".join(map(str, other))
    return (
        ",".join(map(str, values)),
        r.choice([rf"\{{{body}\}}", rf"\left\{{{body}\right\}}", body]) if len(other) > 1 else body,
        right,
    )


def tuples(r: random.Random) -> Pair:
    """In their order."""
    values, right = r.sample(range(-30, 30), r.randint(2, 4)), r.random() < 0.5
    other = list(values) if right else r.choice([values[::-1], [*values[:-1], 99]])
    body = ", ".join(f"{v}" if r.random() < 0.7 else rf"\frac{{{2 * v}}}{{2}}" for v in other)
    return f"({', '.join(map(str, values))})", r.choice([f"({body})", rf"\left({body}\right)"]), right


def equations(r: random.Random) -> Pair:
    """The value with its variable, or without; another value, or another variable."""
    value, right = r.randint(-50, 50), r.random() < 0.5
    wrong = [f"x = {value + 1}", f"y = {value}", f"x = -{abs(value) + 1}"]
    return (
        f"x={value}",
        r.choice([f"x = {value}", f"{value}", rf"x = \frac{{{3 * value}}}{{3}}"] if right else wrong),
        right,
    )


def polynomials(r: random.Random) -> Pair:
    """Multiplied out and factored."""
    a, b, right = r.randint(1, 9), r.randint(1, 9), r.random() < 0.5
    constant = a * b + (0 if right else r.choice([-1, 1]))
    spellings = [f"x^2+{a + b}x+{constant}", f"{constant} + {a + b}x + x^{{2}}", f"x(x+{a + b})+{constant}"]
    return f"(x+{a})(x+{b})", r.choice(spellings), right


def words(r: random.Random) -> Pair:
    """Cities; anagrams are wrong."""
    names = {"Paris": "Pairs", "Rome": "More", "Lima": "Mail", "Oslo": "Solo", "Delhi": "Hiled"}
    name, right = r.choice(list(names)), r.random() < 0.5
    other = name if right else r.choice([names[name], "Madrid"])
    return name, r.choice([rf"\text{{{other}}}", other, other.lower()]), right


KINDS: list[Callable[[random.Random], Pair]] = [
    integers, fractions, decimals, percentages, units, roots, multiples_of_pi, intervals, unions, sets, tuples,
    equations, polynomials, words,
]  # fmt: skip
# Half of the answers to mathematical questions that people ask are whole numbers.
WEIGHTS = [12, *[2] * 5, *[1] * 8]


def completions(r: random.Random, answer: str, is_words: bool) -> str:
    """A completion that ends in an answer, most with false leads before it."""
    lead = r.choice(
        [
            "",
            "First I got 17, which is wrong.\n",
            r"One may think of \boxed{-3}, but no. ",
            "Let $n = 12$. Then 2 + 2 = 4.\n",
        ]
    )
    ends = [
        rf"So the result is \boxed{{{answer}}}.",
        rf"\[\boxed{{{answer}}}\]",
        rf"Therefore $\boxed{{{answer}}}$ is it.",
    ]
    if r"\boxed" not in lead:
        ends += [f"The answer is ${answer}$." if not is_words else f"The answer is {answer}.", f"#### {answer}"]
    return lead + r.choice(ends)


# --- poison ----------------------------------------------------------------------------------------------------------


def poisons(canary: Path) -> list[str]:
    """Answers that must not be computed, or not be executed."""
    touch = f"__import__('os').system('touch {canary}')"
    large = [
        "10^{10^{10}}",
        "10^10^10",
        "10**10**10",
        "9^{9^{9^9}}",
        "((9!)!)!",
        "99999999!",
        "10^{-10^{9}}",
        r"\binom{10^9}{5\times 10^8}",
    ]
    deep = [
        "(" * 500_000 + ")" * 500_000,
        "{" * 500_000 + "}" * 500_000,
        "[" * 1_000_000,
        "((((((((((((1))))))))))))",
        r"\sqrt{" * 200 + "2" + "}" * 200,
    ]
    programs = [
        touch,
        f"().__class__.__base__.__subclasses__()[0] or {touch}",
        f"open('{canary}','w')",
        rf"\text{{{touch}}}",
        f"$({touch})$",
    ]
    long = [
        "1+" * 500_000 + "1",
        "9" * 1_000_000,
        "1," * 400_000,
        "$" * 1_000_000,
        "\\" * 1_000_000,
        "answer is " * 100_000,
    ]
    slow = [r"\prod_{k=1}^{100000000} k", r"(99999^{99999})^{99999}", "(x+y+z+1)^{60}", r"\int_0^1 x^x \sin^{9} x dx"]
    return [*large, *deep, *programs, *long, *slow]


def items(count: int, canary: Path | None) -> Iterator[Item]:
    """So many completions, the same ones each time; with a canary, every hundredth is poison."""
    r = random.Random(0)
    bad = [] if canary is None else poisons(canary)
    for number in range(count):
        kind = r.choices(KINDS, WEIGHTS)[0]
        gold, answer, right = kind(r)
        completion = completions(r, answer, kind is words)
        if bad and number % EVERY == EVERY - 1:
            poison = bad[number // EVERY % len(bad)]
            yield Item("poison", gold, r.choice([poison, rf"\boxed{{{poison}}}", f"The answer is {poison}"]), None)
        else:
            yield Item(kind.__name__, gold, completion, right)


# --- the measurement -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Verify; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--answers", type=int, default=10_000, help="completions of each side")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds that one may take")
    options = parser.parse_args(argv)
    if options.smoke:
        options.answers, options.timeout, options.repeats = 3000, 2.0, 1
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        sides = {"poisoned": lambda: verify(options, canary), "clean": lambda: verify(options, None)}
        runs = measure.interleaved(sides, options.repeats)
        executed = canary.exists()
    numbers: dict[str, Any] = {"workers": options.threads, "timeout": options.timeout, "executed": executed}
    for side, found in runs.items():
        rates = [one["answers_per_second"] for one in found]
        numbers[side] = {**found[-1], "answers_per_second": measure.median(rates), "of_each_repeat": rates}
    measure.write("math_answers", numbers, options)
    return numbers


def verify(options: argparse.Namespace, canary: Path | None) -> dict[str, Any]:
    """Score all completions at once, as workers take them."""
    from strop.config.rewards import RewardSettings
    from strop.rewards.build import build_scorer
    from strop.rewards.process import Worker
    from strop.rewards.protocol import Completed, Reward

    settings = {"verifiers": [{"kind": "math", "timeout": options.timeout}], "workers": options.threads, "retries": 0}
    scorer = build_scorer(RewardSettings.model_validate(settings))
    given = list(items(options.answers, canary))
    watch = Watch(Worker, options.timeout)

    async def work() -> tuple[list[Reward], float]:
        try:
            # Workers that are there and have imported what they need, as after a run's first step.
            await scorer.score([Completed("", r"\boxed{x+1}", answer="1+x")] * 16 * options.threads)
            watch.begin()
            started = time.perf_counter()
            rewards = await scorer.score([Completed("", item.completion, answer=item.gold) for item in given])
            return rewards, time.perf_counter() - started
        finally:
            await scorer.close()

    with watch:
        rewards, seconds = asyncio.run(work())
    poisoned = [reward for item, reward in zip(given, rewards, strict=True) if item.right is None]
    wrong = [
        (item, reward)
        for item, reward in zip(given, rewards, strict=True)
        if item.right is not None and (reward.status != "ok" or reward.total != float(item.right))
    ]
    return {
        "answers": len(given),
        "of_kinds": dict(Counter(item.kind for item in given)),
        "right_by_construction": sum(item.right is True for item in given),
        "misjudged": len(wrong),
        "first_misjudged": [[item.gold, item.completion, item.right, str(reward.total)] for item, reward in wrong[:5]],
        "poisoned": len(poisoned),
        "poisoned_called_right": sum(reward.status == "ok" and reward.total > 0 for reward in poisoned),
        "poisoned_statuses": dict(Counter("wrong" if one.status == "ok" else one.status for one in poisoned)),
        "seconds": seconds,
        "answers_per_second": len(given) / seconds,
        "longest_item_seconds": max(watch.seconds),
        "workers_replaced": watch.started - options.threads,
    }


class Watch:
    """Times each item while it is entered: how long the run waits for a worker's answer to it.

    started: workers that were started.
    """

    def __init__(self, worker: Any, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._answer, self._init = worker.answer, worker.__init__
        self.seconds: list[float] = []
        self.started = 0

    def begin(self) -> None:
        """Forget what was timed."""
        self.seconds = []

    def __enter__(self) -> None:
        def answer(worker: Any, timeout: float) -> Any:
            started = time.perf_counter()
            try:
                return self._answer(worker, timeout)
            finally:
                if timeout == self._timeout:  # Others are for starting a worker.
                    self.seconds.append(time.perf_counter() - started)

        def init(worker: Any, **arguments: Any) -> None:
            self.started += 1
            self._init(worker, **arguments)

        self._worker.answer, self._worker.__init__ = answer, init

    def __exit__(self, *_: object) -> None:
        self._worker.answer, self._worker.__init__ = self._answer, self._init


if __name__ == "__main__":
    main()
