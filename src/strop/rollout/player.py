"""How an episode is played: the policy's turns by the engine, the answers by an environment, all into the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from strop.config.environment import AnyEnvironment
from strop.environments.conversation import Conversation
from strop.environments.driven import Driver
from strop.environments.protocol import Done, Environment, EnvironmentFactory, Observation, PolicyTurn
from strop.errors import StropError
from strop.rollout.engine import Engine, SampleRequest, SampleSettings
from strop.rollout.episode import Episode, Status, TurnId
from strop.rollout.hosted import Failed, Host

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


class Player:
    """Plays episodes: one turn each without a world, else as many as the environment asks for.

    An environment that fails, or takes too long, gives its episode the status `environment_error` or `timeout`; what
    the engine raises is raised.
    """

    def __init__(self, engine: Engine, tokenizer: Detokenizer, world: World | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._world = world

    async def play(
        self, episode: Episode, prompt: PromptLike, settings: SampleSettings, stream: tuple[int, ...]
    ) -> None:
        """Fill an episode, up to its status.

        Args:
            settings: how tokens are drawn; `max_new_tokens` bounds all turns together. stream: keys the draws of the
                first turn; turn t is keyed by `(*stream, -t)`.
        """
        if self._world is None:
            turn = episode.append_prompt(prompt.tokens)
            _, finish = await self._sample(episode, turn, prompt.tokens, settings, stream)
            episode.status = Status(finish)
            return
        settings = replace(settings, stop=(*settings.stop, *self._world.factory.stop))
        environment = self._world.factory.make()
        try:
            if hasattr(environment, "ready"):
                await environment.ready()
            async with asyncio.timeout(self._world.settings.episode_timeout):
                if isinstance(environment, Driver):
                    await self._host(environment, episode, prompt, settings, stream)
                else:
                    await _Game(self, self._world, environment, episode, prompt, settings, stream).play()
        except TimeoutError:
            _fail(episode, Status.TIMEOUT, f"the episode took longer than {self._world.settings.episode_timeout:g} s")
        finally:
            await _closed(environment, self._world.settings.step_timeout)

    async def _host(
        self, driver: Driver, episode: Episode, prompt: PromptLike, settings: SampleSettings, stream: tuple[int, ...]
    ) -> None:
        assert self._world is not None
        host = Host(self._engine, self._tokenizer, self._world, episode, prompt, settings, stream)
        try:
            await host.play(driver)
        except Failed as failure:
            _fail(episode, failure.status, failure.detail)

    async def _sample(
        self, episode: Episode, parent: TurnId, tokens: Sequence[int], settings: SampleSettings, stream: tuple[int, ...]
    ) -> tuple[TurnId, str]:
        """(turn, how it ended) of one sampled turn; its text becomes the episode's completion."""
        result = await self._engine.generate(SampleRequest(tuple(tokens), settings, stream))
        turn = episode.append_sampled(
            result.tokens, result.logprobs, result.versions, parent=parent, finish=result.finish
        )
        episode.completion = self._tokenizer.decode(result.tokens, skip_special_tokens=True)
        return turn, result.finish


@dataclass
class _Game:
    """One episode of several turns."""

    player: Player
    world: World
    environment: Environment
    episode: Episode
    prompt: PromptLike
    settings: SampleSettings
    stream: tuple[int, ...]

    async def play(self) -> None:
        try:
            opening = await self._answer(self.environment.reset(self.prompt.row))
            conversation = self._conversation(opening)
            place = self.episode.append_prompt(conversation.begin())
            conversation.place(place)
            await self._turns(conversation, place)
        except Failed as failure:
            _fail(self.episode, failure.status, failure.detail)

    async def _turns(self, conversation: Conversation, place: TurnId) -> None:
        first = len(self.episode.turns[place].tokens)
        finish = "length"
        for number in range(self.world.settings.max_turns):
            path = self.episode.path_tokens(place)
            room = self._room(len(path), first)
            if room < 1:
                finish = "length"
                break
            stream = (*self.stream, -number) if number else self.stream
            settings = replace(self.settings, max_new_tokens=room)
            turn, finish = await self.player._sample(self.episode, place, path, settings, stream)
            if finish == "aborted":
                break
            said = PolicyTurn(self.episode.completion, finish, number)  # type: ignore[arg-type]
            answer = await self._answer(self.environment.step(said))
            if answer.reward is not None:
                self.episode.turn_rewards[turn] = float(answer.reward)
            if isinstance(answer, Done):
                conversation.said(said.text, self.episode.turns[turn].tokens.tolist(), turn)
                if answer.error is not None:
                    raise Failed(Status.ENVIRONMENT_ERROR, answer.error)
                finish = "length" if answer.truncated else finish
                break
            conversation.said(said.text, self.episode.turns[turn].tokens.tolist(), turn, answer.turn)
            place = self._observe(conversation, answer)
            # The policy has not had the last word: were there no turn left, the episode is cut short.
            finish = "length"
        self.episode.messages = conversation.messages
        self.episode.status = Status(finish)

    def _observe(self, conversation: Conversation, answer: Observation) -> TurnId:
        try:
            found = conversation.extend(answer.messages)
        except StropError as error:
            raise Failed(Status.ENVIRONMENT_ERROR, str(error)) from error
        if found.parent is None:
            place = self.episode.append_prompt(found.tokens)
        else:
            role = str(answer.messages[0]["role"]) if answer.messages else "user"
            place = self.episode.append_observation(found.tokens, parent=found.parent, role=role)
        conversation.place(place)
        return place

    def _conversation(self, opening: Sequence[Mapping[str, Any]] | None) -> Conversation:
        given = self.prompt.prompt if opening is None else list(opening)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        chat = self.world.renderer.renders_chat(given)
        return Conversation(
            self.world.renderer,
            messages,
            chat=chat,
            end_ids=self.world.end_ids,
            keep_history=self.world.settings.keep_history,
            where=self.prompt.prompt_id,
        )

    def _room(self, path: int, first: int) -> int:
        """Tokens that the next turn may have."""
        limits = self.world.settings
        room = min(self.settings.max_new_tokens - self.episode.sampled_tokens(), self.world.context - path)
        if limits.max_turn_tokens != "auto":
            room = min(room, limits.max_turn_tokens)
        if limits.max_tokens != "auto":
            room = min(room, limits.max_tokens - (path - first))
        return room

    async def _answer(self, work: Awaitable[T]) -> T:
        """What the environment says, within its time; its failures are the episode's."""
        limit = self.world.settings.step_timeout
        try:
            return await asyncio.wait_for(work, limit)
        except TimeoutError:
            raise Failed(Status.TIMEOUT, f"the environment took longer than {limit:g} s for one answer") from None
        except StropError:
            raise
        except Exception as error:
            raise Failed(Status.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}") from error


def _fail(episode: Episode, status: Status, detail: str) -> None:
    episode.status, episode.detail, episode.failed = status, detail, ENVIRONMENT


async def _closed(environment: Environment, limit: float) -> None:
    """Close an environment; one that fails at that does not undo an episode that is played."""
    try:
        await asyncio.wait_for(environment.close(), limit)
    except Exception:
        return
