"""An episode of several turns with an environment, and the branches that it may have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from strop.config.rollout import TreeSettings
from strop.environments import checks
from strop.environments.conversation import Conversation
from strop.environments.protocol import Done, Environment, Observation, PolicyTurn
from strop.errors import StropError
from strop.rollout.asking import Failed, own_copy, too_long
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode, Status, TurnId
from strop.rollout.together import all_or_none, cancel
from strop.rollout.world import PromptLike, Speaker, World


@dataclass(frozen=True)
class _State:
    """Where a path is: what has been said, where the next turn goes, its number, and tokens of the first prompt."""

    conversation: Conversation
    place: TurnId
    number: int
    first: int


@dataclass
class Game:
    """One path of an episode, from the beginning or from a branching to its end.

    settings: how turns are drawn; `max_new_tokens` bounds all turns of the path together. stream: keys the draws of the
    first turn; turn t is keyed by `(*stream, -t)`, and branch b before turn t by what follows from `(*stream, -t, b)`.
    deadline: of the whole tree, in the event loop's time. start: None from the beginning.
    """

    speaker: Speaker
    world: World
    environment: Environment
    episode: Episode
    prompt: PromptLike
    settings: SampleSettings
    stream: tuple[int, ...]
    deadline: float
    tree: TreeSettings | None = None
    start: _State | None = None
    _forks: list[asyncio.Task[list[Episode]]] = field(default_factory=list)

    async def play(self) -> list[Episode]:
        """The episode, up to its status, and those that branched off it.

        Raises:
            Whatever the engine raised.
        """
        try:
            await self._own_path()
            return [self.episode, *chain.from_iterable(await all_or_none(self._forks))]
        except BaseException:
            await cancel(self._forks)
            raise

    async def _own_path(self) -> None:
        try:
            async with asyncio.timeout_at(self.deadline) as limit:
                await self._turns(self.start or await self._begin())
        except Failed as failure:
            failure.mark(self.episode)
        except TimeoutError:
            if not limit.expired():
                raise
            too_long(self.world.settings.episode_timeout).mark(self.episode)
        finally:
            await self.world.home.close(self.environment)

    async def _begin(self) -> _State:
        opening = await self.world.home.ask(self.environment, "reset", own_copy(self.prompt.row), check=checks.opening)
        conversation = self._conversation(opening)
        place = begin_reading(self.episode, conversation)
        return _State(conversation, place, 0, len(self.episode.turns[place].tokens))

    async def _turns(self, state: _State) -> None:
        conversation, place, first = state.conversation, state.place, state.first
        finish = "length"
        for number in range(state.number, self.world.settings.max_turns):
            await self._branch(_State(conversation, place, number, first))
            path = self.episode.path_tokens(place)
            room = self._room(len(path), first)
            if room < 1:
                # Only the first: an observation that leaves no room is not appended.
                raise Failed(Status.ENVIRONMENT_ERROR, f"its first messages, of {len(path)} tokens, leave no room")
            stream = (*self.stream, -number) if number else self.stream
            settings = replace(self.settings, max_new_tokens=room)
            turn, finish = await self.speaker.speak(self.episode, place, path, settings, stream)
            if finish == "aborted":
                break
            said = PolicyTurn(self.episode.completion, finish, number)  # type: ignore[arg-type]
            answer = await self.world.home.ask(self.environment, "step", said, check=checks.answer)
            if answer.reward is not None:
                self.episode.turn_rewards[turn] = answer.reward
            tokens = self.episode.turns[turn].tokens.tolist()
            if isinstance(answer, Done):
                conversation.said(said.text, tokens, turn)
                if answer.error is not None:
                    raise Failed(Status.ENVIRONMENT_ERROR, answer.error)
                finish = "length" if answer.truncated else finish
                break
            conversation.said(said.text, tokens, turn, answer.turn)
            next_place = self._observe(conversation, answer, first, more=number + 1 < self.world.settings.max_turns)
            # The policy has not had the last word: were there no turn left, the episode is cut short.
            finish = "length"
            if next_place is None:
                break
            place = next_place
        self.episode.messages = conversation.messages
        self.episode.status = Status(finish)

    async def _branch(self, state: _State) -> None:
        """Let others go on from here, if this is a place to branch at."""
        episode, tree = self.episode, self.tree
        if tree is None or state.number not in tree.at or len(episode.branched) > tree.at.index(state.number):
            return
        leaves = tree.branches ** (len(tree.at) - len(episode.branched) - 1)
        branched = (*episode.branched, len(episode.turns))
        others = await self._forked(tree.branches - 1)
        for branch, environment in enumerate(others, 1):
            other = episode.fork(episode.sample + branch * leaves)
            other.branch, other.branched = (*episode.branch, branch), branched
            game = replace(
                self,
                environment=environment,
                episode=other,
                stream=(*self.stream, -state.number, branch),
                start=replace(state, conversation=state.conversation.fork()),
                _forks=[],
            )
            self._forks.append(asyncio.get_running_loop().create_task(game.play()))
        episode.branch, episode.branched = (*episode.branch, 0), branched

    async def _forked(self, count: int) -> list[Environment]:
        """So many forks of the environment; none is left open if one of them fails."""
        others: list[Environment] = []
        try:
            for _ in range(count):
                others.append(await self.world.home.ask(self.environment, "fork", check=_forked_environment))
        except BaseException:
            for other in others:
                await self.world.home.close(other)
            raise
        return others

    def _observe(self, conversation: Conversation, answer: Observation, first: int, *, more: bool) -> TurnId | None:
        """Append what the policy reads next; nothing, and None, where no turn can follow: it would be read by no one,
        and may be longer than the model's context."""
        role = str(answer.messages[0]["role"]) if answer.messages else "user"
        return observe(
            self.episode,
            conversation,
            answer.messages,
            role,
            lambda path: more and self._room(path, first) >= 1,
        )

    def _room(self, path: int, first: int) -> int:
        return self.world.room(self.episode, path, first, self.settings.max_new_tokens)

    def _conversation(self, opening: Sequence[Mapping[str, Any]] | None) -> Conversation:
        given = self.prompt.prompt if opening is None else list(opening)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        return begin_conversation(self.world, messages, self.prompt, chat=self.world.renderer.renders_chat(given))


