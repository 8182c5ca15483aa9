"""Where a completion states its final answer: in a box, after "the answer is", or in its last formula or number.

Everything here is linear in the length of the text, and nothing is evaluated.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from strop.rewards.numeric import find_numbers

_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\(?:boxed|fbox)\s+(?P<bare>[^\s{}$\\][^\s{}$]*)|\\.|[{}]", re.DOTALL
)
_MARK = re.compile(
    r"####|\banswer\b[^\n.:=]{0,80}?(?:\bis\b|[:=])(?:\s+(?:therefore|thus|then|hence|simply|just|equal to)\b)?",
    re.IGNORECASE,
)
_SENTENCE_ENDS = re.compile(r"[.;!?](?=\s|$)|,\s+(?=[a-z]{2})|\s(?:because|since|which|where|so|as)\b")
_DELIMITER = re.compile(r"\\[$]|\$\$?|\\[()\[\]]")
_CLOSES = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "exp",
    "sqrt",
    "arcsin",
    "arccos",
    "arctan",
    "det",
    "mod",
}
_WORD = re.compile(r"[A-Za-z]{3,}")
_AFTER_MARK = 2000
MANY = 20
"""So many of the last stated answers are read."""


def boxed(text: str) -> list[str]:
    """What stands in each `\\boxed{}`, in order; of boxes within boxes the outermost, unless it is not closed."""
    if "boxed" not in text and "fbox" not in text:
        return []
    opened: list[tuple[int, int] | None] = []
    found: list[tuple[int, int, str]] = []
    for piece in _BOX.finditer(text):
        if piece["bare"]:
            found.append((piece.start(), piece.end(), piece["bare"].rstrip(".,;")))
        elif piece["box"]:
            opened.append((piece.start(), piece.end()))
        elif piece[0] == "{":
            opened.append(None)
        elif piece[0] == "}" and opened and (box := opened.pop()) is not None:
            found.append((box[0], piece.end(), text[box[1] : piece.start()]))
    outermost: list[str] = []
    end = -1
    for start, stop, content in sorted(found, key=lambda one: (one[0], -one[1])):
        if start >= end:
            outermost.append(content)
            end = stop
    return outermost


def stated(text: str) -> list[str]:
    """What follows the last `MANY` of "the answer is", "Answer:" and "####", in order."""
    if "####" not in text and "answer" not in text.casefold():
        return []
    ends = deque((mark.end() for mark in _MARK.finditer(text)), maxlen=MANY)
    found = [_after_mark(text[end : end + _AFTER_MARK]) for end in ends]
    return [answer for answer in found if answer]


def last_mathematical(text: str) -> str | None:
    """The last formula or number of a text, whichever ends later."""
    formula, end = "", 0
    for content, stop in formulas(text):
        formula, end = content, stop
    number = None
    for number in find_numbers(text[end:]):  # noqa: B007
        pass
    return number or formula or None


def formulas(text: str) -> Iterator[tuple[str, int]]:
    """The formulas between dollars and the like, without those that hold prose, each with where it ends."""
    opened: tuple[str, int] | None = None
    for found in _DELIMITER.finditer(text):
        mark = found[0]
        if opened is not None and mark == _CLOSES[opened[0]]:
            content = text[opened[1] : found.start()].strip()
            # A price opens no formula, but may seem to: what it "closes" may open one.
            opened = None if content and not has_prose(content) else (mark, found.end()) if "$" in mark else None
            if opened is None and content:
                yield content, found.end()
        elif mark in _CLOSES:
            opened = (mark, found.end())


def has_prose(text: str) -> bool:
    """Whether there are words in a text that are neither commands nor functions of mathematics."""
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(_COMMAND.sub(" ", text)))


def _after_mark(rest: str) -> str:
    """The answer at the beginning of a text: its first formula, what is before the sentence ends, or a number there."""
    line = next((line.strip() for line in rest.lstrip(" \t*_:\n").splitlines()), "").strip("*_ ")
    formula = next(formulas(line), None)
    if formula is not None:
        return formula[0]
    end = _SENTENCE_ENDS.search(line)
    answer = (line[: end.start()] if end else line).strip(" *_.,;")
    if has_prose(answer):
        numbers = list(find_numbers(answer))
        return numbers[-1] if numbers else answer
    return answer


def different(answers: list[str]) -> int:
    """How many answers there are that are not written alike."""
    return len({"".join(answer.split()).strip("$.") for answer in answers})
