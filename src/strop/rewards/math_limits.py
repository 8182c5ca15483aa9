"""Answers that are not computed, because it would take for ever. Whatever slips through is ended by the time-out."""

from __future__ import annotations

import re

from strop.rewards.math_text import BRACKET

LONGEST = 1000
"""Characters of an answer that is read as mathematics; a longer one equals only what is written alike."""
DEEPEST = 8
"""Nesting of brackets that is read: the parser's time doubles with every two levels."""
DEEPEST_BRACES = 40
EXPONENT = 100_000
FACTORIAL = 10_000
"""Largest exponent and largest factorial of numbers that are computed."""
POWER_OF_A_SUM = 20
"""Largest power of a sum with symbols, which comparing multiplies out."""

_NUMERIC = re.compile(r"(?:[-+*/^!(){}\s.,\d]|\\cdot|\\times|\\frac)+")
_SMALL_TOWER = re.compile(r"\(?\{?\s*(\d{1,2})\s*\^\s*\{?\s*(\d)\s*\}?\s*\}?\)?")


def too_large(text: str) -> str:
    """Why a cleaned answer is not computed: it is too long, nested too deeply, or of astronomic size. Empty if it is.

    This catches what is written often; whatever else takes for ever is ended by the time-out.
    """
    if len(text) > LONGEST:
        return f"it has more than {LONGEST} characters"
    depth = braces = 0
    for found in BRACKET.finditer(text):
        step = 1 if found[0][-1] in "([{" else -1
        if found[0] in "{}":
            braces += step
        else:
            depth += step
        if depth > DEEPEST or braces > DEEPEST_BRACES:
            return "its brackets are nested too deeply"
    for found in re.finditer(r"\^", text):
        if not _small_exponent(_operand(text, found.end())):
            return "it has an exponent too large to compute"
        if _is_sum(text[: found.start()].rstrip()) and _above(_operand(text, found.end()).strip("{( "), POWER_OF_A_SUM):
            return "it has a sum to a power too large to multiply out"
    for found in re.finditer(r"!", text):
        argument = re.search(r"(\d[\d,.]*|[)}])\s*$", text[: found.start()])
        nested = argument is not None and argument[1] in (")", "}") and "!" in text[: found.start()]
        if nested or (argument is not None and _above(argument[1], FACTORIAL)):
            return "it has a factorial too large to compute"
    for found in re.finditer(r"\\d?t?binom\s*\{([^{}]*)\}", text):
        if not found[1].strip().isalpha() and (_above(found[1], FACTORIAL) or "^" in found[1]):
            return "it has a binomial coefficient too large to compute"
    return ""


def _operand(text: str, start: int) -> str:
    """What an exponent is: a group in brackets, or a number or letter."""
    rest = text[start:].lstrip()
    if rest[:1] in ("{", "("):
        depth = 0
        for found in BRACKET.finditer(rest):
            depth += 1 if found[0][-1] in "([{" else -1
            if depth == 0:
                return rest[: found.end()] + _operand_of_tower(rest[found.end() :])
        return rest
    number = re.match(r"[-+]?\d[\d,.]*|\\?\w+", rest)
    return "" if number is None else number[0] + _operand_of_tower(rest[number.end() :])


def _is_sum(before: str) -> bool:
    """Whether a text ends in brackets that hold letters and a plus or minus."""
    if not before.endswith(")"):
        return False
    depth = 0
    for found in reversed(list(BRACKET.finditer(before))):
        depth += 1 if found[0][-1] in ")]}" else -1
        if depth == 0:
            inside = re.sub(r"\\[a-zA-Z]+", "", before[found.end() :])
            return bool(re.search(r"[a-zA-Z]", inside) and re.search(r"[-+]", inside))
    return False


def _operand_of_tower(rest: str) -> str:
    """The next storey of `a^b^c`."""
    return rest[:1] + _operand(rest, 1) if rest.startswith("^") else ""


def _small_exponent(exponent: str) -> bool:
    """Whether a power with it can be computed: letters stay symbols, a number must be small."""
    if not _NUMERIC.fullmatch(exponent):
        # Numbers among letters are multiplied or added; powers of numbers among them are looked at by themselves.
        return all(not _above(number, EXPONENT) for number in re.findall(r"\d[\d,.]*", exponent))
    if tower := _SMALL_TOWER.fullmatch(exponent):
        return int(tower[1]) ** int(tower[2]) <= EXPONENT
    if "^" in exponent or "!" in exponent:
        return False
    return all(not _above(number, EXPONENT) for number in re.findall(r"\d[\d,.]*", exponent))


def _above(number: str, bound: int) -> bool:
    digits = re.sub(r"\D.*", "", number.replace(",", "")).lstrip("0")
    return len(digits) > len(str(bound)) or int(digits or "0") > bound
