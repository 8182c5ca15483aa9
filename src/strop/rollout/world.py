"""What episodes of several turns are played with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.config.environment import AnyEnvironment
from strop.environments.protocol import EnvironmentFactory
from strop.models.detokenizing import Detokenize
from strop.rollout.asking import Failed, Home, InProcess
from strop.rollout.calls import Raised, TooLong
from strop.rollout.engine import SampleRequest, SampleResult, Samples, SampleSettings
from strop.rollout.episode import Episode, TurnId, append_samples


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

    factory: what is known of the environments, and what makes them where they live in this process. renderer: of the
    data, which also knows the tools. end_ids: tokens that end a turn of the policy. context: longest sequence of the
    model. elsewhere: where environments live; None for this process.
    """

    factory: EnvironmentFactory
    settings: AnyEnvironment
    renderer: Any
    end_ids: frozenset[int]
    context: int
    elsewhere: Home | None = None

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

    @property
    def home(self) -> Home:
        """Where environments are made and asked."""
        return InProcess(self.factory, self.settings) if self.elsewhere is None else self.elsewhere

    def failure(self, error: Raised | TooLong, asked: Any, name: str) -> Failed:
        """What a call of code in this process failed with, in words; see `InProcess.failure`."""
        return InProcess(self.factory, self.settings).failure(error, asked, name)


@dataclass(frozen=True)
class Speaker:
    """The policy, as it speaks: turns are sampled by the engine and written into episodes."""

    engine: Samples
    tokenizer: Detokenizer
    detokenize: Detokenize

    async def speak(
        self, episode: Episode, parent: TurnId, tokens: Sequence[int], settings: SampleSettings, stream: tuple[int, ...]
    ) -> tuple[TurnId, str]:
        """(turn, how it ended) of one sampled turn; its text becomes the episode's completion."""
        result = await self.engine.generate(SampleRequest(tuple(tokens), settings, stream))
        [turn] = self.write([(episode, parent)], [result])
        return turn, result.finish

    def write(self, places: Sequence[tuple[Episode, TurnId]], results: Sequence[SampleResult]) -> list[TurnId]:
        """Append what was sampled to each of some episodes, behind the turn given; its text becomes the episode's
        completion."""
        turns = append_samples(places, results)
        for (episode, _), turn in zip(places, turns, strict=True):
            episode.completion = self.detokenize(episode.turns[turn].tokens)
        return turns
