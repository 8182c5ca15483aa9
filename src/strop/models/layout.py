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

    def keys_of(self, index: int) -> np.ndarray:
        """Packed positions that the last token of a segment attends to, in order of position, int64."""
        segment = self.segments[index]
        parts = [self.segments[at] for at in segment.prefix] + [segment]
        return np.concatenate([np.arange(part.start, part.start + part.length) for part in parts])


@dataclass(frozen=True)
class PackedStreams:
    """Streams in a layout.

    places[i]: int64 [L_i], where each token of stream i lies in the packed row; shared tokens have the same place.
    """

    layout: Layout
    places: tuple[np.ndarray, ...]


def pack(streams: Sequence[np.ndarray], shared: Sequence[int] | None = None) -> PackedStreams:
    """Lay streams out in one row.

    Args:
        streams: token ids of each stream, int64 [L_i], none empty.
        shared: for each stream, how many of its first tokens may be computed once with those of its neighbours: runs of
            streams whose first `shared` tokens are equal get one prefix segment. Fewer than L_i; None shares nothing.
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    places: list[np.ndarray] = []
    end = 0

    def add(tokens: np.ndarray, first: int, prefix: tuple[int, ...]) -> np.ndarray:
        nonlocal end
        segments.append(Segment(end, len(tokens), prefix))
        ids.append(tokens)
        positions.append(np.arange(first, first + len(tokens)))
        end += len(tokens)
        return np.arange(end - len(tokens), end)

    at = 0
    while at < len(streams):
        count = 0 if shared is None else int(shared[at])
        run = at + 1
        while run < len(streams) and count > 0 and shared is not None and int(shared[run]) == count:
            if not np.array_equal(streams[run][:count], streams[at][:count]):
                break
            run += 1
        if run - at == 1 or count == 0:
            places.append(add(streams[at], 0, ()))
            at += 1
            continue
        head = add(streams[at][:count], 0, ())
        node = len(segments) - 1
        for stream in streams[at:run]:
            places.append(np.concatenate([head, add(stream[count:], count, (node,))]))
        at = run
    return PackedStreams(Layout(np.concatenate(ids), np.concatenate(positions), tuple(segments)), tuple(places))
