"""Attention over a packed row by kernels that never hold the scores, on GPUs in half precision.

Short segments go through one call of FlashAttention for ragged sequences (arXiv 2307.08691), without padding. Long ones
go one by one through cuDNN's kernel, which is 1.7 times as fast on an H200 and 2 times with few of them, but needs some
100 ms for each new length: lengths are rounded up, to at most eight of them between two powers of two.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from strop.models.attention_padded import Gather, inverse
from strop.models.layout import Layout
from strop.models.moving import moved
from strop.models.recompute import KeptResults, kept_results
from strop.models.scores import Scores

LONG = 1024
"""Tokens that a segment attends to, from which on it gets a kernel of its own."""
_LARGEST_HEAD = 256
_LARGEST_LONG_HEAD = 128


def usable(query: Tensor, scores: Scores) -> bool:
    """Whether these kernels compute what a layer asks for."""
    size = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and scores.plain and size % 8 == 0 and size <= _LARGEST_HEAD


def rounded(length: int) -> int:
    """The length up to which a segment of so many tokens is filled up: at most an eighth more."""
    step = max(64, (1 << (length.bit_length() - 1)) // 8)
    return -(-length // step) * step


class FlashAttention:
    """Attention within a layout; see `PackedAttention`."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._keys = [sum(layout.segments[at].length for at in (*s.prefix, i)) for i, s in enumerate(layout.segments)]
        self._plans: dict[bool, _Plan] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T, heads, head size] from query [1, heads, T, d], key and value [1, kv heads, T, d]."""
        windowed = scores.window is not None and scores.window < max(self._keys)
        # With deterministic algorithms cuDNN's would not be, and a window is not what it is fast at.
        alone = not (windowed or torch.are_deterministic_algorithms_enabled() or query.shape[-1] > _LARGEST_LONG_HEAD)
        if alone not in self._plans:
            self._plans[alone] = _Plan(self._layout, self._keys, self._device, alone=alone)
        # Not x[0], whose gradient would be copied into a new tensor.
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        window = scores.window if windowed else None
        return self._plans[alone].attend(q, k, v, scores.scaling, window).unsqueeze(0)


class _Plan:
    """Which segments go through which kernel. alone: long ones through cuDNN's."""

    def __init__(self, layout: Layout, keys: Sequence[int], device: torch.device, *, alone: bool) -> None:
        every = range(len(layout.segments))
        long = [at for at in every if alone and keys[at] >= LONG]
        short = [at for at in every if not (alone and keys[at] >= LONG)]
        self.ragged = _Ragged(layout, short, device) if short else None
        self.long = [_Long(layout, at, device) for at in long]
        rows = np.concatenate([_span(layout, at) for at in [*short, *long]])
        self.order = None
        if not (rows == np.arange(len(rows))).all():
            # Where each token of the row is among the results, one after another.
            self.order = _Rows(np.argsort(rows), len(rows), device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """[T, heads, d] from [T, heads, d] and [T, kv heads, d]."""
        found = [] if self.ragged is None else [self.ragged.attend(q, k, v, scaling, window)]
        found += [one.attend(q, k, v, scaling) for one in self.long]
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out if self.order is None else self.order.of(out)


class _Rows:
    """A choice of rows, with its gradient added up in a fixed order. count: rows that there are."""

    def __init__(self, index: np.ndarray, count: int, device: torch.device) -> None:
        self._whole = len(index) == count and bool((index == np.arange(count)).all())
        # A run of neighbours is a view.
        run = bool((np.diff(index) == 1).all())
        self._span = slice(int(index[0]), int(index[-1]) + 1) if run else None
        if self._span is None:
            self._index = _tensor(index, device)
            found = inverse(index, np.ones(len(index), bool))
            self._inverse = [
                tuple(moved(torch.from_numpy(np.ascontiguousarray(x)), device) for x in one) for one in found
            ]

    def of(self, x: Tensor) -> Tensor:
        if self._whole:
            return x
        if self._span is not None:
            return x[self._span]
        flat = x.reshape(x.shape[0], -1)
        return Gather.apply(flat, self._index, self._inverse).view(-1, *x.shape[1:])


class _Ragged:
    """Segments of any length in one call."""

    def __init__(self, layout: Layout, chosen: Sequence[int], device: torch.device) -> None:
        tokens = len(layout.input_ids)
        segments = [layout.segments[at] for at in chosen]
        keys = [layout.keys_of(at) for at in chosen]
        self._queries = _Rows(np.concatenate([_span(layout, at) for at in chosen]), tokens, device)
        self._keys = _Rows(np.concatenate(keys), tokens, device)
        self._query_edges, self._most_queries = _edges([segment.length for segment in segments], device)
        self._key_edges, self._most_keys = _edges([len(x) for x in keys], device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        return _varlen(
            self._queries.of(q),
            self._keys.of(k),
            self._keys.of(v),
            (self._query_edges, self._key_edges, self._most_queries, self._most_keys),
            scaling,
            # Of the last token of the keys, which queries are counted from, itself and those before.
            (-1 if window is None else window - 1, 0),
        )


class _Long:
    """One segment alone. A prefix is computed with it, so that queries and keys are as many, and cut off."""

    def __init__(self, layout: Layout, at: int, device: torch.device) -> None:
        keys = layout.keys_of(at)
        self._rows = _Rows(keys, len(layout.input_ids), device)
        self._length = layout.segments[at].length
        self._fill = rounded(len(keys)) - len(keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        q, k, v = (self._rows.of(x) for x in (q, k, v))
        count = q.shape[0]
        if self._fill:
            # Behind everything, where a causal query never looks.
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, self._fill)) for x in (q, k, v))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        found = _causal(q, k, v, scaling).squeeze(0).transpose(0, 1)
        if found.shape[0] == self._length:
            return found
        return found[count - self._length : count]


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """[1, heads, L, d] of one causal sequence."""
    kept = kept_results()
    if kept is None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    ops = torch.ops.aten
    if kept.again:
        return _Kept.apply(q, k, v, _causal_gradients(scaling), kept.take())
    found = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scaling)
    kept.give(found)
    return found[0]


