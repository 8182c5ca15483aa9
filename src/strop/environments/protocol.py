"""What an environment is: it opens an episode and answers each turn of the policy, until the episode is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """The environment's answer to a turn; the policy speaks next.

    messages: new messages only, `{role, content}`. Whoever drives the episode renders them and appends the tokens to
    those that were sampled; earlier turns are never rendered again.
    """

    messages: list[Message]


@dataclass(frozen=True)
class Done:
    """The episode is over.

    error: what went wrong in the environment, None when it ended as it should. An episode with an error gets the status
    `environment_error` and no reward.
    """

    error: str | None = None


class Environment(Protocol):
    """One episode's world. Single-use: made for one episode, reset once, stepped until Done, closed always.

    Two episodes never share one, so that no state can leak between the completions of a group.
    """

    async def reset(self) -> list[int]:
        """Begin: token ids of the first prompt."""
        ...

    async def step(self, completion: str) -> Observation | Done:
        """Answer one turn: the text that the policy sampled, without special tokens."""
        ...

    async def close(self) -> None:
        """Free what it holds; may be called at any time and more than once."""
        ...
