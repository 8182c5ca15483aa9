"""Drawing tokens: one random stream for each sample, and inverse-CDF sampling in two levels.

Randomness belongs to the sample, not to the batch: the draw at a position is a pure function of the run's seed, the
sample's stream and the position, so batching, scheduling, retries and resume cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALL = 2**64 - 1


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), on uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _mix_one(x: int) -> int:
    """`_mix` of one integer, modulo 2**64."""
    x &= _ALL
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _ALL
    return x ^ (x >> 31)


def stream_key(seed: int, stream: Sequence[int]) -> np.uint64:
    """The key of a sample's random stream."""
    # Plain integers: for one number at a time they are ten times as quick as arrays.
    key = _mix_one(seed + int(_GOLDEN))
    for part in stream:
        key = _mix_one((key ^ (part & _ALL)) + int(_GOLDEN))
    return np.uint64(key)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B] float64 in [0, 1): the draw of each stream at a position. keys uint64 [B], positions int64 [B]."""
    with np.errstate(over="ignore"):
        counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(_mix(keys + counters) ^ keys)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: Tensor, temperatures: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, and its log-probability under the distribution it was drawn from.

    The cumulative distribution is searched in two levels, blocks of the vocabulary and then one block, which costs one
    pass over the logits; `torch.multinomial` costs some twenty times that on a CPU.

    Args:
        logits: [B, V]. temperatures: [B] float32; 0 takes the most likely token, with log-probabilities at 1.
        u: [B] float64 in [0, 1).

    Returns:
        (tokens [B] int64, logprobs [B] float32)
    """
    vocabulary = logits.shape[-1]
    scale = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    scaled = logits.float() / scale[:, None]
    top, best = scaled.max(-1, keepdim=True)
    weights = torch.exp(scaled - top)
    if vocabulary <= BLOCK:
        total = weights.sum(-1, keepdim=True).double()
        drawn = _search(weights.double(), u[:, None] * total)
    else:
        total, drawn = _search_blocks(weights, u)
    tokens = torch.where(temperatures[:, None] > 0, drawn, best)
    logprobs = scaled.gather(1, tokens) - top - total.log().float()
    return tokens[:, 0], logprobs[:, 0]


def _search_blocks(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the weights [B, 1] float64, place [B, 1] where the share `u` of it is reached)."""
    rows, vocabulary = weights.shape
    blocks = -(-vocabulary // BLOCK)
    whole = vocabulary // BLOCK
    sums = weights.new_empty((rows, blocks), dtype=torch.float64)
    sums[:, :whole] = weights[:, : whole * BLOCK].view(rows, whole, BLOCK).sum(-1)
    if whole < blocks:
        sums[:, whole:] = weights[:, whole * BLOCK :].sum(-1, keepdim=True)
    return search_blocks(sums, u, vocabulary, lambda places: weights.gather(1, places))


def search_blocks(
    sums: Tensor, u: Tensor, vocabulary: int, weights_at: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(sum of the weights [B, 1] float64, place [B, 1] where the share `u` of it is reached).

    Args:
        sums: float64 [B, blocks], of the weights of each block; blocks behind the vocabulary have none.
        weights_at: weights [B, BLOCK] of places [B, BLOCK].
    """
    edges = sums.cumsum(-1)
    total = edges[:, -1:]
    target = u[:, None] * total
    block = torch.searchsorted(edges, target, right=True).clamp_(max=-(-vocabulary // BLOCK) - 1)
    rest = target - (edges.gather(1, block) - sums.gather(1, block))
    at = block * BLOCK + torch.arange(BLOCK, device=sums.device)
    places = at.clamp(max=vocabulary - 1)
    inner = weights_at(places).double()
    inner[at >= vocabulary] = 0.0
    return total, places.gather(1, _search(inner, rest))


def _search(weights: Tensor, target: Tensor) -> Tensor:
    """[B, 1]: the first of the weights [B, N] with which their sum goes past the target [B, 1]."""
    index = torch.searchsorted(weights.cumsum(-1), target, right=True)
    # Rounding can carry the search past the last token that has any weight: take the likeliest then.
    fallback = weights.argmax(-1, keepdim=True)
    index = torch.where(index < weights.shape[-1], index, fallback)
    return torch.where(weights.gather(1, index) > 0, index, fallback)
