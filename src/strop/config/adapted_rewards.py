"""Verifiers that speak the language of other frameworks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from strop.config.verifier import Verifier


class ReasoningGymVerifier(Verifier):
    """What the task of Reasoning Gym that made the row says of the answer, 0 to 1; runs in worker processes."""

    kind: Literal["reasoning_gym"]
    """Score with the task's own `score_answer` (extra `gym`); the data is `reasoning-gym:TASK`."""
    take: Literal["auto", "tag", "whole"] = "auto"
    """What the answer is: the last `<answer>...</answer>`, the `whole` completion, or `auto`, the first if there is one
    and else the second."""


class SlimeVerifier(Verifier):
    """A reward function as slime has them, `async def custom_rm(args, sample) -> float`."""

    kind: Literal["slime"]
    """Call a reward function of slime's form."""
    function: str
    """`module:function`, importable from the working folder or the Python path."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What `args` holds."""
    reward_key: str | None = None
    """Where the function returns a dict: the key of the score; other numbers in it become components."""
    isolate: Literal["thread", "process"] = "thread"
    """Where it runs: in a thread of the run, or in worker processes, which are killed when they take too long and may
    crash without harm."""
    call_with: Literal["completion", "group"] = "completion"
    """What one call is given: one sample, or as a list those of a group."""
