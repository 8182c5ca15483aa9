"""What stands for the environments of one episode in the driver, while they live in a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from strop.cluster.data_plane import Packed, pack
from strop.cluster.environment_host import CLOSE, MAKE, Given
from strop.cluster.environment_line import EnvironmentLine, Life
from strop.errors import RunFailure
from strop.rollout.asking import Home, as_it_is
from strop.rollout.episode import Episode


@dataclass(frozen=True)
class RemoteEnvironment:
    """What stands for an environment here. number: the line's."""

    number: int


@dataclass(frozen=True)
class Lodging:
    """The `Home` of one episode's environments, for as long as its worker is there."""

    line: EnvironmentLine
    life: Life

    async def make(self) -> RemoteEnvironment:
        number = self.line.number()
        try:
            await self.line.ask(self.life, number, MAKE)
        except BaseException:
            self.line.tell_to_close(number)
            raise
        return RemoteEnvironment(number)

    async def ask(
        self, asked: Any, method: str, *given: Any, check: Callable[[Any], Any] = as_it_is, bounded: bool = True
    ) -> Any:
        child = self.line.number() if method == "fork" else None
        try:
            found = await self.line.ask(self.life, asked.number, method, _packed((given, check, bounded, child)))
        except BaseException:
            if child is not None:
                self.line.tell_to_close(child)
            raise
        return found if child is None else RemoteEnvironment(child)

    async def close(self, environment: Any) -> None:
        # What goes wrong is warned of there. A worker that is lost over it is one like any other.
        await self.line.ask(self.life, environment.number, CLOSE)

    async def played(
        self, stream: tuple[int, ...], episode: Episode, play: Callable[[Home, Episode], Awaitable[list[Episode]]]
    ) -> list[Episode]:
        return await play(self, episode)


def _packed(given: Given) -> Packed:
    try:
        return pack(given)
    except Exception as error:
        raise RunFailure(
            f"what an environment is given cannot be sent to its process: {type(error).__name__}: {error}",
            where="cluster.environments.workers",
            mend="set it to 0, or give rows of the data that can be pickled",
        ) from error
