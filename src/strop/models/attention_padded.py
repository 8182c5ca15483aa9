"""Attention over a packed row by kernels for sequences of one length, on any device and in any number format.

Why not a block-diagonal mask over the whole row: it costs T x T. Here a segment runs alone, or those of similar length
are padded to one batch, so the work is close to the sum of their own squares (benchmarks/packing.py compares).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models import exact_sums
from strop.models.consistent import with_gradient_of
from strop.models.layout import Layout
from strop.models.moving import moved
from strop.models.scores import Scores

# Longer streams without a prefix run alone: the causal kernel skips half of the work, and nothing is copied. From where
# on, what a call costs decides: next to nothing on a CPU.
ALONE = 512
ALONE_ON_CPU = 8
# Work (score entries) below which another kernel call costs more than padding does.
CALL_COST = 60_000


class Gather(torch.autograd.Function):
    """Rows of x by index. The backward pass gathers too, so it is fast on a CPU and adds in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Any) -> Tensor:
        ctx.inverse, ctx.rows = inverse, x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        for rows, places in ctx.inverse:
            if places.shape[1] == 1:
                out[rows] = grad.index_select(0, places[:, 0])
            else:
                picked = grad.index_select(0, places.reshape(-1))
                out[rows] = picked.view(*places.shape, *grad.shape[1:]).sum(1)
        return out, None, None


def gathered(x: Tensor, index: Tensor, inverse: Any) -> Tensor:
    """Rows of x by index, see `Gather`; without a gradient the call of a function of autograd costs more than they."""
    return Gather.apply(x, index, inverse) if torch.is_grad_enabled() else x.index_select(0, index)


