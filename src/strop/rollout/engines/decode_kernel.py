"""Attention of one new token for each sequence over a key/value cache, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit
def _decode(
    query, key, value, keys, values, lengths, out,
    scaling, window,
    q_row, q_head, k_row, k_head, v_row, v_head, c_row, c_head, c_at, o_row, o_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head of one sequence: the softmax over the cache is built block by block, beginning
    with the new token, whose key and value go into the cache behind the others."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    group = tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    wide = at < SIZE
    q = tl.load(
        query + row * q_row + (head * GROUP + group)[:, None] * q_head + at[None, :],
        mask=(group < GROUP)[:, None] & wide[None, :],
        other=0.0,
    )
    own_key = tl.load(key + row * k_row + head * k_head + at, mask=wide, other=0.0)
    own_value = tl.load(value + row * v_row + head * v_head + at, mask=wide, other=0.0)
    keys += row * c_row + head * c_head
    values += row * c_row + head * c_head
    tl.store(keys + length.to(tl.int64) * c_at + at, own_key, mask=wide)
    tl.store(values + length.to(tl.int64) * c_at + at, own_value, mask=wide)

    top = tl.sum(q.to(tl.float32) * own_key.to(tl.float32)[None, :], 1) * scaling
    total = tl.full((ROWS,), 1.0, tl.float32)
    found = tl.zeros((ROWS, WIDTH), tl.float32) + own_value.to(tl.float32)[None, :]
    # The new token itself is one of the window's.
    first = tl.maximum(length + 1 - window, 0)
    for start in range(first // BLOCK * BLOCK, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = (places < length) & (places >= first)
        block = places.to(tl.int64)[:, None] * c_at + at[None, :]
        inside = seen[:, None] & wide[None, :]
        k = tl.load(keys + block, mask=inside, other=0.0)
        v = tl.load(values + block, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        scores = tl.where(seen[None, :], scores, -float("inf"))
        grown = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - grown)
        p = tl.exp(scores - grown[:, None])
        total = total * shrink + tl.sum(p, 1)
        found = found * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = grown
    tl.store(
        out + row * o_row + (head * GROUP + group)[:, None] * o_head + at[None, :],
        (found / total[:, None]).to(out.dtype.element_ty),
        mask=(group < GROUP)[:, None] & wide[None, :],
    )


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """[n, heads, d]: attention of one token for each of the first n rows of a cache, to which it is added.

    Args:
        query: [n, heads, d]. key, value: [n, kv heads, d], of the same tokens.
        keys, values: [rows, kv heads, capacity, d]; each token's own are written at its place.
        lengths: int32 [n], how many tokens each row holds before it.
        window: tokens that are looked at, the new one included; all when None.
    """
    rows, heads, size = query.shape
    shared = key.shape[1]
    out = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    group = heads // shared
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    _decode[(rows, shared)](
        query, key, value, keys, values, lengths, out,
        scaling, 1 << 30 if window is None else window,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), out.stride(0), out.stride(1),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), SIZE=size,
        WIDTH=max(16, triton.next_power_of_2(size)), BLOCK=_BLOCK,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


__all__ = ["decode_attention"]
