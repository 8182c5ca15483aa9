"""Groups of completions that were sampled before: the same windows, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from strop.errors import DataError
from strop.rewards.protocol import Scorer
from strop.rollout.admission import Admission
from strop.rollout.collector import GREEDY, score_episodes
from strop.rollout.engine import FinishReason
from strop.rollout.episode import Episode, Group, Status
from strop.rollout.windows import Windows
from strop.rollout.world import PromptLike


class CompletionLike(Protocol):
    """What is needed of a recorded completion; `data.RecordedCompletion` is one, and says what each is."""

    @property
    def row(self) -> dict[str, Any]: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray | None: ...
    @property
    def status(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def correct(self) -> bool | None: ...
    @property
    def components(self) -> dict[str, float]: ...
    @property
    def detail(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...


class GroupLike(Protocol):
    """What is needed of a recorded group; `data.RecordedGroup` is one."""

    @property
    def prompt(self) -> PromptLike: ...
    @property
    def completions(self) -> Sequence[CompletionLike]: ...
    @property
    def baseline(self) -> CompletionLike | None: ...


class RecordedCollector(Windows[GroupLike]):
    """Writes recorded completions into episodes, and scores them if asked.

    A group's number is that of its place in the order of this run, so that a group that comes up again in the next
    epoch is another one. Tokens keep the weight version that they were recorded with.

    Args:
        next_groups: so many next groups in the data's order.
        scorer: scores the completions; None keeps the recorded rewards.
        fingerprint: of the weights that this run starts from.
        greedy: each group needs a baseline.

    The others are those of `Windows`.
    """

    def __init__(
        self,
        next_groups: Callable[[int], Sequence[GroupLike]],
        scorer: Scorer | None,
        *,
        fingerprint: str,
        admission: Admission,
        worth: Callable[[Group], bool] | None = None,
        max_refills: int = 0,
        greedy: bool = False,
    ) -> None:
        super().__init__(next_groups, per_group=0, admission=admission, worth=worth, max_refills=max_refills)
        self._scorer = scorer
        self._fingerprint = fingerprint
        self._greedy = greedy
        self._foreign: dict[int, bool] = {}

    phase = "reading"

    def own(self, groups: Sequence[Group]) -> bool:
        """Whether every completion of some groups of the last window was sampled by the weights of the start."""
        return not any(self._foreign[group.number] for group in groups)

    async def next_window(self, step: int) -> list[Group]:
        self._foreign.clear()
        return await super().next_window(step)

    async def make_group(self, number: int, prompt: GroupLike, attempt: int = 0) -> Group:
        episodes = [self._episode(number, sample, one, prompt) for sample, one in enumerate(prompt.completions)]
        baseline = None
        if self._greedy:
            if prompt.baseline is None:
                raise without_baseline(prompt.prompt.prompt_id)
            baseline = self._episode(number, GREEDY, prompt.baseline, prompt)
        if self._scorer is not None:
            judged = [*episodes, *([] if baseline is None else [baseline])]
            with self.verifying:
                await score_episodes(judged, prompt.prompt, self._scorer)
        self._foreign[number] = any(one.fingerprint != self._fingerprint for one in prompt.completions)
        return Group(number, prompt.prompt.prompt_id, episodes, baseline)

    def _episode(self, number: int, sample: int, recorded: CompletionLike, group: GroupLike) -> Episode:
        episode = Episode(number, sample, dict(recorded.row), group.prompt.prompt_id)
        turn = episode.append_prompt(group.prompt.tokens)
        logprobs = None if recorded.logprobs is None else recorded.logprobs.tolist()
        # Of a completion that failed nobody knows how its turn ended.
        finish = cast(FinishReason, recorded.status)
        episode.append_recorded(recorded.tokens.tolist(), logprobs, recorded.version, parent=turn, finish=finish)
        episode.completion = recorded.text
        episode.status = Status(recorded.status)
        if self._scorer is None:
            # One with an error's status has no reward, and keeps that status.
            episode.reward, episode.correct = recorded.reward, recorded.correct
            episode.components, episode.detail = dict(recorded.components), recorded.detail
        self._completed(number)
        return episode


def without_baseline(where: str) -> DataError:
    """What is said of a group that lacks the greedy completion that the algorithm compares with."""
    return DataError(
        "the algorithm compares with the most likely completion of each prompt, and the group has none",
        where=where,
        mend="Write the rollouts with a recipe of the same algorithm (its rows have the sample -1), or take another "
        "algorithm.",
    )