def _forked_environment(found: Any) -> Any:
    return checks.environment(found, ("step", "close"))


def begin_conversation(
    world: World, messages: Sequence[Mapping[str, Any]], prompt: PromptLike, *, chat: bool
) -> Conversation:
    """A conversation that the policy is about to begin reading."""
    return Conversation(
        world.renderer,
        [dict(message) for message in messages],
        chat=chat,
        end_ids=world.end_ids,
        keep_history=world.settings.keep_history,
        where=prompt.prompt_id,
    )


def begin_reading(episode: Episode, conversation: Conversation) -> TurnId:
    """Append the first messages of a conversation; returns where the policy's first turn goes.

    Raises:
        Failed: there is nothing to read, or the chat template refuses the messages.
    """
    try:
        tokens = conversation.begin()
    except StropError as error:
        raise Failed(Status.ENVIRONMENT_ERROR, str(error)) from error
    if not tokens:
        raise Failed(Status.ENVIRONMENT_ERROR, "its first messages hold no tokens")
    place = episode.append_prompt(tokens)
    conversation.place(place)
    return place


def observe(
    episode: Episode, conversation: Conversation, messages: Sequence[Mapping[str, Any]], role: str, fits: Any
) -> TurnId | None:
    """Append new messages behind what the policy has read and written; returns where its next turn goes.

    Args:
        fits: told how many tokens the next turn would follow; if it says no, nothing is appended and None returned.

    Raises:
        Failed: the chat template refuses them.
    """
    try:
        found = conversation.extend([dict(message) for message in messages])
    except StropError as error:
        raise Failed(Status.ENVIRONMENT_ERROR, str(error)) from error
    before = 0 if found.parent is None else len(episode.path_tokens(found.parent))
    if not fits(before + len(found.tokens)):
        return None
    if found.parent is None:
        place = episode.append_prompt(found.tokens)
    else:
        place = episode.append_observation(found.tokens, parent=found.parent, role=role)
    conversation.place(place)
    return place
