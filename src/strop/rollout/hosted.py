"""Hosting an environment that drives itself (`environments/driven.py`): it asks for tokens, and all that is sampled for
it is noted; from these notes, and from nothing else, the episode is written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from strop.environments import checks
from strop.environments.driven import Driven, Driver, Path, Policy, Sampled
from strop.rollout.asking import Failed, own_copy, too_long
from strop.rollout.calls import Raised, TooLong, result, start, stop
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.episode import Episode, Status, TurnId
from strop.rollout.world import PromptLike, Speaker, World


@dataclass(frozen=True)
class _Note:
    """One request and what came of it."""

    given: tuple[int, ...]
    result: SampleResult


class Host:
    """The policy of one episode, as its driver sees it, and the writer of the episode; see `driven.Policy`.

    Requests of one episode are met one after the other, so that they share its budget and their draws follow from
    their order.
    """

    def __init__(
        self,
        speaker: Speaker,
        world: World,
        episode: Episode,
        prompt: PromptLike,
        settings: SampleSettings,
        stream: tuple[int, ...],
    ) -> None:
        tokenizer: Any = speaker.tokenizer
        self.prompt, self.tokens = own_copy(prompt.prompt), list(prompt.tokens)
        self.answer, self.row = own_copy(prompt.answer), own_copy(prompt.row)
        self.rendered = getattr(prompt, "text", None) or tokenizer.decode(self.tokens, skip_special_tokens=False)
        self.max_new_tokens, self.temperature, self.stop = settings.max_new_tokens, settings.temperature, settings.stop
        self.context, self.tokenizer = world.context, tokenizer
        self.renderer, self.end_ids = world.renderer, world.end_ids
        self.group, self.sample_index = episode.group, episode.sample
        # The streams of evaluations begin below zero, those of training with the number of a group.
        self.evaluation = stream[0] < 0
        self._engine = speaker.engine
        self._world = world
        self._limits = world.settings
        self._episode = episode
        self._settings = settings
        self._stream = stream
        self._notes: list[_Note] = []
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._moved = asyncio.Event()

    async def play(self, driver: Driver) -> None:
        """Let the driver play, and write what it says into the episode, up to its status. What the engine raises is
        raised."""
        limit = self._limits.episode_timeout
        try:
            async with asyncio.timeout(limit) as scope:
                await self._play(driver)
        except Failed as failure:
            failure.mark(self._episode)
        except TimeoutError:
            if not scope.expired():
                raise
            too_long(limit).mark(self._episode)
        finally:
            await self._world.home.close(driver)

    async def _play(self, driver: Driver) -> None:
        """The same, without its limit.

        Raises:
            Failed: the driver failed, took too long, or claims what was not sampled.
        """
        found = await self._watched(driver)
        if any(note.result.finish == "aborted" for note in self._notes):
            self._episode.append_prompt(self.tokens)
            self._episode.status = Status.ABORTED
            return
        if found.error is not None:
            raise Failed(Status.ENVIRONMENT_ERROR, found.error)
        last = self._write(found.paths)
        if found.reward is not None:
            self._episode.turn_rewards[last] = float(found.reward) + self._episode.turn_rewards.get(last, 0.0)
        self._episode.completion = found.text if found.text is not None else self._text(self._notes[-1].result.tokens)
        self._episode.messages = found.messages
        self._episode.status = Status(found.finish)

    async def sample(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Sampled:
        """See `driven.Policy.sample`."""
        given = tuple(int(token) for token in tokens)
        if not given:
            raise ValueError("there are no tokens to go on behind")
        self._waiting += 1
        self._moved.set()
        try:
            async with self._turn:
                room = self._room(len(given))
                room = room if max_new_tokens is None else min(room, max_new_tokens)
                if room < 1:
                    return Sampled([], [], [], "length")
                number = len(self._notes)
                settings = replace(
                    self._settings,
                    max_new_tokens=room,
                    stop=tuple(dict.fromkeys((*self._settings.stop, *stop))),
                )
                stream = (*self._stream, -number) if number else self._stream
                # What environments are given, and compared with what they say, is plain.
                result = (await self._engine.generate(SampleRequest(given, settings, stream))).plain()
                self._notes.append(_Note(given, result))
                return Sampled(
                    list(result.tokens),
                    list(result.logprobs),
                    list(result.versions),
                    result.finish,
                    self._text(result.tokens),
                )
        finally:
            self._waiting -= 1
            self._moved.set()

    def _text(self, tokens: Sequence[int] | np.ndarray) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _room(self, given: int) -> int:
        """Tokens that the next request may have."""
        limits = self._limits
        if len(self._notes) >= limits.max_turns:
            return 0
        used = sum(len(note.result.tokens) for note in self._notes)
        room = min(self.max_new_tokens - used, self.context - given)
        if limits.max_turn_tokens != "auto":
            room = min(room, limits.max_turn_tokens)
        if limits.max_tokens != "auto":
            first = len(self._notes[0].given) if self._notes else given
            room = min(room, limits.max_tokens - (given - first))
        return room

    async def _watched(self, driver: Driver) -> Driven:
        """What the driver says; its own time, between requests, is bounded by `step_timeout`."""
        limit = self._limits.step_timeout
        name = f"{type(driver).__name__}.drive"
        work = start(lambda: driver.drive(cast(Policy, self)), checks.driven)
        moved: asyncio.Future[Any] | None = None
        try:
            while not work.done():
                self._moved.clear()
                moved = asyncio.ensure_future(self._moved.wait())
                await asyncio.wait(
                    {work, moved}, timeout=None if self._waiting else limit, return_when=asyncio.FIRST_COMPLETED
                )
                in_time = moved.done()
                moved.cancel()
                if not work.done() and not in_time and not self._waiting:
                    raise self._world.failure(TooLong(), driver, name)
            return result(work)
        except Raised as error:
            raise self._world.failure(error, driver, name) from error
        finally:
            if moved is not None:
                moved.cancel()
            if not work.done():
                await stop(work, limit)

    def _write(self, paths: Sequence[Path]) -> TurnId:
        """Write the episode; returns its last sampled turn."""
        taken: set[tuple[int, int]] = set()
        last: TurnId | None = None
        for path in paths:
            written = self._write_path(path, taken)
            if written is not None:
                last = written
                if path.reward is not None:
                    self._episode.turn_rewards[written] = float(path.reward)
        if last is None:
            raise Failed(Status.ENVIRONMENT_ERROR, "the environment says of no sampled token that it is to be trained")
        return last

    def _write_path(self, path: Path, taken: set[tuple[int, int]]) -> TurnId | None:
        """One path; its last sampled turn, None where all of it is trained in others."""
        tokens = [int(token) for token in path.tokens]
        if len(path.trained) != len(tokens) - path.prompt or not 0 < path.prompt <= len(tokens):
            raise Failed(
                Status.ENVIRONMENT_ERROR,
                f"{len(path.trained)} marks for {len(tokens)} tokens of which {path.prompt} are the prompt",
            )
        origins = self._origins(tokens)
        wanted = [False] * path.prompt + [bool(mark) for mark in path.trained]
        for at, (mark, origin) in enumerate(zip(wanted, origins, strict=True)):
            if mark and origin is None:
                raise Failed(
                    Status.ENVIRONMENT_ERROR,
                    f"token {at - path.prompt} of the response ({tokens[at]}) is marked as trained, and the policy did "
                    "not sample it behind the tokens before it: text that is tokenised again gives other tokens; take "
                    "the ids that were sampled",
                )
        trained = [mark and origin not in taken for mark, origin in zip(wanted, origins, strict=True)]
        if not any(trained):
            return None
        taken.update(origin for mark, origin in zip(trained, origins, strict=True) if mark and origin is not None)
        first = max(path.prompt, trained.index(True))
        turn = self._episode.append_prompt(tokens[:first])
        last: TurnId | None = None
        at = first
        while at < len(tokens):
            end = at + 1
            note = origins[at][0] if trained[at] and origins[at] is not None else None  # type: ignore[index]
            while end < len(tokens) and trained[end] == trained[at] and (not trained[at] or _follows(origins, end)):
                end += 1
            if note is None:
                turn = self._episode.append_observation(tokens[at:end], parent=turn)
            else:
                turn = last = self._append(note, origins[at][1], tokens[at:end], turn)  # type: ignore[index]
            at = end
        return last

    def _append(self, note: int, begin: int, tokens: list[int], parent: TurnId) -> TurnId:
        result = self._notes[note].result
        end = begin + len(tokens)
        return self._episode.append_sampled(
            result.tokens[begin:end],
            result.logprobs[begin:end],
            result.versions[begin:end],
            parent=parent,
            finish=result.finish if end == len(result.tokens) else "stop",
        )

    def _origins(self, tokens: list[int]) -> list[tuple[int, int] | None]:
        """For each token, where it was sampled behind exactly those before it: (request, position); None where not."""
        found: list[tuple[int, int] | None] = [None] * len(tokens)
        for number, note in enumerate(self._notes):
            start = len(note.given)
            if start >= len(tokens) or tuple(tokens[:start]) != note.given:
                continue
            for position, token in enumerate(note.result.tokens):
                at = start + position
                if at >= len(tokens) or tokens[at] != token:
                    break
                if found[at] is None:
                    found[at] = (number, position)
        return found


def _follows(origins: Sequence[tuple[int, int] | None], at: int) -> bool:
    """Whether a token was sampled right behind the one before it, in the same request."""
    here, before = origins[at], origins[at - 1]
    return here is not None and before is not None and here == (before[0], before[1] + 1)
