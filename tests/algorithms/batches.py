"""Random flat batches for the tests of the algorithms."""

from __future__ import annotations

import torch

from strop.algorithms.batch import TokenBatch


def random_batch(
    lengths: list[int], *, group_ids: list[int] | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
) -> TokenBatch:
    """Sequences of the given lengths: a prompt token, then a random mask; NaN wherever the mask is False."""
    draw = torch.Generator().manual_seed(seed)
    total, count = sum(lengths), len(lengths)
    seq_ids = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    starts = torch.cumsum(torch.tensor(lengths), 0) - torch.tensor(lengths)
    mask = torch.rand(total, generator=draw) < 0.7
    mask[starts] = False

    def masked(scale: float, shift: float) -> torch.Tensor:
        values = torch.randn(total, generator=draw, dtype=dtype) * scale + shift
        return torch.where(mask, values, torch.nan)

    sampler = masked(0.5, -1.5)
    return TokenBatch(
        input_ids=torch.randint(0, 9, (total,), generator=draw),
        position_ids=torch.arange(total) - starts[seq_ids],
        seq_ids=seq_ids,
        loss_mask=mask,
        sampler_logprobs=sampler,
        versions=torch.where(mask, 0, -1),
        rewards=torch.randint(0, 3, (count,), generator=draw).float(),
        group_ids=torch.tensor(group_ids if group_ids is not None else [i // 2 for i in range(count)]),
        truncated=torch.zeros(count, dtype=torch.bool),
        old_logprobs=sampler + masked(0.1, 0.0),
        ref_logprobs=sampler + masked(0.3, 0.0),
        values=masked(1.0, 0.0),
        teacher_logprobs=sampler + masked(0.5, 0.0),
        greedy_rewards=torch.randint(0, 3, (count,), generator=draw).float(),
    )


def policy_logprobs(batch: TokenBatch, *, seed: int = 1, scale: float = 0.3) -> torch.Tensor:
    """[T] with a graph: near the batch's old log-probabilities, 0 where the mask is False, as a trainer gives them."""
    draw = torch.Generator().manual_seed(seed)
    assert batch.old_logprobs is not None
    noise = torch.randn(batch.loss_mask.shape, generator=draw, dtype=batch.old_logprobs.dtype) * scale
    return torch.where(batch.loss_mask, batch.old_logprobs + noise, 0.0).requires_grad_()


def fill_targets(batch: TokenBatch, *, seed: int = 3) -> TokenBatch:
    """A teacher's targets of two tokens a position, of which the first is the sampled one; NaN where it is masked."""
    draw = torch.Generator().manual_seed(seed)
    events = torch.randn(len(batch.seq_ids), 3, generator=draw, dtype=batch.sampler_logprobs.dtype).log_softmax(-1)
    batch.extra["target_logprobs"] = torch.where(batch.loss_mask[:, None], events, torch.nan)
    return batch


def fill_student(batch: TokenBatch, logprobs: torch.Tensor) -> TokenBatch:
    """What a student says of the same events that gives the sampled token this log-probability, and a third of the rest
    to the second; with the graph of `logprobs`, and NaN where it is masked."""
    inside = batch.loss_mask
    sampled = torch.where(inside, logprobs, -1.0).clamp(max=-1e-3)
    rest = torch.log(-torch.expm1(sampled))
    events = torch.stack([sampled, rest - torch.log(torch.tensor(3.0)), rest + torch.log(torch.tensor(2 / 3))], -1)
    batch.extra["student_logprobs"] = torch.where(inside[:, None], events, torch.nan)
    return batch
