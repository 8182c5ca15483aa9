"""The collector: from prompts to a window of finished, scored groups, in order of admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from strop.config.rollout import TreeSettings
from strop.rewards.protocol import Completed, Reward, Scorer
from strop.rollout.admission import Admission
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode, Group, Status
from strop.rollout.player import Part, Player
from strop.rollout.window_order import Readiness
from strop.rollout.windows import Windows
from strop.rollout.world import PromptLike

GREEDY = -1
"""The sample index of a group's most likely completion."""


class Collector(Windows[PromptLike]):
    """Samples and scores groups within what admission allows.

    Args:
        player, scorer: what plays an episode and scores it; without a scorer nothing is scored.
        next_prompts: so many next prompts in the data's order, one for each group, in order of group numbers.
        settings, group_size: how completions are drawn, and how many of each prompt.
        greedy: also sample the most likely completion of each prompt, as a baseline.
        tree: where episodes branch.

    The others are those of `Windows`.
    """

    def __init__(
        self,
        player: Player,
        scorer: Scorer | None,
        next_prompts: Callable[[int], Sequence[PromptLike]],
        *,
        settings: SampleSettings,
        group_size: int,
        admission: Admission,
        progress: Callable[[int, int], None] | None = None,
        worth: Callable[[Group], bool] | None = None,
        max_refills: int = 0,
        order: Readiness | None = None,
        greedy: bool = False,
        tree: TreeSettings | None = None,
    ) -> None:
        self._most = player.most(tree)
        super().__init__(
            next_prompts,
            per_group=group_size * self._most + greedy * player.most(),
            admission=admission,
            progress=progress,
            worth=worth,
            max_refills=max_refills,
            order=order,
        )
        self._player = player
        self._scorer = scorer
        self._settings = settings
        self._group_size = group_size
        self._greedy = greedy
        self._tree = tree

    async def make_group(self, number: int, prompt: PromptLike, attempt: int = 0) -> Group:
        # The draws of another attempt at the same place are others.
        tail = (0, attempt) if attempt else (0,)

        def part(sample: int, settings: SampleSettings, tree: TreeSettings | None) -> Part:
            episode = Episode(number, sample, dict(prompt.row), prompt.prompt_id)
            return Part(episode, settings, (number, sample, *tail), tree)

        parts = [part(sample * self._most, self._settings, self._tree) for sample in range(self._group_size)]
        if self._greedy:
            parts.append(part(GREEDY, replace(self._settings, temperature=0.0), None))
        played = await self._player.play_all(parts, prompt, self._part_ended)
        episodes = list(chain.from_iterable(played[: self._group_size]))
        baseline = list(chain.from_iterable(played[self._group_size :]))
        if self._scorer is not None:
            with self.verifying:
                await score_episodes([*episodes, *baseline], prompt, self._scorer)
        return Group(number, prompt.prompt_id, episodes, baseline[0] if baseline else None)

    def _part_ended(self, part: Part) -> None:
        self._completed(part.episode.group, self._player.most(part.tree))


async def score_episodes(episodes: Sequence[Episode], prompt: PromptLike, scorer: Scorer) -> None:
    """Write rewards into episodes of one prompt; one that could not be verified gets that status and no reward."""
    whole = [episode for episode in episodes if episode.status is not None and episode.status.trainable]
    rewards = await scorer.score([completed_of(episode, prompt) for episode in whole])
    for episode, reward in zip(whole, rewards, strict=True):
        apply_reward(episode, reward)


def apply_reward(episode: Episode, reward: Reward) -> None:
    """Write one reward into its episode."""
    episode.components = dict(reward.components)
    episode.detail, episode.failed = reward.detail, reward.failed
    if reward.status == "ok":
        episode.reward, episode.correct = reward.total, reward.correct
    else:
        episode.status = Status(reward.status)


def reward_of(episode: Episode) -> Reward:
    """What `apply_reward` wrote into an episode."""
    if episode.status is None or episode.status.trainable:
        return Reward(episode.reward, episode.components, episode.correct, detail=episode.detail)
    status: Any = str(episode.status)
    return Reward(episode.reward, episode.components, None, status, episode.detail, episode.failed)


def completed_of(episode: Episode, prompt: PromptLike) -> Completed:
    """An episode as verifiers see it."""
    return Completed(
        prompt=prompt.prompt,
        completion=episode.completion,
        answer=prompt.answer,
        row=episode.row,
        completion_ids=episode.sampled_ids(),
        finish=str(episode.status),
        messages=episode.messages,
        environment_reward=sum(episode.turn_rewards.values()) if episode.turn_rewards else None,
    )
