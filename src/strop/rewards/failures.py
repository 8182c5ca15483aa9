"""What a failure in somebody's verifier is told as: type, message, file and line, in one short text."""

from __future__ import annotations

import traceback
from pathlib import Path

LONGEST_DETAIL = 500
"""Characters kept of one detail: details are stored with every episode."""


def shorten(text: str, limit: int = LONGEST_DETAIL) -> str:
    """The text, cut at `limit` characters with a mark that something is missing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def encodable(text: str) -> str:
    r"""The text with `\ud800` spelled out: halves of characters, which JSON may hold, and no tokenizer and no file."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def describe_exception(error: BaseException, *, file: str | None = None, outside: str | None = None) -> str:
    """`type: message (file:line)` of an exception.

    Args:
        error: an exception that was raised.
        file: source file whose line is wanted; an error deep in a library is then shown at the line of this file
            that called it. Without it, or when the file is not in the traceback, the innermost line is shown.
        outside: a folder whose lines are not shown: of whoever called the code that failed.
    """
    message = shorten(encodable("".join(traceback.format_exception_only(error)).strip()))
    if isinstance(error, SyntaxError):  # Its message holds file and line, and the traceback ends in the importer.
        return message
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    if outside is not None:
        frames = [frame for frame in frames if not Path(frame.filename).is_relative_to(outside)]
    own = [frame for frame in frames if frame.filename == file]
    frame = next(reversed(own or frames), None)
    return message if frame is None else f"{message} ({frame.filename}:{frame.lineno})"
