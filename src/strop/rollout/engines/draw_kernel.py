"""Drawing tokens on a GPU with one pass over the logits.

`sampling.draw` computes scaled logits, weights and sums one after the other, each of them a pass over [B, V] and most
of them a new tensor: nineteen times the bytes of bfloat16 logits. Here a program reads some blocks of a row once and
leaves their largest logit and the sums of their weights; the block that holds the draw is read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.rollout.sampling import BLOCK, search_blocks

_BLOCKS = 16
_LEAST = 1e-30


@triton.jit
def _sums(
    logits, scales, tops, places, sums,
    vocabulary, row_stride,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of some blocks of a row: the largest scaled logit, its place, and the sum of exp(scaled - largest) of each."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * (BLOCKS * SIZE) + tl.arange(0, BLOCKS * SIZE)
    scale = tl.load(scales + row)
    x = tl.load(logits + row * row_stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    # As torch divides: the largest one must be the same number wherever it is computed again.
    x = tl.div_rn(x, tl.zeros_like(x) + scale)
    top = tl.max(x, 0)
    # What cannot be drawn weighs nothing, also where nothing of the chunk can be; what is not a number stays none.
    weights = tl.where(x == -float("inf"), 0.0, tl.exp(x - top))
    to = row * tl.num_programs(1) + chunk
    tl.store(tops + to, top)
    tl.store(places + to, chunk * (BLOCKS * SIZE) + tl.argmax(x, 0))
    tl.store(sums + to * BLOCKS + tl.arange(0, BLOCKS), tl.sum(tl.reshape(weights, (BLOCKS, SIZE)), 1))


def draw(logits: Tensor, temperatures: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """See `sampling.draw`, whose tokens these are, but where `u` falls on an edge between two tokens within rounding.

    Args:
        logits: [B, V], in any floating-point format; no copy of another format is made.
    """
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    scale = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    chunks = triton.cdiv(vocabulary, _BLOCKS * BLOCK)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, chunks, _BLOCKS), dtype=torch.float32, device=logits.device)
    _sums[(rows, chunks)](
        logits, scale, tops, places, sums, vocabulary, logits.stride(0), BLOCKS=_BLOCKS, SIZE=BLOCK, num_warps=8
    )
    top, chunk = tops.max(-1, keepdim=True)
    together = (sums.double() * torch.exp(tops - top).double()[..., None]).view(rows, -1)
    # What is so unlikely in all may have no weight left where it is computed again, token by token.
    together.masked_fill_(together < _LEAST, 0.0)

    def weights_at(places: Tensor) -> Tensor:
        return torch.exp(logits.gather(1, places).float() / scale[:, None] - top)

    total, found = search_blocks(together, u, vocabulary, weights_at)
    # Where no logit is a number the likeliest one can be what fills the last chunk up.
    best = places.gather(1, chunk).clamp(max=vocabulary - 1)
    tokens = torch.where(temperatures[:, None] > 0, found, best)
    logprobs = logits.gather(1, tokens).float() / scale[:, None] - top - total.log().float()
    return tokens[:, 0], logprobs[:, 0]


__all__ = ["draw"]
