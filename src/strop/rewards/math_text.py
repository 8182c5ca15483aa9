"""Mathematical answers as text: cleaned of what does not matter, and read where no algebra is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from strop.rewards.numeric import parse_number

_SPELLINGS = {
    "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u2013": "-", "\u00a0": " ", "**": "^", "°": "",
    "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "′": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
_REPLACED = re.compile("|".join(map(re.escape, sorted(_SPELLINGS, key=len, reverse=True))))
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])\.?|(?<!\\)\\[,;:! ]|\\q?quad|~"
)
_THIN = re.compile(r"(?<=[\d,])\s*(?<!\\)\\[,;:! ]\s*(?=\d{3})")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|\\circ(?![a-zA-Z])")
_ROOT = re.compile(r"\\sqrt\s+(\w)")
_ROOT_SIGN = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|\w))")
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_OUTER_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent\b|\\text\{\s*percent\s*\})$")
_ASSIGNED = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?)\s*(?:=|\\in(?![a-zA-Z]))\s*(?=\S)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
# What may follow a number without changing it.
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|[A-Za-z]{3,}|cm|mm|km|kg|mg|ft|in|mi|lb|oz|ml|mL|hr|am|pm|m|g|s|L)"
    r"(?:\s*\^\s*\{?[23]\}?)?(?:[\s/]+(?:[A-Za-z]+)(?:\^\{?[23]\}?)?)*"
)
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*(-?[\d,.]+)\s*\}\s*\{\s*(-?[\d,.]+)\s*\}|(\d)\s*(\d))")
_POWER_OF_TEN = re.compile(r"(-?[\d,.]+)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*(-?\d+)\s*\}|(-?\d+))")
_PLAIN = re.compile(r"[-+]?(?:[\d,.]*\d[\d,.]*(?:[eE][-+]?\d+)?|[\d,]+/[\d,]+)")


@dataclass(frozen=True)
class Number:
    """value: exact. decimal: whether it was written with a fractional part in decimals, which may have been rounded.
    percent: whether a percent sign followed it."""

    value: Fraction
    decimal: bool
    percent: bool


@dataclass(frozen=True)
class Collection:
    """Parts between brackets, such as `(1, 2]`; a list without brackets is a set."""

    brackets: str
    parts: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.brackets != "{}"


def clean(text: str) -> str:
    """An answer without layout, dollars, units of angle, emphasis and the full stop."""
    text = _ROOT_SIGN.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text.strip("* \n"))
    text = _REPLACED.sub(lambda found: _SPELLINGS[found[0]], text)
    text = _THIN.sub("", text)
    text = _LAYOUT.sub(" ", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac"))
    text = _DEGREES.sub(" ", text.replace("{,}", ",").replace(r"\$", ""))
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", _ROOT.sub(r"\\sqrt{\1}", text))
    for mark in (r"\(", r"\)", r"\[", r"\]", "$"):
        text = text.replace(mark, " ")
    text = " ".join(text.split()).rstrip(" .,;").strip()
    if (whole := _OUTER_TEXT.fullmatch(text)) and not _WORDS.fullmatch(whole[1].strip()):
        text = whole[1].strip()
    for _ in range(10):
        inner = _unwrapped(text)
        if inner is None:
            break
        text = inner
    return text


def _unwrapped(text: str) -> str | None:
    """What is in brackets or braces that hold the whole text and no list; None if none do."""
    if len(text) > 2 and text[0] + text[-1] in ("()", "{}"):
        inner = text[1:-1].strip()
        if closes_at_the_end(text) and len(_split(inner, ",")) == 1:
            return inner
    return None


def written_alike(a: str, b: str) -> bool:
    """Whether two cleaned answers differ in white space and superfluous braces only."""
    return _bare(a) == _bare(b)


def _bare(text: str) -> str:
    return re.sub(r"\{(\w)\}", r"\1", "".join(text.split()))


def as_words(text: str) -> str | None:
    """A cleaned answer that consists of words, in lower case; None for anything else.

    A parser would take a word for a product of its letters, whose order does not matter. Up to three letters may well
    be one.
    """
    inner = _OUTER_TEXT.sub(r"\1", text).strip(" .,;()")
    if not _WORDS.fullmatch(inner):
        return None
    is_text = inner != text.strip(" .,;()")
    if not is_text and inner.lower() not in ("yes", "no") and not any(len(word) > 3 for word in inner.split()):
        return None
    return " ".join(inner.casefold().split())


def plain_words(text: str) -> str:
    """Any cleaned answer, to be compared with `as_words`."""
    return " ".join(_OUTER_TEXT.sub(r"\1", text).strip(" .,;()").casefold().split())


def assigned(text: str) -> tuple[str, str]:
    """The variable before an equals sign or "element of", and what comes after; the variable is empty without one."""
    found = _ASSIGNED.match(text)
    if found is None or re.search(r"(?<![<>!\\])=", text[found.end() :]):
        return "", text
    return found[1], text[found.end() :].strip()


def read_number(text: str) -> Number | None:
    """A cleaned answer that is a number in one of the usual spellings, with a unit or without."""
    percent = _PERCENT.search(text)
    bare = text[: percent.start()].strip() if percent else text
    number = _read(bare)
    if number is None and percent is None:
        head = re.match(r"(?:[-+]?[\d.,]+(?:/\d+)?|-?\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})", bare)
        # A letter right after a number is a variable; a unit stands apart, or is text.
        if (
            head
            and re.match(r"\s|\\(?:text|mathrm|mbox)", bare[head.end() :])
            and _UNIT.fullmatch(bare[head.end() :].strip())
        ):
            number = _read(head[0].rstrip(".,"))
    return None if number is None else Number(number[0], number[1], percent is not None)


def _read(text: str) -> tuple[Fraction, bool] | None:
    """Value, and whether it is a decimal with a fractional part."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    text = re.sub(r"\s*/\s*", "/", text[1:].strip() if text[:1] in ("+", "-") else text)
    if _PLAIN.fullmatch(text) and (value := parse_number(text)) is not None:
        return sign * value, value.denominator != 1 and "/" not in text
    if power := _POWER_OF_TEN.fullmatch(text):
        value = parse_number(f"{power[1]}e{power[2] or power[3]}")
        return None if value is None else (sign * value, value.denominator != 1)
    found = _FRACTION.search(text)
    if found is None or found.end() != len(text):
        return None
    above, below = (parse_number(found[a] or found[b]) for a, b in ((1, 3), (2, 4)))
    whole = text[: found.start()].strip()
    if above is None or below is None or not below or not (whole == "" or whole.isdecimal()) or len(whole) > 300:
        return None
    value = above / below
    if whole and (value < 0 or value >= 1):
        return None  # a product, not a mixed number
    return sign * (int(whole or 0) + value), False


