"""Answers to mathematical questions that are right or wrong by construction, and poison among them.

A value is written down as the reference answer, and it or a near miss is written once more, in another way, into a
completion.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path


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


def items(count: int, every: int, canary: Path | None) -> Iterator[Item]:
    """So many completions, the same ones each time; with a canary, one in `every` is poison."""
    r = random.Random(0)
    bad = [] if canary is None else poisons(canary)
    for number in range(count):
        kind = r.choices(KINDS, WEIGHTS)[0]
        gold, answer, right = kind(r)
        completion = completions(r, answer, kind is words)
        if bad and number % every == every - 1:
            poison = bad[number // every % len(bad)]
            yield Item("poison", gold, r.choice([poison, rf"\boxed{{{poison}}}", f"The answer is {poison}"]), None)
        else:
            yield Item(kind.__name__, gold, completion, right)
