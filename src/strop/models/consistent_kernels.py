"""Operators on a GPU whose sums are added up in an order that depends on nothing but their length.

A matrix product has one tile, whatever the number of rows, and one program goes through all of the depth; a row of a
norm is one program's; attention goes through the keys in blocks that are counted from the start of the stream, with the
same tile for a prompt and for a single new token (batch-invariant kernels, thinkingmachines.ai/blog/
defeating-nondeterminism-in-llm-inference). A result may therefore only change with the build of Triton or the card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of one number format all products have the same tile: of two, the hardware might add up in different orders.
_TILES = {
    torch.float32: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
    torch.bfloat16: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
}
_BAND = 8
_NORM_TILE = 2048
_QUERIES, _KEYS = 64, 64
_LOG2_E = 1.4426950408889634


# What is different in each call is left out of what a kernel is built for: there is one build for all of them.
@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, columns, depth, x_row, w_row, o_row,
    HAS_BIAS: tl.constexpr, BAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of x @ weight.T. Tiles are numbered in bands of rows, so that a band finds the weights in the cache."""
    tile = tl.program_id(0)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    band = tile // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    inside_band = tile % (BAND * across)
    m = ((band * BAND + inside_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = ((inside_band // height) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        at = start + k
        deep = at < depth
        a = tl.load(x + m[:, None] * x_row + at[None, :], mask=(m < rows)[:, None] & deep[None, :], other=0.0)
        b = tl.load(weight + n[None, :] * w_row + at[:, None], mask=(n < columns)[None, :] & deep[:, None], other=0.0)
        found = tl.dot(a, b, found, input_precision=PRECISION)
    if HAS_BIAS:
        found += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + m[:, None] * o_row + n[None, :],
        found.to(out.dtype.element_ty),
        mask=(m < rows)[:, None] & (n < columns)[None, :],
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [..., K]. weight: [N, K], of the same number format. bias: [N]."""
    flat = x.reshape(-1, x.shape[-1])
    flat, weight = (each if each.stride(-1) == 1 else each.contiguous() for each in (flat, weight))
    rows, columns = flat.shape[0], weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    tile = _TILES[x.dtype]
    if rows:
        _product[(triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"]),)](
            flat, weight, weight if bias is None else bias, out,
            rows, columns, x.shape[-1], flat.stride(0), weight.stride(0), columns,
            HAS_BIAS=bias is not None, BAND=_BAND, PRECISION=_precision(x), **tile,
        )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


@triton.jit(do_not_specialize=["rows"])
def _norm(x, weight, out, rows, size, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (at < size)[None, :]
    given = tl.load(x + row[:, None] * size + at[None, :], mask=inside, other=0.0)
    wide = given.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / size + eps)
    rounded = (wide * inverse[:, None]).to(given.dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * size + at[None, :], (rounded * factor[None, :]).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the quotient rounded to the number format of x. x: [..., H]. weight: [H]."""
    size = x.shape[-1]
    flat = x.reshape(-1, size).contiguous()
    # How a row divides into threads, and with it the order of its sum, may depend on this.
    flat = flat.clone() if flat.data_ptr() % 16 else flat
    out = torch.empty(flat.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    width = triton.next_power_of_2(size)
    rows = max(1, _NORM_TILE // width)
    if flat.shape[0]:
        _norm[(triton.cdiv(flat.shape[0], rows),)](
            flat, weight, out, flat.shape[0], size, eps, ROWS=rows, WIDTH=width, num_warps=4
        )
    return out.view(x.shape)


@triton.jit
def _attend(
    query, keys, values, table, tiles, positions, out,
    scaling, window,
    q_row, q_head, k_at, k_head, v_at, v_head, o_row, o_head,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some queries of one stream, for the query heads of one key head: the softmax over the keys before them is built
    block by block. A block of which a query sees nothing leaves its numbers as they are."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first_query = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    table += tl.load(tiles + tile * 4 + 2)
    base = tl.load(tiles + tile * 4 + 3)
    first_position = tl.load(positions + tile).to(tl.int32)
    row = tl.arange(0, BLOCK_M)
    nth = row // GROUP
    at = tl.arange(0, WIDTH)
    wide = at < SIZE
    own = (nth < count)[:, None] & wide[None, :]
    q_at = (first_query + nth)[:, None] * q_row + (head * GROUP + row % GROUP)[:, None] * q_head + at[None, :]
    q = tl.load(query + q_at, mask=own, other=0.0)
    position = first_position + nth
    end = first_position + count.to(tl.int32)
    begin = tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    keys += base + head * k_head
    values += base + head * v_head

    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    found = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for start in range(begin, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        lines = tl.load(table + places, mask=places < end, other=0)
        inside = (places < end)[:, None] & wide[None, :]
        k = tl.load(keys + lines[:, None] * k_at + at[None, :], mask=inside, other=0.0)
        v = tl.load(values + lines[:, None] * v_at + at[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        seen = (places[None, :] <= position[:, None]) & (places[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        grown = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - grown)
        p = tl.exp2(scores - grown[:, None])
        total = total * shrink + tl.sum(p, 1)
        found = found * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = grown
    o_at = (first_query + nth)[:, None] * o_row + (head * GROUP + row % GROUP)[:, None] * o_head + at[None, :]
    tl.store(out + o_at, (found / total[:, None]).to(out.dtype.element_ty), mask=own)


def queries_of_a_tile(heads: int, shared: int) -> int:
    """Tokens whose query heads one program takes; `shared` of `heads` are key heads."""
    return max(1, _QUERIES // (heads // shared))


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    positions: Tensor,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """[n, heads, d]: causal attention of queries over keys that lie anywhere.

    Args:
        query: [n, heads, d].
        keys, values: [places, kv heads, d], strided; the key of a token is at a place, which is relative to a base.
        table: int64, places of the keys of streams, each stream's one after another.
        tiles: int64 [tiles, 4]: the first query of a tile, how many there are (see `queries_of_a_tile`), where the
            table of its stream begins, and its base, in elements of keys and of values.
        positions: integers [tiles], of the first query in its stream.
        window: tokens that are looked at, the query's own included; all when None.
    """
    rows, heads, size = query.shape
    shared = keys.shape[1]
    group = heads // shared
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    narrow = query.dtype == torch.float32 or size > 128
    _attend[(tiles.shape[0], shared)](
        query, keys, values, table, tiles, positions, out,
        scaling * _LOG2_E, 1 << 30 if window is None else window,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1),
        GROUP=group, SIZE=size, WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK_M=max(_QUERIES, triton.next_power_of_2(group)), BLOCK_N=_KEYS // 2 if narrow else _KEYS,
        PRECISION=_precision(query), num_warps=4, num_stages=1 if narrow else 2,
    )  # fmt: skip
    return out


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


__all__ = ["attention", "linear", "queries_of_a_tile", "rms_norm"]