def inverse(index: np.ndarray, used: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """For a gather by `index` whose places `used` matter: rows by how often they were gathered, and where."""
    places = np.flatnonzero(used)
    rows = index[places]
    order = np.argsort(rows, kind="stable")
    places, rows = places[order], rows[order]
    unique, first, counts = np.unique(rows, return_index=True, return_counts=True)
    found = []
    for count in np.unique(counts):
        chosen = counts == count
        found.append((unique[chosen], places[first[chosen][:, None] + np.arange(count)]))
    return found


@dataclass
class _Bucket:
    """Segments padded to one batch of b: queries [b, q], keys [b, k] (packed positions), mask [b, 1, q, k]."""

    queries: Tensor
    query_inverse: list[tuple[Tensor, Tensor]]
    keys: Tensor
    key_inverse: list[tuple[Tensor, Tensor]]
    mask: Tensor
    distance: Tensor
    shape: tuple[int, int, int]
    out_rows: Tensor
    out_places: Tensor
    masks: dict[Any, Tensor] = field(default_factory=dict)

    def mask_of(self, window: int | None, groups: int, dtype: torch.dtype | None) -> Tensor:
        """[b, 1, groups x q, k]: bool, or for a dtype what is added to the scores. Layers share it: a kernel keeps the
        mask that it is given for the backward pass, so one of its own for each layer would add up."""
        window = window if window is not None and window < self.shape[2] else None
        if (window, groups, dtype) not in self.masks:
            mask = self.mask if window is None else self.mask & (self.distance < window)
            mask = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
            if dtype is not None:
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self.masks[window, groups, dtype] = mask
        return self.masks[window, groups, dtype]


class PaddedAttention:
    """Attention within a layout: each token sees its segment's prefix and the earlier tokens of its segment."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.device = device
        self.tokens = len(layout.input_ids)
        self.lengths = [segment.length for segment in layout.segments]
        alone_from = ALONE_ON_CPU if device.type == "cpu" else ALONE
        self.alone: list[int] = []
        together: list[int] = []
        for index, segment in enumerate(layout.segments):
            (self.alone if not segment.prefix and segment.length > alone_from else together).append(index)
        self.buckets = [self._bucket(layout, chosen) for chosen in _buckets(layout, together)]
        starts = [layout.segments[at].start for at in self.alone]
        spans = [torch.arange(start, start + self.lengths[at]) for start, at in zip(starts, self.alone, strict=True)]
        rows = torch.cat([*(b.out_rows.cpu() for b in self.buckets), *spans])
        # Where each token of the row is among the results, one after another; segments cover the row exactly once.
        self._order = torch.argsort(rows).to(device)
        self._in_order = not self.buckets and bool((rows == torch.arange(self.tokens)).all())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T, heads, head size] from query [1, heads, T, d], key and value [1, kv heads, T, d]."""
        pieces: list[Tensor] = []
        if self.buckets:
            # One contiguous copy, so that gathering rows is a copy of whole lines.
            q, k, v = (x[0].transpose(0, 1).reshape(self.tokens, -1) for x in (query, key, value))
            heads = (query.shape[1], key.shape[1])
            pieces = [self._padded(b, q, k, v, heads, scores) for b in self.buckets]
        if self.alone:
            groups = query.shape[1] // key.shape[1]
            if groups > 1:
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            # Not slices, each of which would make a gradient of the whole row.
            parts = [x.split(self.lengths, 2) for x in (query, key, value)]
            for at in self.alone:
                found = self._causal(parts[0][at], parts[1][at], parts[2][at], scores)
                pieces.append(found[0].transpose(0, 1).reshape(self.lengths[at], -1))
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if not self._in_order:
            out = self._permuted(out, self._order)
        return out.view(1, self.tokens, query.shape[1], -1)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """One stream alone, [1, heads, L, d] each and the result."""
        length = query.shape[2]
        window = None if scores.window is None or scores.window >= length else scores.window
        if scores.plain and window is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores.scaling)
        at = torch.arange(length, device=query.device)
        distance = at[:, None] - at[None, :]
        mask = distance >= 0
        if window is not None:
            mask = mask & (distance < window)
        return scored_attention(query, key, value, mask[None, None], scores)

    def _padded(self, b: _Bucket, q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, int], scores: Scores) -> Tensor:
        size, queries, keys = b.shape
        groups = heads[0] // heads[1]
        query = gathered(q, b.queries, b.query_inverse).view(size, queries, heads[1], groups, -1)
        key = gathered(k, b.keys, b.key_inverse).view(size, keys, heads[1], -1).transpose(1, 2)
        value = gathered(v, b.keys, b.key_inverse).view(size, keys, heads[1], -1).transpose(1, 2)
        mask = b.mask_of(scores.window, groups, query.dtype if scores.plain else None)
        # Query heads that share a key head become further queries of it: no key is repeated.
        query = query.permute(0, 2, 3, 1, 4).reshape(size, heads[1], groups * queries, -1)
        out = scored_attention(query, key, value, mask, scores, groups)
        out = out.view(size, heads[1], groups, queries, -1).permute(0, 3, 1, 2, 4).reshape(size * queries, -1)
        return self._permuted(out, b.out_places)

    def _permuted(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows of x by an index that has none twice."""
        if not torch.is_grad_enabled():
            return x.index_select(0, index)
        return gathered(x, index, [(index, torch.arange(len(index), device=self.device)[:, None])])

    def _bucket(self, layout: Layout, chosen: list[int]) -> _Bucket:
        segments = [layout.segments[at] for at in chosen]
        keys = [layout.keys_of(at) for at in chosen]
        n, q, k = len(chosen), max(s.length for s in segments), max(len(x) for x in keys)
        query_at, key_at = np.zeros((n, q), np.int64), np.zeros((n, k), np.int64)
        query_used, key_used = np.zeros((n, q), bool), np.zeros((n, k), bool)
        # Padding queries look at key 0 alone, so that no row of the softmax is empty.
        distance = np.full((n, q, k), -1, np.int32)
        distance[:, :, 0] = 0
        for row, (segment, places) in enumerate(zip(segments, keys, strict=True)):
            span, seen = segment.length, len(places)
            query_at[row, :span] = np.arange(segment.start, segment.start + span)
            key_at[row, :seen] = places
            query_used[row, :span] = True
            key_used[row, :seen] = True
            first = seen - span
            distance[row, :span, :seen] = np.arange(first, seen)[:, None] - np.arange(seen)[None, :]

        def on_device(found: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[Tensor, Tensor]]:
            return [(self._tensor(rows), self._tensor(places)) for rows, places in found]

        where = self._tensor(distance)[:, None]
        return _Bucket(
            queries=self._tensor(query_at.reshape(-1)),
            query_inverse=on_device(inverse(query_at.reshape(-1), query_used.reshape(-1))),
            keys=self._tensor(key_at.reshape(-1)),
            key_inverse=on_device(inverse(key_at.reshape(-1), key_used.reshape(-1))),
            mask=where >= 0,
            distance=where,
            shape=(n, q, k),
            out_rows=self._tensor(query_at[query_used]),
            out_places=self._tensor(np.flatnonzero(query_used)),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return moved(torch.from_numpy(np.ascontiguousarray(array)), self.device)


def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, groups: int = 1
) -> Tensor:
    """Masked attention; `groups` query heads are stacked along the query axis of each key head."""
    if scores.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scaling)
    if scores.consistent:
        return _consistent(query, key, value, mask, scores, groups)
    logits = (query @ key.transpose(-1, -2)).float() * scores.scaling
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~mask, -torch.inf)
    if scores.sinks is None:
        return torch.softmax(logits, -1).to(value.dtype) @ value
    # One more logit a head that takes probability and gives no value (arXiv 2309.17453).
    sinks = scores.sinks.float().view(1, key.shape[1], -1, 1).repeat_interleave(query.shape[2] // groups, 2)
    sinks = sinks.reshape(1, key.shape[1], -1, 1).expand(query.shape[0], -1, query.shape[2], 1)
    weights = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1]
    return weights.to(value.dtype) @ value


def _consistent(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, groups: int) -> Tensor:
    """The same by exact sums, which padding cannot change."""
    ordinary = replace(scores, consistent=False)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scored_attention(query, key, value, mask, ordinary, groups)

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return exact_sums.attention(query, key, value, mask, scores.scaling)

    return with_gradient_of(plain, compute, query, key, value)


def _buckets(layout: Layout, chosen: list[int]) -> list[list[int]]:
    """Divide segments into batches whose padding costs less than another kernel call would."""
    size = {at: (layout.segments[at].length, len(layout.keys_of(at))) for at in chosen}
    order = sorted(chosen, key=lambda at: (size[at][1], size[at][0], at))
    found: list[list[int]] = []
    true_cost = 0
    most_queries = 0
    for at in order:
        queries, keys = size[at]
        if found:
            grown = (len(found[-1]) + 1) * max(most_queries, queries) * keys
            if grown <= 1.25 * (true_cost + queries * keys) + CALL_COST:
                found[-1].append(at)
                true_cost += queries * keys
                most_queries = max(most_queries, queries)
                continue
        found.append([at])
        true_cost, most_queries = queries * keys, queries
    return found
