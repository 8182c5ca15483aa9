"""Asking environments: what they answer is checked and within its time, and what goes wrong is told in words."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from strop.config.environment import AnyEnvironment
from strop.environments import checks
from strop.environments.protocol import EnvironmentFactory
from strop.errors import StropError
from strop.rewards.failures import describe_exception, encodable, shorten
from strop.rollout.calls import Raised, TooLong, call
from strop.rollout.episode import Episode, Status

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])
LONGEST = 1000
"""Characters kept of a detail."""
ENVIRONMENT = "environment"
"""What `Episode.failed` says when it was the environment that failed."""


class Failed(Exception):
    """The environment failed."""

    def __init__(self, status: Status, detail: str) -> None:
        detail = shorten(encodable(detail), LONGEST)
        super().__init__(detail)
        self.status, self.detail = status, detail

    def mark(self, episode: Episode) -> None:
        """Write into an episode that its environment failed."""
        episode.status, episode.detail, episode.failed = self.status, self.detail, ENVIRONMENT


def as_it_is(found: Any) -> Any:
    """The check of what may be anything."""
    return found


class Home(Protocol):
    """Where environments live: here (`InProcess`), or in other processes (`cluster/remote_environments.py`)."""

    async def make(self) -> Any:
        """An environment, or a match, that is ready to begin.

        Raises:
            Failed: it cannot be made.
        """
        ...

    async def ask(
        self,
        asked: Any,
        method: str,
        *given: Any,
        check: Callable[[Any], Any] = as_it_is,
        bounded: bool = True,
    ) -> Any:
        """What a method of an environment returns, checked, within its time.

        Args:
            check: gives what was returned as it should be, or raises `Malformed`; a function of a module, or a partial
                one. bounded: by `step_timeout`.

        Raises:
            Failed: it took too long, raised something, or returned what it should not.
        """
        ...

    async def close(self, environment: Any) -> None:
        """Close an environment; one that fails at that does not undo an episode that is played, and is warned of."""
        ...

    async def played(
        self, stream: tuple[int, ...], episode: Episode, play: Callable[[Home, Episode], Awaitable[list[Episode]]]
    ) -> list[Episode]:
        """What `play` returns of an episode, and from its beginning again where what the environments live in is lost.

        Args:
            stream: of the episode's draws. episode: nothing is written to it yet. play: gets the home whose
                environments it is to take, and the episode to fill.

        Raises:
            Whatever `play` raised.
        """
        ...


class InProcess:
    """Environments in this process, on this event loop."""

    def __init__(self, factory: EnvironmentFactory, settings: AnyEnvironment) -> None:
        self._factory = factory
        self._settings = settings

    async def make(self) -> Any:
        """See `Home.make`."""
        factory, methods = self._factory, checks.MATCH if self._factory.roles else checks.ENVIRONMENT
        try:
            made: Any = await call(
                partial(_returned, factory.make),
                partial(checks.environment, methods=methods),
                self._settings.step_timeout,
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
        check: Callable[[Any], Any] = as_it_is,
        bounded: bool = True,
    ) -> Any:
        """See `Home.ask`."""
        limit = self._settings.step_timeout if bounded else None
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
            limit = self._settings.step_timeout
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
        """See `Home.close`."""
        try:
            await self.ask(environment, "close")
        except Exception as error:
            warnings.warn(f"an environment could not be closed: {error}", RuntimeWarning, stacklevel=3)

    async def played(
        self, stream: tuple[int, ...], episode: Episode, play: Callable[[Home, Episode], Awaitable[list[Episode]]]
    ) -> list[Episode]:
        """See `Home.played`: nothing can be lost without this process."""
        return await play(self, episode)


async def _returned(function: Callable[[], T]) -> T:
    return function()


def own_copy(data: T) -> T:
    """Data for one environment alone: what it does to them must not reach the data set, nor other completions."""
    try:
        return copy.deepcopy(data)
    except Exception:  # columns that a function of the user's made may hold anything
        return copy.copy(data)


def too_long(limit: float) -> Failed:
    """What ends an episode that took too long as a whole."""
    return Failed(Status.TIMEOUT, f"the episode took longer than {limit:g} s")
