"""Reward functions of the tests' recipes; a recipe names them as `tiny_rewards:NAME`."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

LOCK = threading.Lock()
STATE: dict[str, Any] = {}
"""What functions remember between calls; `tiny_runs.observe` empties it before each run."""


def spread(
    prompts: list[str], completions: list[str], answer: list[str] | None = None, scale: float = 1.0, **_: Any
) -> list[float]:
    """Nearly every completion is worth something else, and the answer matters."""
    answers = answer or [""] * len(completions)
    return [
        scale * (sum(map(ord, c)) + 3 * sum(map(ord, a or ""))) % 7 / 6
        for c, a in zip(completions, answers, strict=False)
    ]


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(completion) / 4 for completion in completions]


def ones(completions: list[str], **_: Any) -> list[float]:
    """How many ones there are, whatever was asked."""
    return [completion.count("1") / 4 for completion in completions]


def unhurried(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    time.sleep(0.3)
    return spread(prompts, completions)


def counts_callers(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Keeps the largest number of calls at a time in STATE["peak"]."""
    with LOCK:
        STATE["now"] = STATE.get("now", 0) + 1
        STATE["peak"] = max(STATE.get("peak", 0), STATE["now"])
    time.sleep(0.05)
    with LOCK:
        STATE["now"] -= 1
    return spread(prompts, completions)


def together(completions: list[str], **_: Any) -> list[float]:
    """A tenth of how many completions the call is about, and a little for what they are."""
    return [len(completions) / 10 + len(completion) / 100 for completion in completions]


def fails_once(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Every batch fails when it is first asked about."""
    with LOCK:
        seen = STATE.setdefault("seen", {})
        key = (*prompts, *completions)
        seen[key] = seen.get(key, 0) + 1
        first = seen[key] == 1
    if first:
        raise ConnectionError("busy")
    return spread(prompts, completions)


def fails_later(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """From the fifth call on, which is the second step, the first completion of the first call has no score."""
    with LOCK:
        STATE["calls"] = STATE.get("calls", 0) + 1
        now = STATE["calls"] == 5
    scores = spread(prompts, completions)
    return [math.nan, *scores[1:]] if now else scores


def hangs_later(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """From the ninth call on, of which each is about a group, there is no answer."""
    with LOCK:
        STATE["calls"] = STATE.get("calls", 0) + 1
        hangs = STATE["calls"] > 8
        STATE["hanging"] = STATE.get("hanging", 0) + hangs
    if hangs:
        time.sleep(600)
    return spread(prompts, completions)


def one_short(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def not_a_number(completions: list[str], **_: Any) -> list[float]:
    return [math.nan] * len(completions)


def first_digit(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A tenth of the digit that the prompt begins with, whatever the completion is."""
    return [int(prompt[0]) / 10 for prompt in prompts]
