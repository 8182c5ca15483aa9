"""How an episode is played: the policy's turns by the engine, the answers by an environment, all into the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from strop.config.rollout import TreeSettings
from strop.environments.driven import Driver
from strop.models.detokenizing import detokenizer
from strop.rollout.asking import Failed, Home
from strop.rollout.engine import SampleRequest, SampleResult, Samples, SampleSettings
from strop.rollout.episode import ENDED, Episode, append_prompts
from strop.rollout.game import Game
from strop.rollout.hosted import Host
from strop.rollout.match import SelfPlay
from strop.rollout.together import all_or_none, sample_all
from strop.rollout.world import Detokenizer, PromptLike, Speaker, World


class Part(NamedTuple):
    """An episode that is to be played.

    settings: how tokens are drawn; `max_new_tokens` bounds all turns together. stream: keys the draws of the first
    turn; those of later turns begin with it and go on with a negative number. tree: where the episode branches.
    """

    episode: Episode
    settings: SampleSettings
    stream: tuple[int, ...]
    tree: TreeSettings | None = None


class Player:
    """Plays episodes: one turn each without a world, else as many as the environment asks for.

    An environment that fails, or takes too long, gives its episode the status `environment_error` or `timeout`; what
    the engine raises is raised.
    """

    def __init__(self, engine: Samples, tokenizer: Detokenizer, world: World | None = None) -> None:
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
        """What `play_all` returns of a single episode; the arguments are those of `Part`."""
        return (await self.play_all([Part(episode, settings, stream, tree)], prompt))[0]

    async def play_all(
        self, parts: Sequence[Part], prompt: PromptLike, ended: Callable[[Part], None] = lambda part: None
    ) -> list[list[Episode]]:
        """Fill episodes of one prompt, up to their status.

        Args:
            ended: told of each when nothing more is sampled of it.

        Returns:
            Of each the episode, or all that it became: the leaves of its tree, or the roles of its match. Their sample
            numbers are those of the episode and up to `most()` after it. Where environments live in other processes it
            may be another object than the one given.
        """
        if self._world is None:
            return await self._single_turns(parts, prompt, ended)

        async def one(part: Part, world: World) -> list[Episode]:
            played = await self._with_world(part, prompt, world)
            ended(part)
            return played

        return await all_or_none([one(part, self._world) for part in parts])

    async def _single_turns(
        self, parts: Sequence[Part], prompt: PromptLike, ended: Callable[[Part], None]
    ) -> list[list[Episode]]:
        """One turn each. All are written once the last is there: nobody asks for a part of a group."""
        tokens = tuple(prompt.tokens)
        episodes = [part.episode for part in parts]
        append_prompts(episodes, tokens)

        requests = [SampleRequest(tokens, part.settings, part.stream) for part in parts]
        found: dict[int, SampleResult] = {}

        def there(at: int, result: SampleResult) -> None:
            found[at] = result
            ended(parts[at])

        await sample_all(self._speaker.engine, requests, there)
        results = [found[at] for at in range(len(parts))]
        self._speaker.write([(episode, len(episode.turns) - 1) for episode in episodes], results)
        for episode, result in zip(episodes, results, strict=True):
            episode.status = ENDED[result.finish]
        return [[episode] for episode in episodes]

    async def _with_world(self, part: Part, prompt: PromptLike, world: World) -> list[Episode]:
        """As many turns as the environment asks for."""
        episode, stream, tree = part.episode, part.stream, part.tree
        if tree is not None:
            episode.branch = (episode.sample,)
        settings = replace(part.settings, stop=(*part.settings.stop, *world.factory.stop))

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
