"""Stop texts: how a completion that holds one is recognised, in all engines alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def stop_tail(stop: Sequence[str]) -> int:
    """How many of the last tokens to look at; 0 where there are no stop texts.

    A token holds at least one byte, so a stop text of n bytes ends within the last n tokens.
    """
    return max((len(text.encode()) for text in stop), default=-4) + 4


def ends_with_stop(tokenizer: Any, tail: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last tokens of a completion hold a stop text; the newest of them completed it."""
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(one in text for one in stop)
