"""Attention in the consistent mode on a GPU: what each tile of queries looks at, over a packed row and over a cache.

One kernel computes both (`consistent_kernels.attention`). Where the keys of a stream lie is a table of places, so that
a token gets the same blocks of keys in a prompt, in a row that the trainer packed and beside a cache.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from strop.models.consistent_kernels import attention, queries_of_a_tile
from strop.models.layout import Layout
from strop.models.moving import moved
from strop.models.scores import Scores


class PackedTiles:
    """Attention within a layout; see `PackedAttention`."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        # By the queries of a tile, which the heads of a layer decide.
        self._plans: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T, heads, head size] from query [1, heads, T, d], key and value [1, kv heads, T, d]."""
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        most = queries_of_a_tile(q.shape[1], k.shape[1])
        if most not in self._plans:
            self._plans[most] = self._plan(most)
        return attention(q, k, v, *self._plans[most], scaling=scores.scaling, window=scores.window).unsqueeze(0)

    def _plan(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        keys = [self._layout.keys_of(at) for at in range(len(self._layout.segments))]
        tables = np.cumsum([0, *(len(each) for each in keys)])
        tiles, positions = [], []
        for segment, each, table in zip(self._layout.segments, keys, tables, strict=False):
            begins = np.arange(0, segment.length, most)
            counts = np.minimum(segment.length - begins, most)
            zeros = np.zeros_like(begins)
            tiles.append(np.stack([segment.start + begins, counts, zeros + table, zeros], 1))
            positions.append(len(each) - segment.length + begins)
        made = (np.concatenate(keys), np.concatenate(tiles), np.concatenate(positions))
        table, of_tiles, first = (moved(torch.from_numpy(x.astype(np.int64)), self._device) for x in made)
        return table, of_tiles, first


class CachedTiles:
    """Attention of one new token for each of the first rows of a cache.

    Args:
        lengths: integers [n], the tokens before it that each row holds; they may change from step to step in place.
    """

    def __init__(self, lengths: Tensor) -> None:
        self._lengths = lengths
        self._made: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """[1, n, heads, d] from query [1, heads, n, d]; keys, values: [rows, kv heads, capacity, d], with the new
        token's own in their places."""
        q = query.squeeze(0).transpose(0, 1)
        k, v = (x[0].transpose(0, 1) for x in (keys, values))
        shape = (keys.stride(0), k.shape[0])
        if self._made is None or self._made[0] != shape:
            self._made = (shape, *self._plan(*shape))
        _, table, tiles = self._made
        found = attention(q, k, v, table, tiles, self._lengths, scaling=scores.scaling, window=scores.window)
        return found.unsqueeze(0)

    def _plan(self, stride: int, capacity: int) -> tuple[Tensor, Tensor]:
        count, device = len(self._lengths), self._lengths.device
        rows = torch.arange(count, device=device)
        tiles = torch.stack([rows, torch.ones_like(rows), torch.zeros_like(rows), rows * stride], 1)
        return torch.arange(capacity, device=device), tiles


__all__ = ["CachedTiles", "PackedTiles"]
