"""Packing: how token streams are laid out in one row of tokens, and what each token may attend to.

A layout is a list of segments. A segment is a run of tokens that continues a path of earlier segments, its prefix: the
prompt of a group is laid out and computed once, and each completion continues it. A stream that shares nothing is a
segment without a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Tokens start..start+length of the packed row, continuing the tokens of the `prefix` segments, in order."""

    start: int
    length: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A packed row of T tokens.

    input_ids, position_ids: int64 [T]. segments: together they cover the row exactly once, prefixes come first.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    segments: tuple[Segment, ...]

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees, itself included."""
        before = [sum(self.segments[at].length for at in segment.prefix) for segment in self.segments]
        return sum(
            s.length * first + s.length * (s.length + 1) // 2 for s, first in zip(self.segments, before, strict=True)
        )

    def keys_of(self, index: int) -> np.ndarray:
        """Packed positions that the last token of a segment attends to, in order of position, int64."""
        segment = self.segments[index]
        parts = [self.segments[at] for at in segment.prefix] + [segment]
        return np.concatenate([np.arange(part.start, part.start + part.length) for part in parts])


@dataclass(frozen=True)
class PackedStreams:
    """Streams in a layout.

    places[i]: int64 [L_i], where each token of stream i lies in the packed row; shared tokens have the same place.
    paths[i]: the segments of stream i, in order.
    """

    layout: Layout
    places: tuple[np.ndarray, ...]
    paths: tuple[tuple[int, ...], ...]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two streams begin with alike."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


# Shorter common beginnings are computed again by each stream: a segment of its own would cost more than it saves.
LEAST_SHARED = 4


def pack(streams: Sequence[np.ndarray], shared: Sequence[int] | None = None) -> PackedStreams:
    """Lay streams out in one row, equal beginnings once.

    A few-shot or system prompt that all streams begin with becomes one segment, a group's prompt another that continues
    it, and each completion a third.

    Args:
        streams: token ids of each stream, int64 [L_i], none empty.
        shared: for each stream, how many of its first tokens may be computed together with those of others that begin
            equally; fewer than L_i. None shares nothing.
    """
    packer = _Packer(streams, [0] * len(streams) if shared is None else [int(count) for count in shared])
    packer.place(list(range(len(streams))), 0, ())
    layout = Layout(np.concatenate(packer.ids), np.concatenate(packer.positions), tuple(packer.segments))
    places = []
    for path in packer.paths:
        parts = [layout.segments[at] for at in path]
        places.append(np.concatenate([np.arange(part.start, part.start + part.length) for part in parts]))
    return PackedStreams(layout, tuple(places), tuple(packer.paths))


def padded(packed: PackedStreams, multiple: int) -> PackedStreams:
    """The same with a segment of zeros behind, which is no stream, so that the row is a multiple of so many tokens."""
    layout = packed.layout
    tokens = len(layout.input_ids)
    more = -tokens % multiple
    if not more:
        return packed
    filled = Layout(
        np.concatenate([layout.input_ids, np.zeros(more, np.int64)]),
        np.concatenate([layout.position_ids, np.arange(more)]),
        (*layout.segments, Segment(tokens, more)),
    )
    return PackedStreams(filled, packed.places, packed.paths)


class _Packer:
    """Builds the segments from the front: what a set of streams has in common, then each of its branches."""

    def __init__(self, streams: Sequence[np.ndarray], shared: list[int]) -> None:
        self.streams = streams
        self.shared = shared
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.segments: list[Segment] = []
        self.paths: list[tuple[int, ...]] = [()] * len(streams)
        self._end = 0

    def place(self, chosen: list[int], depth: int, prefix: tuple[int, ...]) -> None:
        """Lay out streams that agree on their first `depth` tokens, which the segments `prefix` hold."""
        work = [(chosen, depth, prefix)]
        while work:
            chosen, depth, prefix = work.pop(0)
            if len(chosen) == 1:
                self._leaf(chosen[0], depth, prefix)
                continue
            common = self._common(chosen)
            if common - depth >= LEAST_SHARED:
                prefix = (*prefix, self._add(self.streams[chosen[0]][depth:common], depth, prefix))
                depth = common
            branches: dict[int, list[int]] = {}
            for at in chosen:
                if self.shared[at] <= common:
                    self._leaf(at, depth, prefix)
                else:
                    branches.setdefault(int(self.streams[at][common]), []).append(at)
            work[:0] = [(branch, depth, prefix) for branch in branches.values()]

    def _common(self, chosen: list[int]) -> int:
        """How many tokens all of these streams begin with, of those that each may share."""
        limit = min(self.shared[at] for at in chosen)
        first = self.streams[chosen[0]][:limit]
        for at in chosen[1:]:
            first = first[: common_prefix(first, self.streams[at])]
        return len(first)

    def _leaf(self, at: int, depth: int, prefix: tuple[int, ...]) -> None:
        self.paths[at] = (*prefix, self._add(self.streams[at][depth:], depth, prefix))

    def _add(self, tokens: np.ndarray, first: int, prefix: tuple[int, ...]) -> int:
        self.segments.append(Segment(self._end, len(tokens), prefix))
        self.ids.append(tokens)
        self.positions.append(np.arange(first, first + len(tokens)))
        self._end += len(tokens)
        return len(self.segments) - 1
