"""How an episode is played: the policy's turns by the engine, the answers by an environment, all into the episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from strop.config.rollout import TreeSettings
from strop.environments.driven import Driver
from strop.models.detokenizing import detokenizer
from strop.rollout.asking import Failed, Home
from strop.rollout.engine import Engine, SampleSettings
from strop.rollout.episode import Episode, Status
from strop.rollout.game import Game
from strop.rollout.hosted import Host
from strop.rollout.match import SelfPlay
from strop.rollout.world import Detokenizer, PromptLike, Speaker, World


class Player:
    """Plays episodes: one turn each without a world, else as many as the environment asks for.

    An environment that fails, or takes too long, gives its episode the status `environment_error` or `timeout`; what
    the engine raises is raised.
    """

    def __init__(self, engine: Engine, tokenizer: Detokenizer, world: World | None = None) -> None:
        self._speaker = Speaker(engine, tokenizer, detokenizer(tokenizer))
        self._world = world

    def most(self, tree: TreeSettings | None = None) -> int:
        """Most episodes that one completion becomes: the leaves of a tree, or the roles of a match."""
        if tree is not None:
            return tree.leaves
        return 1 if self._world is None else max(1, len(self._world.factory.roles))

    async def play(
        self,
        episode: Episode,
        prompt: PromptLike,
        settings: SampleSettings,
        stream: tuple[int, ...],
        *,
        tree: TreeSettings | None = None,
    ) -> list[Episode]:
        """Fill an episode, up to its status.

        Args:
            settings: how tokens are drawn; `max_new_tokens` bounds all turns together. stream: keys the draws of the
                first turn; those of later turns begin with it and go on with a negative number.
            tree: where the episode branches.

        Returns:
            The episode, or all that it became: the leaves of its tree, or the roles of its match. Their sample numbers
            are those of the episode and up to `most()` after it. Where environments live in other processes it may be
            another object than the one given.
        """
        world = self._world
        if world is None:
            turn = episode.append_prompt(prompt.tokens)
            _, finish = await self._speaker.speak(episode, turn, prompt.tokens, settings, stream)
            episode.status = Status(finish)
            return [episode]
        if tree is not None:
            episode.branch = (episode.sample,)
        settings = replace(settings, stop=(*settings.stop, *world.factory.stop))

        async def play(home: Home, begun: Episode) -> list[Episode]:
            here = replace(world, elsewhere=home)
            return await self._played(here, begun, prompt, settings, stream, tree)

        try:
            return await world.home.played(stream, episode, play)
        except Failed as failure:
            failure.mark(episode)
            return [episode]

    async def _played(
        self,
        world: World,
        episode: Episode,
        prompt: PromptLike,
        settings: SampleSettings,
        stream: tuple[int, ...],
        tree: TreeSettings | None,
    ) -> list[Episode]:
        """The same, once.

        Raises:
            Failed: there is no environment to play with.
        """
        environment = await world.home.make()
        if world.factory.roles:
            return await SelfPlay(self._speaker, world, environment, episode, prompt, settings, stream).play()
        if isinstance(environment, Driver):
            await Host(self._speaker, world, episode, prompt, settings, stream).play(environment)
            return [episode]
        deadline = asyncio.get_running_loop().time() + world.settings.episode_timeout
        game = Game(self._speaker, world, environment, episode, prompt, settings, stream, deadline, tree)
        return sorted(await game.play(), key=lambda played: played.sample)


__all__ = ["Player", "PromptLike", "World"]
