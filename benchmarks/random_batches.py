"""Batches to train on, of random tokens."""

from __future__ import annotations

from typing import Any


def batch(count: int, length: int, vocabulary: int, *, prompt: int, seed: int = 1, shared: bool = False) -> Any:
    """Streams of one length, in groups of four, with advantages.

    Args:
        count: streams. length: tokens of each. prompt: tokens at the beginning of each that are not trained, at least
            one. shared: the streams of a group have the same prompt.
    """
    import torch

    from strop.algorithms.batch import TokenBatch

    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (count, length), generator=random)
    if shared:
        ids[:, :prompt] = ids[::4, :prompt].repeat_interleave(4, 0)
    mask = (torch.arange(length) >= prompt).repeat(count)
    total = count * length
    return TokenBatch(
        input_ids=ids.reshape(-1),
        position_ids=torch.arange(length).repeat(count),
        seq_ids=torch.arange(count).repeat_interleave(length),
        loss_mask=mask,
        sampler_logprobs=torch.where(mask, -torch.rand(total, generator=random) - 11, torch.nan),
        versions=torch.where(mask, 0, -1).int(),
        rewards=torch.rand(count, generator=random),
        group_ids=torch.arange(count) // 4,
        truncated=torch.zeros(count, dtype=torch.bool),
        advantages=torch.randn(count, generator=random).repeat_interleave(length),
        old_logprobs=None,
    )
