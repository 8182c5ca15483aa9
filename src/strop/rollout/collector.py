"""The collector: from prompts to a window of finished, scored groups, in order of admission."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from strop.rewards.protocol import Completed, Reward, Scorer
from strop.rollout.admission import Admission
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode, Group, Status
from strop.rollout.player import Player, PromptLike

GREEDY = -1
"""The sample index of a group's most likely completion."""

T = TypeVar("T")


class Collector:
    """Samples and scores groups within what admission allows.

    Args:
        player, scorer: what plays an episode and scores it.
        next_prompt: the next prompt in the data's order; called once for each group, in order of group numbers.
        settings, group_size: how completions are drawn, and how many of each prompt.
        admission: the bound on staleness.
        worth: whether a group is worth training; one that is not is replaced by another prompt's, in the same place of
            the window, at most `max_refills` times. None keeps every group.
        greedy: also sample the most likely completion of each prompt, as a baseline.
    """

    def __init__(
        self,
        player: Player,
        scorer: Scorer,
        next_prompt: Callable[[], PromptLike],
        *,
        settings: SampleSettings,
        group_size: int,
        admission: Admission,
        progress: Callable[[int, int], None] | None = None,
        worth: Callable[[Group], bool] | None = None,
        max_refills: int = 0,
        greedy: bool = False,
    ) -> None:
        self._player = player
        self._scorer = scorer
        self._next_prompt = next_prompt
        self._settings = settings
        self._group_size = group_size
        self.admission = admission
        self._progress = progress
        self._worth = worth
        self._max_refills = max_refills if worth is not None else 0
        self._greedy = greedy
        self._tasks: dict[int, asyncio.Task[Group]] = {}
        self.discarded: list[Group] = []
        """Groups of the last window that were replaced."""
        self.refills = 0
        """How often groups of the last window were replaced."""
        self.baselines: dict[int, Episode] = {}
        """The most likely completion of each group of the last window, by the group's number; with `greedy`."""
        self._completions = self._expected = 0
        self._last_completion = 0.0

    async def next_window(self, step: int) -> list[Group]:
        """The groups that step number `step` (0 for the first) trains, in order of admission.

        Raises:
            Whatever an engine or verifier raised; the other groups are then cancelled.
        """
        first, size = step * self.admission.groups_per_step, self.admission.groups_per_step
        self._completions, self._expected = 0, size * self._per_group
        self.discarded, self.refills = [], 0
        try:
            for number in self.admission.admit(step):
                prompt = self._next_prompt()
                self._tasks[number] = asyncio.get_running_loop().create_task(self._group(number, prompt))
            groups = await asyncio.gather(*(self._tasks[first + n] for n in range(size)))
            groups = await self._replace_worthless(list(groups))
        except BaseException:
            await self.close()
            raise
        for group in groups:
            del self._tasks[group.number]
        self.baselines = {number: episode for number, episode in self.baselines.items() if number >= first}
        return groups

    @property
    def last_completion(self) -> float:
        """`time.perf_counter()` when the last completion of the window was sampled; what follows is verifying."""
        return self._last_completion

    async def close(self) -> None:
        """Cancel what is running."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await _cancel(tasks)

    @property
    def _per_group(self) -> int:
        return self._group_size + self._greedy

    async def _replace_worthless(self, groups: list[Group]) -> list[Group]:
        """Sample other prompts in place of groups that are not worth training: dynamic sampling.

        Each round draws its prompts in order of the places, after the whole window is known, so the data's order does
        not depend on which group was done first. The last group of a place stays, whatever it is.
        """
        while self._worth is not None and self.refills < self._max_refills:
            places = [at for at, group in enumerate(groups) if not self._worth(group)]
            if not places:
                break
            self.refills += 1
            self._expected += len(places) * self._per_group
            again = [self._group(groups[at].number, self._next_prompt(), self.refills) for at in places]
            for at, group in zip(places, await _all_or_none(again), strict=True):
                self.discarded.append(groups[at])
                groups[at] = group
        return groups

    async def _group(self, number: int, prompt: PromptLike, attempt: int = 0) -> Group:
        episodes = [Episode(number, sample, dict(prompt.row), prompt.prompt_id) for sample in range(self._group_size)]
        baseline = [Episode(number, GREEDY, dict(prompt.row), prompt.prompt_id)] if self._greedy else []
        await _all_or_none([self._roll_out(episode, prompt, attempt) for episode in [*episodes, *baseline]])
        await score_episodes([*episodes, *baseline], prompt, self._scorer)
        if baseline:
            self.baselines[number] = baseline[0]
        return Group(number, prompt.prompt_id, episodes)

    async def _roll_out(self, episode: Episode, prompt: PromptLike, attempt: int) -> None:
        # The draws of another attempt at the same place are others.
        stream = (episode.group, episode.sample, 0, *([attempt] if attempt else []))
        settings = replace(self._settings, temperature=0.0) if episode.sample == GREEDY else self._settings
        await self._player.play(episode, prompt, settings, stream)
        self._completions += 1
        self._last_completion = time.perf_counter()
        if self._progress is not None:
            self._progress(self._completions, self._expected)


async def _all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all; when one fails the others are cancelled, which `gather` alone leaves running."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        await _cancel(running)
        raise


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def score_episodes(episodes: Sequence[Episode], prompt: PromptLike, scorer: Scorer) -> None:
    """Write rewards into episodes of one prompt; one that could not be verified gets that status and no reward."""
    whole = [episode for episode in episodes if episode.status is not None and episode.status.trainable]
    rewards = await scorer.score([_completed(episode, prompt) for episode in whole])
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


def _completed(episode: Episode, prompt: PromptLike) -> Completed:
    sampled = [turn for turn in episode.turns if turn.sampled]
    return Completed(
        prompt=prompt.prompt,
        completion=episode.completion,
        answer=prompt.answer,
        row=prompt.row,
        completion_ids=[int(token) for turn in sampled for token in turn.tokens],
        finish=str(episode.status),
        messages=episode.messages,
        environment_reward=sum(episode.turn_rewards.values()) if episode.turn_rewards else None,
    )
