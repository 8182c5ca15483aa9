"""Environments of Gymnasium as conversations: observations are texts, and so are actions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from strop.config.adapted_environments import GymnasiumEnvironment
from strop.data.rows import see_working_folder
from strop.environments.acting import Actions, Shown, picture, plain, seed_of
from strop.environments.protocol import Done, Environment, EnvironmentFactory, Message, Observation, PolicyTurn
from strop.errors import MissingExtra, UserError
from strop.rewards.calls import call

T = TypeVar("T")


class GymnasiumFactory(EnvironmentFactory):
    """Makes environments of one id, each episode its own.

    Raises:
        MissingExtra: the package is not installed.
        UserError: there is no such environment, its arguments do not fit, or its actions cannot be written.
    """

    def __init__(self, settings: GymnasiumEnvironment, *, where: str = "environment") -> None:
        if importlib.util.find_spec("gymnasium") is None:
            raise MissingExtra("gymnasium", extra="gymnasium", needed_for=f"`{where}.kind: gymnasium`")
        self._settings = settings
        self._where = where
        self._shown = Shown(settings, where=where)
        example = self._made(None)
        try:
            modes = example.metadata.get("render_modes") or []
            if settings.render == "ansi" and "ansi" not in modes:
                raise UserError(
                    f"{settings.id} renders no characters, only {', '.join(modes) or 'nothing'}",
                    where=f"{where}.render",
                    mend="set it to observation",
                )
            self._mode = "ansi" if settings.render != "observation" and "ansi" in modes else None
            self._actions, self._start = self._named(example.action_space)
        finally:
            example.close()

    def make(self) -> Environment:
        return GymnasiumEpisode(
            lambda: self._made(self._mode), self._settings, self._shown, self._actions, self._start, self._mode
        )

    def _made(self, mode: str | None) -> Any:
        import gymnasium

        see_working_folder()
        given = {"render_mode": mode} if mode is not None else {}
        try:
            return gymnasium.make(self._settings.id, **{**given, **self._settings.arguments})
        except gymnasium.error.UnregisteredEnv as error:
            raise UserError(
                str(error), where=f"{self._where}.id", mend="`gymnasium.pprint_registry()` lists all"
            ) from error
        except ModuleNotFoundError as error:
            raise UserError(
                f"{self._settings.id} needs the module {error.name!r}, which is not there",
                where=f"{self._where}.id",
                mend="install it, or start strop in the folder that holds it",
            ) from error
        except Exception as error:
            raise UserError(
                f"{self._settings.id} cannot be made: {error}",
                where=f"{self._where}.arguments",
                mend="see what gymnasium.make says of these arguments",
            ) from error

    def _named(self, space: Any) -> tuple[Actions | None, int]:
        """The actions, None where an action is any text, and the number of the first one."""
        from gymnasium import spaces

        names = self._settings.actions
        if isinstance(space, spaces.Text):
            if names is None:
                return None, 0
            raise UserError("actions that are texts have no names", where=f"{self._where}.actions", mend="remove it")
        if not isinstance(space, spaces.Discrete):
            raise UserError(
                f"the actions of {self._settings.id} are {space}, which cannot be written as a text",
                where=f"{self._where}.id",
                mend="use an environment with Discrete or Text actions, or wrap it in one of your own (kind: python)",
            )
        count, start = int(space.n), int(space.start)
        if names is not None and len(names) != count:
            raise UserError(
                f"{self._settings.id} has {count} actions, and {len(names)} names are given",
                where=f"{self._where}.actions",
                mend=f"give {count} names, in the order of the numbers",
            )
        shown = names if names is not None else [str(number) for number in range(start, start + count)]
        return Actions(shown, take=self._settings.take), start


class GymnasiumEpisode:
    """One episode. What Gymnasium does may block, so every call runs in a thread of its own."""

    def __init__(
        self,
        make: Callable[[], Any],
        settings: GymnasiumEnvironment,
        shown: Shown,
        actions: Actions | None,
        start: int,
        mode: str | None,
    ) -> None:
        self._make = make
        self._settings = settings
        self._shown = shown
        self._actions = actions
        self._start = start
        self._mode = mode
        self._world: Any = None
        self._steps = 0
        self._busy = self._left = False

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        seed = seed_of(row, self._settings.seed)

        def begin() -> str:
            self._world = self._make()
            observation, _ = self._world.reset(seed=seed)
            return self._text(observation)

        return self._shown.opening(row, await self._blocking(begin))

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        action: Any = turn.text
        if self._actions is not None:
            number = self._actions.find(turn.text)
            if number is None:
                return self._shown.malformed(f"The actions are {', '.join(self._actions.names)}.")
            action = self._start + number
        elif not self._world.action_space.contains(turn.text):
            return self._shown.malformed(f"An action is a text of {self._world.action_space}.")

        def act() -> tuple[str, float, bool, bool]:
            observation, reward, terminated, truncated, _ = self._world.step(action)
            return self._text(observation), float(reward), bool(terminated), bool(truncated)

        text, reward, terminated, truncated = await self._blocking(act)
        self._steps += 1
        if terminated or truncated:
            return Done(reward=reward, truncated=not terminated)
        return self._shown.answer(text, reward, self._steps)

    async def close(self) -> None:
        self._left = True
        # A call that nobody waits for any more closes behind itself.
        if self._world is not None and not self._busy:
            world, self._world = self._world, None
            await call(world.close, name="gymnasium")

    async def _blocking(self, work: Callable[[], T]) -> T:
        def watched() -> T:
            self._busy = True
            try:
                return work()
            finally:
                self._busy = False
                if self._left and self._world is not None:
                    self._world.close()

        return await call(watched, name="gymnasium")

    def _text(self, observation: Any) -> str:
        return picture(str(self._world.render())) if self._mode is not None else plain(observation)
