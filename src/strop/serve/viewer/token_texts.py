"""The text of each token, by the tokenizer that the run keeps beside its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from strop.serve.viewer.catalog import NotFound, inside

LARGEST = 1 << 28
"""Bytes of a tokenizer's file; a larger one is no tokenizer."""


def tokenizer_of(run: Path) -> Any | None:
    """The run's tokenizer (of the package `tokenizers`), from its newest checkpoint that has one; None without one."""
    try:
        folders = sorted(inside(run, "checkpoints").glob("step-*"), reverse=True)
    except (OSError, NotFound):
        return None
    for folder in folders:
        try:
            path = inside(run, folder / "model" / "tokenizer.json")
            status = path.stat()
        except (OSError, NotFound):
            continue
        if status.st_size <= LARGEST and (found := _load(path, status.st_mtime_ns, status.st_size)) is not None:
            return found
    return None


@lru_cache(maxsize=8)
def _load(path: Path, changed: int, size: int) -> Any | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # What it raises has no class of its own.
        return None


def texts(tokenizer: Any | None, tokens: Sequence[int]) -> list[str | None]:
    """The text that each token adds; None where it is not known.

    Of several tokens that are one character together, the last has it and the others are empty.
    """
    if tokenizer is None:
        return [None] * len(tokens)
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    found: list[str | None] = []
    for token in tokens:
        try:
            known = 0 <= token < 1 << 31 and tokenizer.id_to_token(token) is not None
            found.append(stream.step(tokenizer, token) or "" if known else None)
        except Exception:  # Bytes that are no text; a stream that failed stays so.
            stream = DecodeStream(skip_special_tokens=False)
            found.append("\ufffd")
    return found