def read_collection(text: str) -> Collection | None:
    """A cleaned answer that is a list in brackets, or without any; None for anything else."""
    opening, closing = "", ""
    inner = text
    if text.startswith(r"\{") and text.endswith(r"\}"):
        opening, closing, inner = "{", "}", text[2:-2]
    elif text[:1] == "{" and text[-1:] == "}":
        opening, closing, inner = "{", "}", text[1:-1]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        opening, closing, inner = text[0], text[-1], text[1:-1]
    if opening and not closes_at_the_end(text):
        opening, closing, inner = "", "", text
    parts = tuple(part.strip() for part in _split(inner, ","))
    if not opening:
        return Collection("{}", parts) if len(parts) > 1 and all(parts) else None
    if not all(parts) or (opening != "{" and len(parts) < 2):
        return None
    return Collection(opening + closing, parts)


def read_union(text: str) -> tuple[str, ...] | None:
    """The parts of a union; None for anything else."""
    parts = tuple(part.strip() for part in _split(text, r"\cup"))
    return parts if len(parts) > 1 and all(parts) else None


BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")


def closes_at_the_end(text: str) -> bool:
    """Whether the bracket at the beginning is closed by the last character; any kind closes any: `(1, 2]`."""
    depth = 0
    for found in BRACKET.finditer(text):
        depth += 1 if found[0][-1] in "([{" else -1
        if depth <= 0:
            return depth == 0 and found.end() == len(text)
    return False


def _split(text: str, separator: str) -> list[str]:
    """A text cut at a separator outside of all brackets."""
    parts, depth, start = [], 0, 0
    for found in re.finditer(rf"{BRACKET.pattern}|{re.escape(separator)}", text):
        if found[0] == separator:
            if depth == 0:
                parts.append(text[start : found.start()])
                start = found.end()
        else:
            depth += 1 if found[0][-1] in "([{" else -1
    return [*parts, text[start:]]
