"""A match of the policy against itself: an episode for each role, played in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from strop.environments import checks
from strop.environments.conversation import Conversation
from strop.environments.protocol import Done, PolicyTurn
from strop.environments.self_play import ROLE, Match, Move
from strop.rollout.asking import Failed, own_copy, too_long
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode, Status, TurnId
from strop.rollout.game import begin_conversation, begin_reading, observe
from strop.rollout.world import PromptLike, Speaker, World


@dataclass
class _Side:
    """One role: its episode, what it has read and written, and where its next turn goes."""

    episode: Episode
    conversation: Conversation
    place: TurnId
    first: int
    spoken: int = 0
    finish: str = "length"
    last: TurnId | None = None


@dataclass
class SelfPlay:
    """One match.

    settings: how turns are drawn; `max_new_tokens` bounds all turns of a role together. stream: keys the draws; those
    of turn t of role r by `(*stream, -1, r, t)`.
    """

    speaker: Speaker
    world: World
    match: Match
    episode: Episode
    prompt: PromptLike
    settings: SampleSettings
    stream: tuple[int, ...]
    sides: dict[str, _Side] = field(default_factory=dict)

    @property
    def roles(self) -> Sequence[str]:
        """As the factory knows them: sample numbers follow from their order."""
        return self.world.factory.roles

    async def play(self) -> list[Episode]:
        """An episode for each role that had a turn, in order of the roles; their rows have the column `role`.

        Raises:
            Whatever the engine raised.
        """
        failure: Failed | None = None
        try:
            async with asyncio.timeout(self.world.settings.episode_timeout) as limit:
                begin = partial(checks.move, roles=self.roles)
                await self._turns(
                    await self.world.home.ask(self.match, "reset", own_copy(self.prompt.row), check=begin)
                )
        except Failed as found:
            failure = found
        except TimeoutError:
            if not limit.expired():
                raise
            failure = too_long(self.world.settings.episode_timeout)
        finally:
            await self.world.home.close(self.match)
        if failure is not None and not self.sides:
            failure.mark(self.episode)
            return [self.episode]
        played = [self.sides[role] for role in self.roles if role in self.sides]
        for side in played:
            side.episode.messages = side.conversation.messages
            if failure is not None:
                failure.mark(side.episode)
            else:
                side.episode.status = Status(side.finish)
        return [side.episode for side in played]

    async def _turns(self, move: Move) -> None:
        for _ in range(self.world.settings.max_turns):
            side = self._side(move)
            if side is None:
                break
            turn = await self._speak(side, move.role)
            if side.finish == "aborted":
                for other in self.sides.values():
                    other.finish = "aborted"
                return
            said = PolicyTurn(side.episode.completion, side.finish, side.spoken - 1)  # type: ignore[arg-type]
            check = partial(checks.move_or_done, roles=self.roles, begun=list(self.sides))
            answer = await self.world.home.ask(self.match, "step", move.role, said, check=check)
            side.conversation.said(said.text, side.episode.turns[turn].tokens.tolist(), turn)
            if answer.reward is not None:
                side.episode.turn_rewards[turn] = answer.reward
            if isinstance(answer, Done):
                if answer.error is not None:
                    raise Failed(Status.ENVIRONMENT_ERROR, answer.error)
                for other in self.sides.values() if answer.truncated else ():
                    other.finish = "length"
                break
            move = answer
        else:
            for side in self.sides.values():
                side.finish = "length"
        await self._reward()

    def _side(self, move: Move) -> _Side | None:
        """The role whose turn it is, having read what is new to it; None where no turn of it fits."""
        side = self.sides.get(move.role)
        if side is None:
            return self._enter(move)
        place = observe(
            side.episode, side.conversation, move.messages, "user", lambda path: self._room(side, path) >= 1
        )
        if place is None:
            side.finish = "length"
            return None
        side.place = place
        return side

    def _enter(self, move: Move) -> _Side:
        number = list(self.roles).index(move.role)
        row = {**self.prompt.row, ROLE: move.role}
        episode = replace(self.episode.fork(self.episode.sample + number), row=row, role=move.role)
        # What a match says is rendered as the data's prompts are: texts alone need no chat template.
        chat = self.world.renderer.renders_chat(self.prompt.prompt)
        conversation = begin_conversation(self.world, move.messages, self.prompt, chat=chat)
        place = begin_reading(episode, conversation)
        side = _Side(episode, conversation, place, len(episode.turns[place].tokens))
        if self._room(side, side.first) < 1:
            raise Failed(
                Status.ENVIRONMENT_ERROR, f"the first messages of {move.role!r}, {side.first} tokens, leave no room"
            )
        self.sides[move.role] = side
        return side

    async def _speak(self, side: _Side, role: str) -> TurnId:
        path = side.episode.path_tokens(side.place)
        settings = replace(self.settings, max_new_tokens=self._room(side, len(path)))
        stream = (*self.stream, -1, list(self.roles).index(role), side.spoken)
        turn, side.finish = await self.speaker.speak(side.episode, side.place, path, settings, stream)
        side.spoken += 1
        side.last = turn
        return turn

    async def _reward(self) -> None:
        rewards = await self.world.home.ask(self.match, "rewards", check=partial(checks.rewards, roles=self.roles))
        for role, side in self.sides.items():
            if role in rewards and side.last is not None:
                given = side.episode.turn_rewards.get(side.last, 0.0)
                side.episode.turn_rewards[side.last] = given + rewards[role]

    def _room(self, side: _Side, path: int) -> int:
        return self.world.room(side.episode, path, side.first, self.settings.max_new_tokens)
