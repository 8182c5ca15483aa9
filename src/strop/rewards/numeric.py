"""`numeric`: a number in the completion equals the answer.

What counts as a number, strictly and without evaluating anything:

- integers and decimals: `12`, `12.0`, `.5`, `007`; thousands by commas in groups of three: `1,234,567.89`. A comma that
  does not group separates two numbers (`1,2` is 1 and 2), so a list of three-digit numbers needs spaces.
- a sign directly before it: `-`, `+` and the Unicode minus signs, unless it joins two things (`5-3` and `10-12` hold no
  negative number).
- a currency sign ($ € £ ¥) before it and a percent sign after it are ignored: `50%` is 50, never 0.5.
- powers of ten: `1.5e-3`; fractions of integers: `3/4`. A division by zero is a number that equals nothing.
- a full stop or comma after it is punctuation: `12.` is 12.

Not a number: digits glued to a letter before them (`x2`), and anything with too many points or slashes (`1.2.3`,
`2024/01/02`). Units may follow (`12cm`). Words, mixed numbers (`1 1/2`), `10^3` and LaTeX are read as the plain numbers
in them. A number of more than 400 digits, or with an exponent beyond ±400, is a number that equals nothing: it is never
converted, so that hostile text costs time in proportion to its length only.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from strop.config.rewards import NumericVerifier
from strop.rewards.failures import shorten
from strop.rewards.protocol import Completed, Verdict

MAX_DIGITS = 400
"""Digits, and size of the exponent, above which a number is not converted."""
MANY_NUMBERS = 32
"""More different numbers than this in one completion are reported: a policy may print every candidate."""

_MINUS = "-\u2212\ufe63\uff0d"
_SIGN = rf"\{_MINUS}"
# A sign, a currency sign, then a run of digits and what may hold a number together. Every quantifier over the text is
# possessive and every failure is decided within two characters, so the search is linear.
_CANDIDATE = re.compile(
    rf"(?:(?<![A-Za-z0-9_)\]}}%{_SIGN}])(?P<sign>[+{_SIGN}]))?"
    rf"(?:[$€£¥](?P<inner>[{_SIGN}])?)?"
    r"(?:(?<![A-Za-z0-9.])(?=\.[0-9])|(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)(?<![0-9]\.)(?=[0-9]))"
    rf"(?P<run>[0-9.][0-9.,/]*+(?:(?<=[0-9])[eE][+{_SIGN}]?[0-9]++)?)"
)
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)"
_SIMPLE = re.compile(
    rf"(?P<whole>{_INTEGER})?(?:\.(?P<part>[0-9]*))?(?:[eE](?P<exponent>[+{_SIGN}]?[0-9]++))?"
    rf"|(?P<above>{_INTEGER})/(?P<below>{_INTEGER})"
)


def find_numbers(text: str) -> Iterator[str]:
    """The spellings of the numbers in a text, from left to right, without currency signs and punctuation."""
    for found in _CANDIDATE.finditer(text):
        run = found["run"].rstrip(".,/")
        sign = "-" if (found["sign"] or "+") != "+" or found["inner"] else ""
        if _SIMPLE.fullmatch(run):
            yield sign + run
            continue
        for piece in run.split(","):
            piece = piece.rstrip("./")
            if piece and _SIMPLE.fullmatch(piece):
                yield sign + piece
            sign = ""


def parse_number(spelling: str) -> Fraction | None:
    """The exact value of one spelling from `find_numbers`; None when it is too long or divides by zero."""
    found = _SIMPLE.fullmatch(spelling.removeprefix("-"))
    if found is None:
        return None
    whole, part, above, below = ((found[name] or "").replace(",", "") for name in ("whole", "part", "above", "below"))
    if max(len(whole) + len(part), len(above), len(below)) > MAX_DIGITS:
        return None
    if above:
        if not int(below):
            return None
        value = Fraction(int(above), int(below))
    else:
        power = _exponent(found["exponent"] or "0")
        if power is None:
            return None
        value = Fraction(int((whole + part) or "0"), 10 ** len(part)) * Fraction(10) ** power
    return -value if spelling.startswith("-") else value


def _exponent(spelling: str) -> int | None:
    digits = spelling.lstrip("+" + _MINUS).lstrip("0")
    if len(digits) > len(str(MAX_DIGITS)) or int(digits or "0") > MAX_DIGITS:
        return None
    return -int(digits or "0") if spelling[0] in _MINUS else int(digits or "0")


def parse_answer(answer: Any) -> Fraction:
    """The exact value of a reference answer: a number, or a text that holds exactly one.

    Raises:
        ValueError: it is neither; the message says what was found.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    if isinstance(answer, bool) or not isinstance(answer, str | numbers.Number):
        raise ValueError(f"the answer is a {type(answer).__name__}; a number or a text with one is needed")
    found = list(find_numbers(str(answer)))
    shown = shorten(repr(answer), 80)
    if len(found) != 1:
        raise ValueError(f"the answer {shown} holds {len(found) or 'no'} numbers; exactly one is needed")
    value = parse_number(found[0])
    if value is None:
        raise ValueError(f"the answer {shown} divides by zero or has more than {MAX_DIGITS} digits")
    return value


def numbers_equal(value: Fraction, answer: Fraction, tolerance: float) -> bool:
    """Whether two numbers differ by at most `tolerance`, absolutely or relative to the larger one."""
    bound = Fraction(tolerance) * max(Fraction(1), abs(value), abs(answer))
    return abs(value - answer) <= bound


class Numeric:
    """1 if the number taken from the completion equals the answer, else 0, also when there is no number.

    An answer that is no number is a verifier error. `only` counts numbers as they stand: `12 = 12` holds two. More than
    32 differently spelled numbers in a completion are told in the verdict's detail.
    """

    def __init__(self, settings: NumericVerifier) -> None:
        self.name = settings.name or settings.kind
        self.settings = settings

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item) for item in completed]

    def _verdict(self, item: Completed) -> Verdict:
        try:
            answer = parse_answer(item.answer)
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        taken, count, different = self._take(item.completion)
        if taken is None:
            return Verdict(0.0, detail="no number in the completion")
        if self.settings.take == "only" and count > 1:
            return Verdict(0.0, detail="more than one number in the completion")
        value = parse_number(taken)
        score = float(value is not None and numbers_equal(value, answer, self.settings.tolerance))
        if different > MANY_NUMBERS:
            return Verdict(score, detail=f"more than {MANY_NUMBERS} different numbers in the completion")
        return Verdict(score)

    def _take(self, text: str) -> tuple[str | None, int, int]:
        """The number that counts, how many there are, and how many different ones (counted to 33 only)."""
        taken: str | None = None
        count = 0
        seen: set[str] = set()
        for spelling in find_numbers(text):
            count += 1
            if len(seen) <= MANY_NUMBERS:
                seen.add(spelling)
            if taken is None or self.settings.take == "last":
                taken = spelling
            if self.settings.take == "only" and count > 1:
                break
        return taken, count, len(seen)
