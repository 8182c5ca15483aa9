"""What a verifier is: it scores completions and says when it could not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

Message = dict[str, Any]


class _Ids:
    """A field of token ids that is given as an array or a list, and read as a list, which is made when it is first
    asked for: most verifiers read the text alone."""

    def __get__(self, item: Any, owner: type) -> Sequence[int]:
        if item is None:
            return ()
        ids: Any = item.__dict__["_ids"]
        if isinstance(ids, np.ndarray):
            ids = item.__dict__["_ids"] = ids.tolist()
        return ids

    def __set__(self, item: Any, ids: Sequence[int] | np.ndarray) -> None:
        item.__dict__["_ids"] = ids


@dataclass(frozen=True, init=False)
class Completed:
    """A finished completion, as verifiers see it.

    prompt: the prompt as the data had it, a text or a list of messages. completion: the text that was sampled, without
    special tokens; of an episode of several turns, the last one's. row: every column of the data row. finish: "stop" or
    "length". messages: the whole conversation, empty where there was a single turn. environment_reward: what the
    environment gave, the sum over the turns; None if it gave none.
    """

    prompt: str | list[Message]
    completion: str
    answer: Any = None
    row: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = _Ids()  # type: ignore[assignment]
    finish: str = "stop"
    messages: Sequence[Message] = ()
    environment_reward: float | None = None

    def __init__(
        self,
        prompt: str | list[Message],
        completion: str,
        answer: Any = None,
        row: Mapping[str, Any] | None = None,
        completion_ids: Sequence[int] | np.ndarray = (),
        finish: str = "stop",
        messages: Sequence[Message] = (),
        environment_reward: float | None = None,
    ) -> None:
        # The one that `dataclass` writes for what is frozen takes three times as long.
        own = self.__dict__
        own["prompt"] = prompt
        own["completion"] = completion
        own["answer"] = answer
        own["row"] = {} if row is None else row
        own["_ids"] = completion_ids
        own["finish"] = finish
        own["messages"] = messages
        own["environment_reward"] = environment_reward

    def own_ids(self) -> list[int]:
        """The token ids in a list that nobody else has."""
        ids = self.__dict__["_ids"]
        return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one completion.

    score: None when there is no score: the verifier failed (status says how), or the verifier does not apply to the
    completion (status "ok"). An error is never a score of 0. components: more numbers of the verifier's, to be looked
    at; they are not part of the total.
    """

    score: float | None
    status: Literal["ok", "verifier_error", "timeout"] = "ok"
    detail: str = ""
    components: Mapping[str, float] = field(default_factory=dict)


class Reward(NamedTuple):
    """The total of all verifiers for one completion.

    total: weighted sum; NaN unless status is "ok". components: raw score of each verifier by name, and its own
    components as `name/component`; a verifier that failed, does not apply or was shut out by a gate is not in it.
    correct: whether the score of the first verifier for such rows reaches `rewards.correct_at`; None unless status is
    "ok", and None where that verifier does not apply. failed: name of the verifier that gave the status; empty when it
    is "ok", and when no verifier applies.
    """

    total: float
    components: dict[str, float]
    correct: bool | None
    status: Literal["ok", "verifier_error", "timeout", "environment_error"] = "ok"
    detail: str = ""
    failed: str = ""


class Verifier(Protocol):
    """Scores a batch of completions; one verdict each, in order.

    `verify` is called from several threads at once. An exception in it is a verifier error of every completion of the
    call; a `StropError` stops the run. It may have `load()`, which is called once before the first step and is not
    timed.
    """

    name: str

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]: ...


@runtime_checkable
class AsyncVerifier(Protocol):
    """A verifier that waits for others: worker processes or servers.

    `ask` is awaited in the run's event loop, which it must not hold up, and keeps to its own time-outs. An exception in
    it is a verifier error of every completion of the call; a `StropError` stops the run. `close` gives back what it
    holds; no `ask` follows.
    """

    name: str

    async def ask(self, completed: Sequence[Completed]) -> list[Verdict]: ...

    async def close(self) -> None: ...


class Scorer(Protocol):
    """All verifiers of a run together, asynchronous, with time-outs and retries."""

    def load(self) -> None:
        """Let verifiers read what they need, before the first step."""
        ...

    async def score(self, completed: Sequence[Completed]) -> list[Reward]: ...

    async def close(self) -> None: ...
