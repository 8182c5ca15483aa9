"""Drawing tokens on a GPU with one pass over the logits.

`sampling.draw` computes scaled logits, weights and sums one after the other, each of them a pass over [B, V] and most
of them a new tensor: nineteen times the bytes of bfloat16 logits. Here a program reads some blocks of a row once and
leaves their largest logit and the sums of their weights; then one program for each row finds the block that holds the
draw, and reads it again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.rollout.sampling import BLOCK

_BLOCKS = 16


@triton.jit
def _scale_of(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _scaled(logits, at, mask, scale):
    """As torch divides: the largest one must be the same number wherever it is computed again."""
    x = tl.load(logits + at, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros_like(x) + scale)


@triton.jit
def _sums(
    logits, temperatures, tops, sums,
    vocabulary, row_stride,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of some blocks of a row: the largest scaled logit, and the sum of exp(scaled - largest) of each."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * (BLOCKS * SIZE) + tl.arange(0, BLOCKS * SIZE)
    x = _scaled(logits + row * row_stride, at, at < vocabulary, _scale_of(temperatures, row))
    top = tl.max(x, 0)
    # What cannot be drawn weighs nothing, also where nothing of the chunk can be; what is not a number stays none.
    weights = tl.where(x == -float("inf"), 0.0, tl.exp(x - top))
    to = row * tl.num_programs(1) + chunk
    tl.store(tops + to, top)
    tl.store(sums + to * BLOCKS + tl.arange(0, BLOCKS), tl.sum(tl.reshape(weights, (BLOCKS, SIZE)), 1))


@triton.jit
def _find(
    logits, temperatures, u, tops, sums, tokens, logprobs,
    vocabulary, row_stride, chunks,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a row: the token that is drawn, and its log-probability. WIDTH: at least all blocks."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    scale = _scale_of(temperatures, row)
    block = tl.arange(0, WIDTH)
    held = block < chunks * BLOCKS
    of_chunk = tl.load(tops + row * chunks + block // BLOCKS, mask=held, other=-float("inf"))
    top = tl.max(of_chunk, 0)
    sums_here = tl.load(sums + row * chunks * BLOCKS + block, mask=held, other=0.0)
    # Where there is nothing the difference of the largest logits may be none.
    weights = tl.where(held, sums_here.to(tl.float64) * tl.exp(of_chunk - top).to(tl.float64), 0.0)
    # What is so unlikely in all may have no weight left where it is computed again, token by token.
    weights = tl.where(weights < 1e-30, 0.0, weights)
    edges = tl.cumsum(weights, 0)
    total = tl.sum(tl.where(block == WIDTH - 1, edges, 0.0), 0)
    target = tl.load(u + row) * total
    last = (vocabulary + SIZE - 1) // SIZE - 1
    chosen = tl.minimum(tl.sum((edges <= target).to(tl.int32), 0), last)
    rest = target - tl.sum(tl.where(block == chosen, edges - weights, 0.0), 0)

    inside = tl.arange(0, SIZE)
    at = chosen * SIZE + inside
    x = _scaled(logits, at, at < vocabulary, scale)
    inner = tl.where(x == -float("inf"), 0.0, tl.exp(x - top)).to(tl.float64)
    passed = tl.cumsum(inner, 0) <= rest
    index = tl.sum(passed.to(tl.int32), 0)
    weight = tl.sum(tl.where(inside == index, inner, 0.0), 0)
    # Rounding can carry the search past the last token that has any weight: take the likeliest then.
    index = tl.where(weight > 0, index, tl.argmax(inner, 0).to(tl.int32))
    token = tl.minimum(chosen * SIZE + index, vocabulary - 1)

    if tl.load(temperatures + row) <= 0:
        # The first of the likeliest ones, wherever they are.
        first = tl.min(tl.where(of_chunk == top, block // BLOCKS, chunks - 1), 0)
        everywhere = first * (BLOCKS * SIZE) + tl.arange(0, BLOCKS * SIZE)
        likeliest = _scaled(logits, everywhere, everywhere < vocabulary, scale) == top
        token = tl.min(tl.where(likeliest, everywhere, vocabulary - 1), 0)
    own = tl.load(logits + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.div_rn(own, scale) - top - tl.log(total).to(tl.float32))


def draw(logits: Tensor, temperatures: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """See `sampling.draw`, whose tokens these are, but where `u` falls on an edge between two tokens within rounding.

    Args:
        logits: [B, V], in any floating-point format; no copy of another format is made.
    """
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperatures, u = temperatures.contiguous(), u.contiguous()
    chunks = triton.cdiv(vocabulary, _BLOCKS * BLOCK)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty((rows, chunks, _BLOCKS), dtype=torch.float32, device=logits.device)
    _sums[(rows, chunks)](
        logits, temperatures, tops, sums, vocabulary, logits.stride(0), BLOCKS=_BLOCKS, SIZE=BLOCK, num_warps=8
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _find[(rows,)](
        logits, temperatures, u, tops, sums, tokens, logprobs, vocabulary, logits.stride(0), chunks,
        BLOCKS=_BLOCKS, SIZE=BLOCK, WIDTH=triton.next_power_of_2(chunks * _BLOCKS), num_warps=4,
    )  # fmt: skip
    return tokens, logprobs


__all__ = ["draw"]
