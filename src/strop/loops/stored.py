"""A window that was trained before, from the files of its step: `strop replay` trains it again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from strop.rollout.busy import Busy
from strop.rollout.collector import GREEDY
from strop.rollout.episode import Episode, Group, Status, TurnId
from strop.tracking.episodes import EpisodeRecord, beside, read_episodes


class StoredWindow:
    """The groups of one step, and what was sampled beside them, in the place of a collector.

    past: groups of earlier steps that were trained with them.
    """

    phase = "reading"

    def __init__(self, path: Path) -> None:
        records = sorted(read_episodes(path), key=lambda record: (record.group, record.sample, record.stream))
        self._groups = groups_of([record for record in records if not record.past])
        self.past = groups_of([record for record in records if record.past])
        others = read_episodes(beside(path)) if beside(path).exists() else []
        self.baselines = {r.group: episodes_of([r])[0] for r in others if r.sample == GREEDY}
        self.discarded = groups_of([r for r in others if r.sample != GREEDY])
        places = [group.number for group in self.discarded]
        self.refills = max((places.count(place) for place in set(places)), default=0)
        self.last_completion = 0.0
        self.window_metrics: dict[str, float] = {}
        self.verifying = Busy()

    @property
    def has_baselines(self) -> bool:
        """Whether the most likely completion of each prompt is there."""
        return all(group.number in self.baselines for group in [*self._groups, *self.past])

    def serve(self, version: int) -> None:
        """Nothing is sampled, whatever is served."""

    async def next_window(self, step: int) -> list[Group]:
        """The groups, whatever the step."""
        self.last_completion = time.perf_counter()
        return self._groups

    async def close(self) -> None:
        """Nothing is running."""


def groups_of(records: Sequence[EpisodeRecord]) -> list[Group]:
    """Neighbouring records of a number as a group; a sample that is not after the one before begins another."""
    parts: list[list[EpisodeRecord]] = []
    for record in records:
        last = parts[-1][-1] if parts else None
        follows = last is not None and record.group == last.group
        if last is not None and follows and record.stream == 0 and record.sample <= last.sample:
            follows = False
        if not follows:
            parts.append([])
        parts[-1].append(record)
    return [Group(part[0].group, part[0].prompt_id, list(episodes_of(part))) for part in parts]


def episodes_of(records: Sequence[EpisodeRecord]) -> list[Episode]:
    """The episodes of a group's records, in order; the streams of one follow each other."""
    parts: list[list[EpisodeRecord]] = []
    for record in records:
        if record.stream == 0 or not parts:
            parts.append([])
        parts[-1].append(record)
    return [_episode(part) for part in parts]


def _episode(records: Sequence[EpisodeRecord]) -> Episode:
    first = records[0]
    episode = Episode(
        group=first.group,
        sample=first.sample,
        row=dict(first.row),
        prompt_id=first.prompt_id,
        reward=first.reward,
        components=dict(first.components),
        correct=first.correct,
        detail=first.detail,
        completion=first.completion_text,
    )
    for record in records:
        _append(episode, record)
    episode.status = Status(first.status)
    return episode


def _append(episode: Episode, record: EpisodeRecord) -> None:
    """Append a stream as a path of its own: what was trained in it as sampled, everything else as read."""
    assert record.sampler_logprobs is not None
    assert record.versions is not None
    edges = [0, *(np.flatnonzero(np.diff(record.loss_mask)) + 1).tolist(), len(record.tokens)]
    end: TurnId | None = None
    for part in (slice(*pair) for pair in pairwise(edges)):
        tokens = record.tokens[part]
        if end is None:
            end = episode.append_prompt(tokens)
        elif record.loss_mask[part.start]:
            logprobs, versions = record.sampler_logprobs[part], record.versions[part]
            end = episode.append_sampled(tokens, logprobs, versions, parent=end, finish="stop")
        else:
            end = episode.append_observation(tokens, parent=end)