def _causal_gradients(scaling: float) -> Any:
    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Sequence[Any]) -> tuple[Tensor, ...]:
        out, lse, cum_q, cum_k, most_q, most_k, seed, offset = found[:8]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, most_q, most_k, 0.0, True, scale=scaling
        )

    return gradients


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, where: tuple[Tensor, Tensor, int, int], scaling: float, window: tuple[int, int]
) -> Tensor:
    """[T, heads, d] of ragged sequences, each query looking back from the last key."""
    # Its types are those of one version of torch.
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    kept = kept_results()
    if kept is None and torch.are_deterministic_algorithms_enabled():
        # So that its gradient is computed below.
        kept = KeptResults()
        kept.again = True
        with torch.no_grad():
            kept.give(_ragged(q, k, v, where, scaling, window))
    if kept is None and not torch.is_grad_enabled():
        # What varlen_attn calls; an operator that is defined in Python costs a few hundred microseconds a call.
        return _ragged(q, k, v, where, scaling, window)[0]
    if kept is None:
        return varlen.varlen_attn(q, k, v, *where, scale=scaling, window_size=window, **_grouped())
    if kept.again:
        return _Kept.apply(q, k, v, _ragged_gradients(where, scaling, window), kept.take())
    kept.give(_ragged(q, k, v, where, scaling, window))
    return kept.last()[0]


def _ragged(
    q: Tensor, k: Tensor, v: Tensor, where: tuple[Tensor, Tensor, int, int], scaling: float, window: tuple[int, int]
) -> Any:
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *where, 0.0, True, False, scale=scaling, window_size_left=window[0], window_size_right=window[1]
    )


def _ragged_gradients(where: tuple[Tensor, Tensor, int, int], scaling: float, window: tuple[int, int]) -> Any:
    left, right = window

    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Sequence[Any]) -> tuple[Tensor, ...]:
        out, lse, state, unused = found[:4]
        with _strictly_deterministic():
            return torch.ops.aten._flash_attention_backward(
                grad.contiguous(), q, k, v, out, lse, *where, 0.0, True, state, unused, scale=scaling,
                window_size_left=left, window_size_right=right,
            )  # fmt: skip

    return gradients


@contextmanager
def _strictly_deterministic() -> Iterator[None]:
    """Where deterministic algorithms are wanted: FlashAttention's gradient is one only if errors are raised else."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


class _Kept(torch.autograd.Function):
    """What a kernel gave before, with the gradient that it has."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gradients: Any, found: Sequence[Any]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.gradients, ctx.found = gradients, found
        return found[0].view_as(found[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.gradients(grad, *ctx.saved_tensors, ctx.found)[:3], None, None)


def _grouped() -> dict[str, bool]:
    """Newer versions of torch want to be told of grouped heads."""
    from torch.nn.attention import varlen

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return moved(torch.from_numpy(np.ascontiguousarray(array)), device)


def _span(layout: Layout, at: int) -> np.ndarray:
    segment = layout.segments[at]
    return np.arange(segment.start, segment.start + segment.length)


def _edges(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """(where each sequence begins and the last one ends, int32; the longest)."""
    return moved(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), device), max(lengths)
