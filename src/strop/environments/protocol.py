"""What an environment is: it opens an episode and answers each turn of the policy, until the episode is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class PolicyTurn:
    """What the policy wrote in one turn.

    text: without special tokens. finish: "stop" if the policy ended the turn, "length" if a token limit did. number:
    turns of the policy before it.
    """

    text: str
    finish: Literal["stop", "length"] = "stop"
    number: int = 0


@dataclass(frozen=True)
class Observation:
    """The environment's answer to a turn; the policy speaks next.

    messages: new messages only, `{role, content}`. Whoever drives the episode renders them and appends the tokens to
    those that were sampled; earlier turns are never rendered again. reward: of the turn that is answered. turn: how
    that turn stands among the messages, where it is not simply `{"role": "assistant", "content": text}`.
    """

    messages: list[Message]
    reward: float | None = None
    turn: Message | None = None


@dataclass(frozen=True)
class Done:
    """The episode is over.

    error: what went wrong in the environment, None when it ended as it should. An episode with an error gets the status
    `environment_error` and no reward. reward: of the last turn. truncated: it was cut short, by a limit of the
    environment's: the status is `length` then.
    """

    error: str | None = None
    reward: float | None = None
    truncated: bool = False


class Environment(Protocol):
    """One episode's world. Single-use: made for one episode, reset once, stepped until Done, closed always.

    Two episodes never share one, so that no state can leak between the completions of a group. An exception in any
    method is an `environment_error` of the episode; so is a time-out, as `timeout`. One that has to wait for a place on
    a server may have `async ready()`, which is awaited before the episode's time begins. One whose episodes can branch
    (`rollout.tree`) has `async fork()`, which returns another environment in the same state: what happens to one does
    not happen to the other.
    """

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        """Begin: the messages that the policy reads first; None for the prompt as the data has it.

        Args:
            row: every column of the data row.
        """
        ...

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        """Answer one turn of the policy."""
        ...

    async def close(self) -> None:
        """Free what it holds; may be called at any time and more than once."""
        ...


class EnvironmentFactory(ABC):
    """Makes environments, one for each episode, and may hold what they share (tools, servers, an index).

    Factories derive from this, and say only what is otherwise with them.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template tells the model of; empty for none."""
    instructions: str = ""
    """More words for the system message of a chat; empty for none."""
    stop: Sequence[str] = ()
    """Texts that end a turn of the policy, beside those of the recipe."""
    forks: bool = False
    """Whether the environments have `fork`."""
    roles: Sequence[str] = ()
    """The roles of a match of the policy against itself (`environments/self_play.py`); empty for one role only."""
    drives: bool = False
    """Whether what it makes is a `Driver`, which asks the policy for tokens when it wants some."""

    @abstractmethod
    def make(self) -> Any:
        """An `Environment`, or what else `Player` plays: a `Match` where there are roles, a `Driver`."""

    async def open(self) -> None:  # noqa: B027 (most share nothing)
        """Start what the environments share; called once before the first episode."""

    async def close(self) -> None:  # noqa: B027
        """Stop it."""
