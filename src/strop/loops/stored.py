"""A window that was trained before, from the files of its step: `strop replay` trains it again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from strop.rollout.collector import GREEDY
from strop.rollout.episode import Episode, Group, Status, TokenStream
from strop.tracking.episodes import EpisodeRecord, beside, read_episodes


@dataclass
class StoredEpisode(Episode):
    """An episode as its file has it: its streams, without the turns that made them."""

    stored: list[TokenStream] = field(default_factory=list)

    def streams(self, taken: set[int] | None = None) -> list[TokenStream]:
        return self.stored

    def sampled_tokens(self) -> int:
        return sum(int(stream.loss_mask.sum()) for stream in self.stored)


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


def episodes_of(records: Sequence[EpisodeRecord]) -> list[StoredEpisode]:
    """The episodes of a group's records, in order; the streams of one follow each other."""
    found: list[StoredEpisode] = []
    for record in records:
        if record.stream == 0 or not found:
            found.append(_episode(record))
        found[-1].stored.append(_stream(record))
    return found


def _episode(record: EpisodeRecord) -> StoredEpisode:
    return StoredEpisode(
        group=record.group,
        sample=record.sample,
        row=dict(record.row),
        prompt_id=record.prompt_id,
        status=Status(record.status),
        reward=record.reward,
        components=dict(record.components),
        correct=record.correct,
        detail=record.detail,
        completion=record.completion_text,
    )


def _stream(record: EpisodeRecord) -> TokenStream:
    count = len(record.tokens)
    logprobs, versions = record.sampler_logprobs, record.versions
    return TokenStream(
        tokens=record.tokens.astype(np.int64),
        loss_mask=record.loss_mask.astype(bool),
        logprobs=np.full(count, np.nan, dtype=np.float32) if logprobs is None else logprobs.astype(np.float32),
        versions=np.full(count, -1, dtype=np.int32) if versions is None else versions.astype(np.int32),
        turns=(),
    )
