"""What is trained of the episodes of a window, and what each part is compared with.

Without branches that is simple: the streams of an episode, compared with the other completions of the prompt. In tree
sampling the turns between two branchings are a part of their own. It is worth the mean of the rewards of all leaves
behind it, and is compared with the other branches of the place where it began: so the advantage of a turn says what
that turn was worth, and not what came before it. Where the policy plays several roles, each is compared with itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strop.rollout.episode import Episode, Streams, TokenStream


class Segment(NamedTuple):
    """A stream of which one part is trained.

    reward: of the episode, or in a tree the mean over the leaves behind the part. cohort: the same for parts that are
    compared with each other. unit: the same for streams that are one completion, which counts once in comparisons.
    ends: whether the part is the last of its episode.
    """

    episode: Episode
    stream: TokenStream
    reward: float
    cohort: Hashable
    unit: Hashable
    ends: bool = True


class Trained(Sequence[tuple[Episode, TokenStream]]):
    """The episode and the stream that each sequence of a batch is.

    episodes, streams: these one by one. laid: the streams as they lie end to end, None where some are cut shorter. The
    others, one for each stream too, are those of `Segment`.
    """

    def __init__(self, episodes: Sequence[Episode]) -> None:
        """The parts of some episodes, in their order; each sampled turn is trained in exactly one of them."""
        self.episodes: Sequence[Episode]
        self.streams: Sequence[TokenStream]
        self.rewards: Sequence[float]
        self.cohorts: Sequence[Hashable]
        self.units: Sequence[Hashable]
        self.ends: Sequence[bool]
        self.laid: Streams | None = None
        laid = Streams(episodes)
        if any(episode.branch for episode in episodes):
            parts = _parts_of(laid, episodes)
            columns = zip(*parts, strict=True) if parts else ((),) * 6
            self.episodes, self.streams, self.rewards, self.cohorts, self.units, self.ends = columns
            return
        self.episodes, self.streams, self.laid = laid.owners, laid, laid
        self.rewards = [episode.reward for episode in laid.owners]
        self.cohorts = [(episode.group, episode.role) for episode in laid.owners]
        self.units = [(episode.group, episode.sample) for episode in laid.owners]
        self.ends = [True] * len(laid)

    def __len__(self) -> int:
        return len(self.streams)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(zip(self.episodes[at], self.streams[at], strict=True))
        return self.episodes[at], self.streams[at]


def _parts_of(streams: Streams, episodes: Sequence[Episode]) -> list[Segment]:
    behind: dict[Hashable, list[float]] = {}
    for episode in episodes:
        for depth in range(len(episode.branch)):
            behind.setdefault(_unit(episode, depth), []).append(episode.reward)
    pairs = zip(streams.owners, streams, strict=True)
    return [part for episode, stream in pairs for part in _parts(episode, stream, behind)]


def numbered(keys: Iterable[Hashable]) -> list[int]:
    """0 for the first key and all that equal it, 1 for the next one, and so on."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _parts(episode: Episode, stream: TokenStream, behind: dict[Hashable, list[float]]) -> list[Segment]:
    if not episode.branch:
        cohort = (episode.group, episode.role)
        return [Segment(episode, stream, episode.reward, cohort, (episode.group, episode.sample))]
    found = []
    for depth in range(len(episode.branch)):
        part = _between(stream, episode, depth)
        if part.loss_mask.any():
            unit = _unit(episode, depth)
            rewards = behind[unit]
            worth, siblings = math.fsum(rewards) / len(rewards), (episode.group, episode.branch[:depth])
            found.append(Segment(episode, part, worth, siblings, unit, ends=depth == len(episode.branch) - 1))
    return found


def _unit(episode: Episode, depth: int) -> Hashable:
    return (episode.group, episode.branch[: depth + 1])


def _between(stream: TokenStream, episode: Episode, depth: int) -> TokenStream:
    """The stream up to the last sampled turn of a part, with no other part trained."""
    edges = (0, *episode.branched, len(episode.turns))
    inside = [edges[depth] <= turn < edges[depth + 1] and episode.turns[turn].sampled for turn in stream.turns]
    sizes = [len(episode.turns[turn].tokens) for turn in stream.turns]
    mask = stream.loss_mask & np.repeat(inside, sizes)
    turns = max((at + 1 for at, found in enumerate(inside) if found), default=0)
    end = sum(sizes[:turns])
    return stream._replace(
        tokens=stream.tokens[:end],
        loss_mask=mask[:end],
        logprobs=np.where(mask, stream.logprobs, np.float32("nan"))[:end],
        versions=np.where(mask, stream.versions, np.int32(-1))[:end],
        turns=stream.turns[:turns],
    )
