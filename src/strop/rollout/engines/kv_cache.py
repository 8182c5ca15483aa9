"""The key/value cache of the local engine, and the attention plans that fill and read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.errors import ModelError
from strop.models.attention import PackedAttention, Scores
from strop.models.attention_padded import scored_attention
from strop.models.layout import PackedStreams

GROW = 128


class KVCache:
    """Keys and values of running sequences: for each layer [rows, kv heads, capacity, head size], grown on demand.

    Rows 0..n-1 are in use, so that a decoding step reads one contiguous block. lengths: int64 [rows], tokens held.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.capacity = 0
        self.lengths = np.zeros(rows, dtype=np.int64)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self.capacity:
            return
        # A quarter more, so that growing a long sequence does not copy the cache at each step.
        capacity = -(-max(length, int(self.capacity * 1.25)) // GROW) * GROW
        for layer, pair in self._layers.items():
            grown = tuple(x.new_zeros((x.shape[0], x.shape[1], capacity, x.shape[3])) for x in pair)
            for new, old in zip(grown, pair, strict=True):
                new[:, :, : old.shape[2]] = old
            self._layers[layer] = (grown[0], grown[1])
        self.capacity = capacity

    def layer(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, made like `key` and `value` [1, heads, T, d] when first asked for."""
        index = getattr(module, "layer_idx", None)
        if index is None:
            raise ModelError(f"{type(module).__name__} does not say which layer it is, so it cannot be cached")
        if index not in self._layers:
            self._layers[index] = (
                key.new_zeros((self.rows, key.shape[1], self.capacity, key.shape[3])),
                value.new_zeros((self.rows, value.shape[1], self.capacity, value.shape[3])),
            )
        return self._layers[index]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]
        self.lengths[target] = length

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for pair in self._layers.values() for x in pair)


class Prefill(PackedAttention):
    """Attention within packed prompts; their keys and values go to rows of the cache.

    rows[i]: the rows that get a copy of prompt i.
    """

    def __init__(
        self, packed: PackedStreams, cache: KVCache, rows: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        super().__init__(packed.layout, device)
        self._cache = cache
        through: list[list[int]] = [[] for _ in packed.layout.segments]
        for path, chosen in zip(packed.paths, rows, strict=True):
            for segment in path:
                through[segment].extend(chosen)
        # For each token that a row of the cache gets: its place in the packed row, the cache's row, its position there.
        copies = [
            (np.arange(segment.start, segment.start + segment.length), row)
            for segment, held in zip(packed.layout.segments, through, strict=True)
            for row in held
        ]
        source = np.concatenate([places for places, _ in copies])
        row = np.repeat([row for _, row in copies], [len(places) for places, _ in copies])
        at = packed.layout.position_ids[source]
        self._source, self._row, self._at = (self._tensor(x.astype(np.int64)) for x in (source, row, at))

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        keys[self._row, :, self._at] = key[0].transpose(0, 1)[self._source]
        values[self._row, :, self._at] = value[0].transpose(0, 1)[self._source]
        return super().attend(layer, query, key, value, scores)


class Decode:
    """Attention of one new token for each of the first n rows over what the cache holds of the row."""

    def __init__(self, cache: KVCache, running: int, device: torch.device) -> None:
        self._cache = cache
        self._n = running
        lengths = cache.lengths[:running]
        self._span = int(lengths.max()) + 1
        cache.reserve(self._span)
        self._at = torch.from_numpy(lengths.copy()).to(device)
        self._row = torch.arange(running, device=device)
        # How far back each cached place is from the new token; places not yet written are negative.
        self._distance = (self._at[:, None] - torch.arange(self._span, device=device))[:, None, None]
        self._seen = self._distance >= 0
        self._tiles: Any = None

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        keys[self._row, :, self._at] = key[0].transpose(0, 1)
        values[self._row, :, self._at] = value[0].transpose(0, 1)
        if scores.consistent and query.is_cuda:
            if self._tiles is None:
                from strop.models.attention_consistent import CachedTiles

                self._tiles = CachedTiles(self._at)
            return self._tiles.attend(query, keys, values, scores)
        heads, shared = query.shape[1], key.shape[1]
        # The query heads that share a key head are its queries.
        rows = query[0].transpose(0, 1).reshape(self._n, shared, heads // shared, -1)
        mask = self._seen
        if scores.window is not None and scores.window < self._span:
            mask = mask & (self._distance < scores.window)
        held_k, held_v = keys[: self._n, :, : self._span], values[: self._n, :, : self._span]
        if scores.plain:
            out = F.scaled_dot_product_attention(rows, held_k, held_v, attn_mask=mask, scale=scores.scaling)
        else:
            out = scored_attention(rows, held_k, held_v, mask, scores, heads // shared)
        return out.reshape(1, self._n, heads, -1)
