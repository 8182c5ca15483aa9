"""The program in a completion."""

from __future__ import annotations

from typing import Literal

_PYTHON = frozenset({"python", "python3", "py", "py3"})
_FENCES = ("```", "~~~")


def find_program(completion: str, take: Literal["auto", "block", "whole"]) -> str | None:
    """The program; None where a block is wanted and there is none.

    A block begins with a line of three backticks or tildes. The last one that is marked as Python counts, or the last
    that is not marked at all; one that is not closed goes to the end. Blocks marked as another language never count.
    """
    if take == "whole":
        return completion
    block = _last_block(completion)
    return completion if block is None and take == "auto" else block


def _last_block(text: str) -> str | None:
    marked: str | None = None
    unmarked: str | None = None
    fence, language, lines = "", "", list[str]()
    # The end of the text closes whatever is open.
    for line in [*text.splitlines(), None]:
        stripped = "" if line is None else line.strip()
        if not fence:
            fence = next((one for one in _FENCES if stripped.startswith(one)), "")
            if fence:
                words = stripped.strip(fence[0]).split()
                language, lines = (words[0].lower() if words else ""), []
        elif line is None or (stripped.rstrip(fence[0]) == "" and stripped.startswith(fence)):
            if language in _PYTHON:
                marked = "\n".join(lines)
            elif not language:
                unmarked = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    return unmarked if marked is None else marked
