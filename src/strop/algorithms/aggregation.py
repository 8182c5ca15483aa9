"""From token losses to one number, with denominators counted over a whole mini-batch.

A loss is a sum over tokens divided by a count that was taken before anything was cut into micro-batches or handed to
ranks, so the sum over the parts is the same whatever the parts are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import widen
from strop.algorithms.segments import segment_count, spread

Mode = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"]


def denominators(mask: Tensor, seq_ids: Tensor, *, max_new_tokens: int | None = None) -> dict[Mode, float]:
    """What each mode of `aggregate` divides by; call it once, over the whole mini-batch.

    Tokens and sequences that are masked do not count, except in `constant`, which must not depend on what was sampled:

    - `token_mean`: tokens where the mask is True.
    - `sequence_mean`, `sequence_mean_token_sum`: sequences with at least one such token.
    - `constant`: all sequences, masked or not, times `max_new_tokens`; absent without `max_new_tokens`.

    Args:
        mask: bool [T] or [B, T].
        seq_ids: int64, same shape; a negative id is padding and belongs to no sequence.
        max_new_tokens: longest completion in tokens.

    Returns:
        mode -> count, as floats. Counts of ranks that hold different sequences add up.
    """
    inside = mask.bool()
    sequences = float((segment_count(inside, seq_ids) > 0).sum())
    counts: dict[Mode, float] = {
        "token_mean": float(inside.sum()),
        "sequence_mean": sequences,
        "sequence_mean_token_sum": sequences,
    }
    if max_new_tokens is not None:
        counts["constant"] = float(torch.unique(seq_ids[seq_ids >= 0]).numel() * max_new_tokens)
    return counts


def aggregate(
    per_token: Tensor, mask: Tensor, seq_ids: Tensor, *, mode: Mode = "token_mean", denominator: float
) -> Tensor:
    """Sum token losses over a micro-batch that holds whole sequences.

    - `token_mean`: sum of all tokens / tokens. DAPO (arXiv 2503.14476) eq. 12.
    - `sequence_mean`: sum over sequences of the mean of their tokens / sequences. GRPO (arXiv 2402.03300) eq. 3.
    - `sequence_mean_token_sum`: sum of all tokens / sequences. The policy gradient of a whole completion.
    - `constant`: sum of all tokens / (sequences x max_new_tokens). Dr. GRPO (arXiv 2503.20783).

    Args:
        per_token: [T] or [B, T]; what it holds where the mask is False does not matter.
        mask: bool, same shape.
        seq_ids: int64, same shape.
        denominator: the mode's entry of `denominators` over the whole mini-batch.

    Returns:
        Scalar float32 (float64 for float64 input) with a graph. 0 with zero gradients when all is masked.

    Raises:
        ValueError: an unknown mode, or a negative denominator.
    """
    if mode not in ("token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"):
        raise ValueError(f"unknown aggregation {mode!r}")
    if not denominator >= 0:
        raise ValueError(f"the denominator of {mode} is {denominator}; it is a count over the whole mini-batch")
    inside = mask.bool()
    values = torch.where(inside, widen(per_token), 0.0)
    if mode == "sequence_mean":
        lengths = spread(segment_count(inside, seq_ids), inside, seq_ids).to(values.dtype)
        values = values / lengths.clamp(min=1.0)
    # A count of 0 means that nothing in the mini-batch is trained; the sum is then 0 and keeps its graph.
    return values.sum() / (denominator or 1.0)
