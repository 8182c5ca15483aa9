"""The streams of an episode as the tree that they were: what several share is shown once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Node:
    """Part of a stream that is all of one kind.

    parent: index of the node before it; -1 for the first. stream: the stream whose numbers hold here. start, end: where
    it lies in that stream. sampled: whether the policy sampled it. streams: those that go through it.
    """

    parent: int
    stream: int
    start: int
    end: int
    sampled: bool
    streams: tuple[int, ...]


def turn_tree(tokens: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[Node]:
    """Nodes in order of depth first, parents before their children.

    A sampled turn is trained in one stream only and is context in the others, so two streams part where their tokens
    differ, and where both train a token: those are different turns, though they may begin alike.

    Args:
        tokens: the ids of each stream. masks: True where a stream trains the token.
    """
    nodes: list[Node] = []
    waiting: list[tuple[int, int, tuple[int, ...]]] = [(-1, 0, tuple(range(len(tokens))))]
    while waiting:
        parent, start, streams = waiting.pop()
        if not streams:
            continue
        end = _shared_until(tokens, masks, streams, start)
        together = np.zeros(end - start, dtype=np.bool_)
        for stream in streams:
            together |= masks[stream][start:end]
        for first, last in _runs(together):
            sampled = bool(together[first])
            of = next((s for s in streams if masks[s][start + first]), streams[0]) if sampled else streams[0]
            nodes.append(Node(parent, of, start + first, start + last, sampled, streams))
            parent = len(nodes) - 1
        if len(streams) > 1:
            # The last is taken out first.
            waiting += [(parent, end, part) for part in reversed(_parted(tokens, masks, streams, end))]
    return nodes


def _shared_until(
    tokens: Sequence[np.ndarray], masks: Sequence[np.ndarray], streams: tuple[int, ...], start: int
) -> int:
    end = min(len(tokens[stream]) for stream in streams)
    if len(streams) == 1:
        return end
    first = tokens[streams[0]][start:end]
    trained = np.zeros(end - start, dtype=np.int32)
    differs = np.zeros(end - start, dtype=np.bool_)
    for stream in streams:
        differs |= tokens[stream][start:end] != first
        trained += masks[stream][start:end]
    stops = np.flatnonzero(differs | (trained > 1))
    return start + int(stops[0]) if len(stops) else end


def _parted(
    tokens: Sequence[np.ndarray], masks: Sequence[np.ndarray], streams: tuple[int, ...], at: int
) -> list[tuple[int, ...]]:
    """The streams that go on from a place, parted by what comes next there."""
    parts: list[list[int]] = []
    going_on = [stream for stream in streams if at < len(tokens[stream])]
    for stream in [s for s in going_on if masks[s][at]]:
        parts.append([stream])
    for stream in [s for s in going_on if not masks[s][at]]:
        part = next((part for part in parts if tokens[part[0]][at] == tokens[stream][at]), None)
        if part is None:
            parts.append([stream])
        else:
            part.append(stream)
    return [tuple(sorted(part)) for part in sorted(parts, key=min)]


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each run of equal values."""
    if not len(mask):
        return []
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return list(pairwise(edges))
