"""Past groups in the loop (`rollout.window.past`): what joins a step's own groups, and what is told of it.

The own groups of a step are what admission, dynamic sampling, the curriculum, the alarms and the metrics of rewards are
about. Past groups join them where the batch is laid out, and leave their mark on what is recorded of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.config import Config
from strop.errors import RunFailure
from strop.loops.step_batch import Chosen
from strop.rollout.episode import Episode, Group
from strop.rollout.kept_groups import as_arrays, from_arrays
from strop.rollout.past_groups import PastGroup, PastGroups, oldest_version
from strop.rollout.segments import Trained
from strop.tracking.episodes import EpisodeColumns


class Past:
    """The past groups of a run, and those of the step that was begun last.

    baselines: the most likely completions that its past groups are compared with, by group number.
    """

    def __init__(self, config: Config) -> None:
        self._settings = config.rollout.window.past
        self._staleness = config.rollout.max_staleness
        self._correct_at = 1.0 if config.rewards is None else config.rewards.correct_at
        self._groups = None if self._settings is None else PastGroups(self._settings, seed=config.run.seed)
        self._numbers: frozenset[int] = frozenset()
        self._given: list[PastGroup] | None = None
        self.baselines: dict[int, Episode] = {}

    def join(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups of a step with its past groups among them, evenly, so that each mini-batch gets its share."""
        drawn = self._given
        if drawn is None:
            drawn = [] if self._groups is None else self._groups.draw(step)
        self._numbers = frozenset(one.number for one in drawn)
        self.baselines = {one.number: one.baseline for one in drawn if one.baseline is not None}
        past = [one.group for one in drawn]
        places = [((at + 0.5) / len(part), part[at]) for part in (groups, past) for at in range(len(part))]
        return [group for _, group in sorted(places, key=lambda place: place[0])]

    def give(self, groups: Sequence[Group], baselines: Mapping[int, Episode]) -> None:
        """Let these be the past groups of the next step, which was trained before with them."""
        self._given = [PastGroup(g, baselines.get(g.number), 0, 0.0, 0.0) for g in groups]

    def keep(
        self, chosen: Chosen, baselines: Mapping[int, Episode], trained: Trained, batch: TokenBatch
    ) -> dict[str, float]:
        """Keep what is trained now for the first time; returns metrics. Call it once there are advantages."""
        if self._groups is None:
            return {}
        found = {} if chosen.silent else _by_group(chosen.trained)
        advantages = _mean_advantages(trained, batch)
        self._groups.trained_again({n: advantages[n] for n in found if n in self._numbers})
        self._groups.add(
            [
                PastGroup(
                    group,
                    baselines.get(number),
                    oldest_version(group),
                    advantages[number],
                    self._pass_rate(group),
                )
                for number, group in found.items()
                if number not in self._numbers and any(e.sampled_tokens() for e in group.episodes)
            ]
        )
        return {"window/past_kept": float(len(self._groups.kept)), "window/past_share": self._share(found)}

    def fresh(self, trained: Trained) -> set[int]:
        """The numbers of the groups of a batch that were not trained before."""
        return {episode.group for episode in trained.episodes} - self._numbers

    def check(self, batch: TokenBatch, trained: Trained, step: int) -> dict[str, float]:
        """How old the tokens of a batch are that is trained with this version: metrics.

        Raises:
            RunFailure: a token is older than the recipe allows.
        """
        fresh, past = (_ages(step, versions) for versions in self._versions(batch, trained))
        bounds = (self._staleness, self._settings.max_age if self._settings is not None else 0)
        for ages, bound in zip((fresh, past), bounds, strict=True):
            if ages is not None and not 0 <= ages.least <= ages.most <= bound:
                raise RunFailure(
                    f"a token of this step is {ages.most} versions old, and at most {bound} is allowed",
                    mend="this is a fault of strop; please report it",
                )
        found = {} if fresh is None else {"staleness/max": float(fresh.most), "staleness/mean": fresh.mean}
        return found | ({} if past is None else {"window/past_age_mean": past.mean})

    def mark(self, episodes: EpisodeColumns) -> EpisodeColumns:
        """The episodes of a step; those of past groups say so."""
        episodes.values["past"] = [number in self._numbers for number in episodes.values["group"]]
        return episodes

    def arrays(self) -> dict[str, np.ndarray] | None:
        """What a checkpoint keeps; None for nothing."""
        return None if self._groups is None else as_arrays(self._groups.kept)

    def load(self, path: Path) -> None:
        """Go on with what a checkpoint kept, if there is such a file."""
        if self._groups is not None and path.exists():
            self._groups.take_back(from_arrays(load_arrays(path)))

    def _share(self, found: Mapping[int, Group]) -> float:
        return sum(number in self._numbers for number in found) / max(len(found), 1)

    def _pass_rate(self, group: Group) -> float:
        passed = [e.reward >= self._correct_at if e.correct is None else e.correct for e in group.episodes]
        return sum(passed) / len(passed)

    def _versions(self, batch: TokenBatch, trained: Trained) -> tuple[np.ndarray, np.ndarray]:
        """[T] int32 of the sampled tokens of the step's own groups, and of those of past groups; -1 elsewhere."""
        versions: np.ndarray = batch.versions.numpy()
        if not self._numbers:
            return versions, versions[:0]
        past = self._past_tokens(trained, batch).numpy()
        nobody = np.int32(-1)
        return np.where(past, nobody, versions), np.where(past, versions, nobody)

    def _past_tokens(self, trained: Trained, batch: TokenBatch) -> Tensor:
        """[T] bool."""
        return torch.tensor([episode.group in self._numbers for episode in trained.episodes], dtype=torch.bool)[
            batch.seq_ids
        ]


class _Ages(NamedTuple):
    least: int
    most: int
    mean: float


def _ages(step: int, versions: np.ndarray) -> _Ages | None:
    """Steps between tokens and the one that trains them; None without any. versions: int32, -1 where it is of none."""
    newest = int(versions.max(initial=-1))
    if newest < 0:
        return None
    # Without a sign -1 is the largest number there is.
    oldest = int(versions.view(np.uint32).min())
    # Most steps train tokens of one version.
    mean = float(step - oldest) if oldest == newest else step - float(versions[versions >= 0].mean())
    return _Ages(step - newest, step - oldest, mean)


def _by_group(episodes: Sequence[Episode]) -> dict[int, Group]:
    """What of each group is trained."""
    found: dict[int, Group] = {}
    for episode in episodes:
        found.setdefault(episode.group, Group(episode.group, episode.prompt_id, [])).episodes.append(episode)
    return found


def _mean_advantages(trained: Trained, batch: TokenBatch) -> dict[int, float]:
    """Mean of |advantage| over the trained tokens of each group."""
    assert batch.advantages is not None
    sizes = batch.advantages.abs().double().where(batch.loss_mask, 0.0)
    count = torch.zeros(batch.sequences, dtype=torch.float64)
    sums = count.index_add(0, batch.seq_ids, sizes).tolist()
    counts = count.index_add(0, batch.seq_ids, batch.loss_mask.double()).tolist()
    totals: dict[int, tuple[float, float]] = {}
    for episode, total, tokens in zip(trained.episodes, sums, counts, strict=True):
        before = totals.get(episode.group, (0.0, 0.0))
        totals[episode.group] = (before[0] + total, before[1] + tokens)
    return {number: total / max(tokens, 1.0) for number, (total, tokens) in totals.items()}
