"""What episodes of several turns are played with, and what can go wrong in them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from strop.config.environment import AnyEnvironment
from strop.environments import checks
from strop.environments.protocol import EnvironmentFactory
from strop.errors import StropError
from strop.models.detokenizing import Detokenize
from strop.rewards.failures import describe_exception, encodable, shorten
from strop.rollout.calls import Raised, TooLong, call
from strop.rollout.engine import Engine, SampleRequest, SampleSettings
from strop.rollout.episode import Episode, Status, TurnId

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])
LONGEST = 1000
"""Characters kept of a detail."""
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

    async def make(self) -> Any:
        """An environment, or a match, that is ready to begin.

        Raises:
            Failed: it cannot be made.
        """
        factory, methods = self.factory, checks.MATCH if self.factory.roles else checks.ENVIRONMENT
        try:
            made: Any = await call(
                partial(_returned, factory.make),
                partial(checks.environment, methods=methods),
                self.settings.step_timeout,
            )
        except (Raised, TooLong) as error:
            raise self.failure(error, factory, getattr(factory, "name", f"{type(factory).__name__}.make")) from error
        if hasattr(made, "ready"):
            try:
                await self.ask(made, "ready", bounded=False)
            except BaseException:
                await self.close(made)
                raise
        return made

    async def ask(
        self,
        asked: Any,
        method: str,
        *given: Any,
        check: Callable[[Any], Any] = lambda found: found,
        bounded: bool = True,
    ) -> Any:
        """What a method of an environment returns, checked, within its time.

        Args:
            check: gives what was returned as it should be, or raises `Malformed`. bounded: by `step_timeout`.

        Raises:
            Failed: it took too long, raised something, or returned what it should not.
        """
        limit = self.settings.step_timeout if bounded else None
        try:
            return await call(lambda: getattr(asked, method)(*given), check, limit)
        except (Raised, TooLong) as error:
            raise self.failure(error, asked, f"{type(asked).__name__}.{method}") from error

    def failure(self, error: Raised | TooLong, asked: Any, name: str) -> Failed:
        """What a call failed with, in words.

        Args:
            asked: whose code was called. name: of what was called.

        Raises:
            StropError: the call raised it; such an error is not the episode's alone.
        """
        if isinstance(error, TooLong):
            limit = self.settings.step_timeout
            return Failed(Status.TIMEOUT, f"the environment took longer than {limit:g} s for one answer")
        cause = error.error
        if isinstance(cause, StropError):
            raise cause
        if isinstance(cause, checks.Malformed):
            return Failed(Status.ENVIRONMENT_ERROR, f"{name} {cause}")
        file = getattr(sys.modules.get(type(asked).__module__), "__file__", None)
        told = describe_exception(cause, file=file, outside=_PACKAGE)
        return Failed(Status.ENVIRONMENT_ERROR, f"{name} raised {told}")

    async def close(self, environment: Any) -> None:
        """Close an environment; one that fails at that does not undo an episode that is played, and is warned of."""
        try:
            await self.ask(environment, "close")
        except Exception as error:
            warnings.warn(f"an environment could not be closed: {error}", RuntimeWarning, stacklevel=2)


async def _returned(function: Callable[[], T]) -> T:
    return function()


def own_copy(data: T) -> T:
    """Data for one environment alone: what it does to them must not reach the data set, nor other completions."""
    try:
        return copy.deepcopy(data)
    except Exception:  # columns that a function of the user's made may hold anything
        return copy.copy(data)


@dataclass(frozen=True)
class Speaker:
    """The policy, as it speaks: turns are sampled by the engine and written into episodes."""

    engine: Engine
    tokenizer: Detokenizer
    detokenize: Detokenize

    async def speak(
        self, episode: Episode, parent: TurnId, tokens: Sequence[int], settings: SampleSettings, stream: tuple[int, ...]
    ) -> tuple[TurnId, str]:
        """(turn, how it ended) of one sampled turn; its text becomes the episode's completion."""
        result = await self.engine.generate(SampleRequest(tuple(tokens), settings, stream))
        turn = episode.append_sampled(
            result.tokens, result.logprobs, result.versions, parent=parent, finish=result.finish
        )
        episode.completion = self.detokenize(episode.turns[turn].tokens)
        return turn, result.finish


class Failed(Exception):
    """The environment failed."""

    def __init__(self, status: Status, detail: str) -> None:
        detail = shorten(encodable(detail), LONGEST)
        super().__init__(detail)
        self.status, self.detail = status, detail

    def mark(self, episode: Episode) -> None:
        """Write into an episode that its environment failed."""
        episode.status, episode.detail, episode.failed = self.status, self.detail, ENVIRONMENT


def too_long(limit: float) -> Failed:
    """What ends an episode that took too long as a whole."""
    return Failed(Status.TIMEOUT, f"the episode took longer than {limit:g} s")
