"""What episodes of several turns are played with, and what can go wrong in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from strop.config.environment import AnyEnvironment
from strop.environments.protocol import EnvironmentFactory
from strop.errors import StropError
from strop.rollout.engine import Engine, SampleRequest, SampleSettings
from strop.rollout.episode import Episode, Status, TurnId

T = TypeVar("T")
ENVIRONMENT = "environment"
"""What `Episode.failed` says when it was the environment that failed."""


class PromptLike(Protocol):
    """What a player needs of a prompt; `data.Prompt` is one."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def prompt(self) -> Any: ...
    @property
    def answer(self) -> Any: ...
    @property
    def row(self) -> dict[str, Any]: ...
    @property
    def tokens(self) -> Sequence[int]: ...


class Detokenizer(Protocol):
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class World:
    """What episodes of several turns need.

    factory: makes the environments. renderer: of the data, which also knows the tools. end_ids: tokens that end a turn
    of the policy. context: longest sequence of the model.
    """

    factory: EnvironmentFactory
    settings: AnyEnvironment
    renderer: Any
    end_ids: frozenset[int]
    context: int

    def room(self, episode: Episode, path: int, first: int, budget: int) -> int:
        """Tokens that the next turn may have.

        Args:
            path: tokens that it follows. first: those of the first prompt. budget: of all turns of the episode.
        """
        limits = self.settings
        room = min(budget - episode.sampled_tokens(), self.context - path)
        if limits.max_turn_tokens != "auto":
            room = min(room, limits.max_turn_tokens)
        if limits.max_tokens != "auto":
            room = min(room, limits.max_tokens - (path - first))
        return room

    async def answer(self, work: Awaitable[T]) -> T:
        """What the environment says, within its time.

        Raises:
            Failed: it took too long, or raised something.
        """
        limit = self.settings.step_timeout
        try:
            return await asyncio.wait_for(work, limit)
        except TimeoutError:
            raise Failed(Status.TIMEOUT, f"the environment took longer than {limit:g} s for one answer") from None
        except StropError:
            raise
        except Exception as error:
            raise Failed(Status.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}") from error

    async def close(self, environment: Any) -> None:
        """Close an environment; one that fails at that does not undo an episode that is played."""
        try:
            await asyncio.wait_for(environment.close(), self.settings.step_timeout)
        except Exception:
            return


@dataclass(frozen=True)
class Speaker:
    """The policy, as it speaks: turns are sampled by the engine and written into episodes."""

    engine: Engine
    tokenizer: Detokenizer

    async def speak(
        self, episode: Episode, parent: TurnId, tokens: Sequence[int], settings: SampleSettings, stream: tuple[int, ...]
    ) -> tuple[TurnId, str]:
        """(turn, how it ended) of one sampled turn; its text becomes the episode's completion."""
        result = await self.engine.generate(SampleRequest(tuple(tokens), settings, stream))
        turn = episode.append_sampled(
            result.tokens, result.logprobs, result.versions, parent=parent, finish=result.finish
        )
        episode.completion = self.tokenizer.decode(result.tokens, skip_special_tokens=True)
        return turn, result.finish


class Failed(Exception):
    """The environment failed."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail

    def mark(self, episode: Episode) -> None:
        """Write into an episode that its environment failed."""
        episode.status, episode.detail, episode.failed = self.status, self.detail, ENVIRONMENT


def too_long(limit: float) -> Failed:
    """What ends an episode that took too long as a whole."""
    return Failed(Status.TIMEOUT, f"the episode took longer than {limit:g} s")
