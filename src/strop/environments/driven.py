"""Environments that drive themselves: a function asks the policy for tokens when it wants some, and says in the end
what the episode was. Functions and agents of other frameworks are such.

Whoever plays the episode keeps account of what was sampled. What the function says was sampled is taken from there, or
is an error of the environment's: nothing is trained that the policy did not write behind just these tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from strop.environments.protocol import Message


@dataclass(frozen=True)
class Sampled:
    """What the policy wrote; one log-probability and weight version for each token. text: without special tokens."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length", "aborted"]
    text: str = ""


class Policy(Protocol):
    """The policy, as a driver asks it; one episode's.

    prompt: as the data has it. rendered: the text of it that the model reads, and tokens its ids. answer, row: of the
    data. max_new_tokens: what all requests of the episode may have together. context: longest sequence of the model.
    temperature, stop: of every request. group, sample_index: which episode this is. evaluation: whether it is only
    scored. renderer: makes text of messages. end_ids: tokens that end a turn.
    """

    prompt: Any
    rendered: str
    tokens: Sequence[int]
    answer: Any
    row: Mapping[str, Any]
    max_new_tokens: int
    context: int
    temperature: float
    stop: Sequence[str]
    group: int
    sample_index: int
    evaluation: bool
    tokenizer: Any
    renderer: Any
    end_ids: frozenset[int]

    async def sample(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Sampled:
        """Go on behind some tokens, within the limits of the episode; no tokens and `length` once they are reached."""
        ...


def refuse_other_sampling(policy: Policy, given: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """See that a request asks for the distribution that is sampled and scored, that of the temperature alone.

    Args:
        given: its parameters. neutral: those that would change the distribution, with the values at which they do not.

    Raises:
        ValueError: it asks for another.
    """
    temperature = given.get("temperature")
    if temperature is not None and temperature != policy.temperature:
        raise ValueError(f"temperature {temperature} is refused: rollout.temperature is {policy.temperature}")
    for name, values in neutral.items():
        if name in given and given[name] not in values:
            raise ValueError(
                f"{name}={given[name]!r} is refused: tokens are scored under the distribution of the temperature alone"
            )


@dataclass(frozen=True)
class Path:
    """A sequence that is to be trained: token ids, how many of them are the prompt, and which of the others are
    trained. All trained ones must have been sampled behind exactly the tokens that stand before them. reward: of this
    path alone."""

    tokens: Sequence[int]
    prompt: int
    trained: Sequence[bool]
    reward: float | None = None


@dataclass(frozen=True)
class Driven:
    """What an episode was.

    text: the completion that verifiers see; the last turn's where it is None. messages: the conversation, if there was
    one. reward: of the whole episode. error: what went wrong.
    """

    paths: Sequence[Path] = ()
    finish: Literal["stop", "length"] = "stop"
    text: str | None = None
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    error: str | None = None


@runtime_checkable
class Driver(Protocol):
    """One episode of an environment that drives itself; single-use."""

    async def drive(self, policy: Policy) -> Driven:
        """Play the episode from its beginning to its end."""
        ...

    async def close(self) -> None:
        """Free what it holds; may be called at any time and more than once."""
        ...
