"""What a sampler engine is (docs/architecture.md, section 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class SampleSettings:
    """How tokens are drawn.

    temperature: above 0, or 0 for the most likely token (its log-probability is then taken at temperature 1).
    stop: texts that end the completion; the tokens that hold the stop text are kept.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


class SampleRequest(NamedTuple):
    """One completion to sample.

    tokens: the ids to continue. stream: what the random draws are keyed by, beside the run's seed: the same key gives
    the same draws whatever else is sampled at the time (for a rollout: prompt occurrence, sample index, turn). begun:
    what was sampled of it before; the engine goes on behind that, and its result has all of it.
    """

    tokens: tuple[int, ...]
    settings: SampleSettings
    stream: tuple[int, ...]
    begun: SampleResult | None = None

    def check(self, context: int) -> None:
        """Raises ValueError where prompt and completion do not fit a model's context, or the prompt is empty."""
        if not self.tokens:
            raise ValueError("a prompt needs at least one token")
        if len(self.tokens) + self.settings.max_new_tokens > context:
            raise ValueError(
                f"{len(self.tokens)} prompt tokens and {self.settings.max_new_tokens} new ones "
                f"do not fit the context of {context}"
            )


class SampleResult(NamedTuple):
    """What was sampled: one log-probability (at the sampling temperature) and weight version for each token.

    tokens, logprobs, versions: [n], flat arrays (integers, float32, int32) where there are many, or plain sequences.
    """

    tokens: Sequence[int] | np.ndarray
    logprobs: Sequence[float] | np.ndarray
    versions: Sequence[int] | np.ndarray
    finish: FinishReason

    def plain(self) -> SampleResult:
        """The same in lists of Python's own numbers."""
        tokens, logprobs, versions = (np.asarray(one).tolist() for one in (self.tokens, self.logprobs, self.versions))
        return SampleResult(tokens, logprobs, versions, self.finish)


@dataclass(frozen=True)
class WeightUpdate:
    """New weights for an engine.

    tensors: pairs of a parameter's name and its new value, given one by one; None where they are in the engine's module
    already, because it is shared with the trainer or because they were written into it (`strop.publishing`).
    """

    version: int
    tensors: Iterable[tuple[str, Tensor]] | None = None


@dataclass
class EngineStats:
    """What an engine did since it was last asked: counts of tokens and seconds of work."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    sequences: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Samples(Protocol):
    """Token ids in; token ids, log-probabilities and weight versions out: an engine, or who notes what one says."""

    async def generate(self, request: SampleRequest) -> SampleResult: ...


class Engine(Samples, Protocol):
    """What samples, with weights that change."""

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        """What is there so far of requests that have not ended, by their streams, for `SampleRequest.begun`; as much of
        it as the engine knows."""
        ...

    async def score(self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        ...

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take new weights; returns the version that is served from now on."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self) -> None:
        """End every running request with what it has; each returns with finish "aborted"."""
        ...

    async def sleep(self) -> None:
        """Give memory back (caches, packed weights, and of an engine with weights of its own these too, where it was
        made so). Nothing is lost: what runs keeps its tokens, and goes on with what waits when the engine is awake. One
        that takes its memory when it is needed need not wait."""
        ...

    async def wake(self) -> None:
        """Take memory again. An engine without weights is awake after the next `update_weights`.

        Raises:
            RunFailure: there is no room; the engine then serves no version.
        """
        ...

    def take_stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
