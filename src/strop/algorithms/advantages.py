"""Advantages: how much better a completion, or a token, was than expected.

Everything here is a constant of the loss: results carry no graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import exact_dtype, widen
from strop.algorithms.recurrence import reverse_recurrence

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["none", "std", "population_std", "mean"]
Observations = Literal["skip", "state", "state_drop_rewards", "zero"]
Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


def group_relative(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each completion relative to its group: (reward - baseline) / (scale + eps).

    Baselines: `mean` of the group; `leave_one_out`, the mean of the others; `none`. Scales: `std` over n - 1;
    `population_std` over n; `mean`, the group's mean reward; `none` divides by nothing, without eps. Means and
    deviations are those of the whole group, for every baseline.

    Args:
        rewards: [N] float, one scalar per episode.
        group_ids: [N] int64, any numbers; members of a group need not be adjacent, groups may differ in size.
        eps: added to the divisor (verl 1e-6, TRL 1e-4).

    Returns:
        [N] float32. With a baseline or a scale, a group whose rewards are all equal (max == min, not a small std), or a
        group of one, gets exactly 0; with neither, the advantage is the reward.

    Raises:
        ValueError: an unknown baseline or scale; a negative reward with `scale="mean"`, whose divisor could be 0.

    Source: GRPO (arXiv 2402.03300) section 4.1.2 for `mean` and `std`; Dr. GRPO (arXiv 2503.20783) for `scale="none"`;
    RLOO (arXiv 2402.14740), the RLOO estimator, for `leave_one_out`; MaxRL (arXiv 2602.02710) for `scale="mean"`.
    """
    if baseline not in ("mean", "leave_one_out", "none"):
        raise ValueError(f"unknown baseline {baseline!r}")
    if scale not in ("none", "std", "population_std", "mean"):
        raise ValueError(f"unknown scale {scale!r}")
    if baseline == "none" and scale == "none":
        return rewards.detach().float()
    values = rewards.detach().to(exact_dtype(rewards.device))
    _, members, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    size = counts[members].to(values.dtype)
    total = _group_sum(values, members, len(counts))[members]
    mean = total / size
    if baseline == "mean":
        advantages = values - mean
    elif baseline == "leave_one_out":
        # r - (total - r) / (n - 1), written so that no small difference of large numbers is left.
        advantages = (values - mean) * size / (size - 1).clamp(min=1)
    else:
        advantages = values
    if scale == "mean":
        if bool((values < 0).any()):
            raise ValueError("scale='mean' divides by the mean reward of a group, so rewards must not be negative")
        advantages = advantages / (mean + eps)
    elif scale != "none":
        squares = _group_sum((values - mean).square(), members, len(counts))[members]
        freedom = size if scale == "population_std" else (size - 1).clamp(min=1)
        advantages = advantages / ((squares / freedom).sqrt() + eps)
    if bool((counts == 1).any()):
        warnings.warn("a group holds a single episode; its advantage is 0", stacklevel=2)
    return torch.where(no_spread(rewards, group_ids), 0.0, advantages).float()


def no_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[N] bool: True for each episode of a group whose rewards are all equal (max == min), so also a group of one."""
    _, members = torch.unique(group_ids, return_inverse=True)
    size = int(members.max()) + 1 if members.numel() else 0
    start = torch.zeros(size, dtype=rewards.dtype, device=rewards.device)
    highest = start.scatter_reduce(0, members, rewards.detach(), "amax", include_self=False)
    lowest = start.scatter_reduce(0, members, rewards.detach(), "amin", include_self=False)
    return (highest == lowest)[members]


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    observations: Observations = "skip",
    seq_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over sampled tokens, with a choice of what observation tokens are.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  returns = A + V. Observations are tokens
    with a False mask between the first and the last sampled token of a sequence; what lies outside (prompt, padding, a
    closing observation) never takes part.

    - `skip`: "next" is the next sampled token; observations do not exist (verl, AReaL, NeMo-RL).
    - `state`: observations are time steps like others, with their values and rewards (SkyRL, slime).
    - `state_drop_rewards`: the same without their rewards (ROLL).
    - `zero`: time steps of value 0 and reward 0 (OpenRLHF).

    With `skip` and `zero`, values at masked tokens never reach the result.

    Args:
        token_rewards: [T] or [B, T] float, usually 0 but at the last token.
        values: same shape, the critic's.
        mask: bool, same shape, True for sampled tokens.
        gamma: discount per time step.
        lam: lambda, one number or a tensor of the same shape.
        seq_ids: int64, same shape, tokens of a sequence adjacent. Without it a row is a sequence.

    Returns:
        (advantages, returns), float32, same shape, 0 where the mask is False.

    Raises:
        ValueError: an unknown treatment of observations, gamma or lam outside [0, 1].

    Source: arXiv 1506.02438 eq. 16.
    """
    _check_share("gamma", gamma)
    if not isinstance(lam, Tensor):
        _check_share("lam", lam)
    if observations not in ("skip", "state", "state_drop_rewards", "zero"):
        raise ValueError(f"unknown treatment of observations {observations!r}")
    inside = mask.bool().reshape(-1)
    ids = _flat_ids(mask, seq_ids)
    steps = (inside if observations == "skip" else _between(inside, ids)).nonzero().squeeze(1)
    kept = inside[steps]
    dtype = exact_dtype(values.device)
    reward = token_rewards.detach().reshape(-1)[steps].to(dtype)
    value = values.detach().reshape(-1)[steps].to(dtype)
    if observations in ("zero", "state_drop_rewards"):
        reward = torch.where(kept, reward, 0.0)
    if observations == "zero":
        value = torch.where(kept, value, 0.0)
    discount = gamma * _continues(ids[steps]).to(dtype)
    following = torch.cat([value[1:], value.new_zeros(1)])[: len(value)]
    decay = lam.detach().reshape(-1)[steps].to(dtype) if isinstance(lam, Tensor) else lam
    advantage = reverse_recurrence(reward + discount * following - value, discount * decay)
    return _scatter(advantage, steps[kept], kept, mask), _scatter(advantage + value, steps[kept], kept, mask)


def discounted_returns(token_rewards: Tensor, mask: Tensor, *, gamma: float, seq_ids: Tensor | None = None) -> Tensor:
    """Discounted reward to go at each sampled token: G_t = r_t + gamma G_next, observations skipped.

    Args:
        token_rewards: [T] or [B, T] float.
        mask: bool, same shape, True for sampled tokens.
        gamma: discount per sampled token.
        seq_ids: int64, same shape, tokens of a sequence adjacent. Without it a row is a sequence.

    Returns:
        float32, same shape, 0 where the mask is False.

    Raises:
        ValueError: gamma outside [0, 1].

    Source: REINFORCE++ (arXiv 2501.03262), the return to go.
    """
    _check_share("gamma", gamma)
    inside = mask.bool().reshape(-1)
    steps = inside.nonzero().squeeze(1)
    reward = token_rewards.detach().reshape(-1)[steps].to(exact_dtype(token_rewards.device))
    discount = gamma * _continues(_flat_ids(mask, seq_ids)[steps]).to(reward.dtype)
    return _scatter(reverse_recurrence(reward, discount), steps, torch.ones_like(inside[steps]), mask)


def whiten(
    advantages: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    reduce: Reduce | None = None,
) -> Tensor:
    """Scale masked advantages to variance 1, and shift them to mean 0: (A - mean) / sqrt(var + eps).

    Args:
        advantages: [T] or [B, T] float.
        mask: bool, same shape.
        shift_mean: subtract the mean; without it only the scale changes.
        unbiased: variance over n - 1 (verl, TRL) instead of n (OpenRLHF).
        reduce: joins ranks: reduce(tensor, "sum" | "max") returns the element-wise sum or maximum over all ranks. Every
            rank calls it equally often, also one without tokens.

    Returns:
        float32 (float64 for float64 input), same shape, 0 where the mask is False. Where all advantages are equal
        (max == min over all ranks) there is no scale: exactly 0 with `shift_mean`, unchanged without.
    """
    inside = mask.bool()
    values = torch.where(inside, advantages.detach(), 0.0).to(exact_dtype(advantages.device))
    join: Reduce = reduce or (lambda tensor, _: tensor)
    count, total = join(torch.stack([inside.sum().to(values.dtype), values.sum()]), "sum").unbind()
    mean = total / count.clamp(min=1)
    centred = torch.where(inside, values - mean, 0.0)
    squares = join(centred.square().sum().reshape(1), "sum")[0]
    variance = squares / ((count - 1) if unbiased else count).clamp(min=1)
    lowest = -torch.where(inside, values, torch.inf).min() if values.numel() else values.new_tensor(-torch.inf)
    highest = torch.where(inside, values, -torch.inf).max() if values.numel() else values.new_tensor(-torch.inf)
    negated_min, maximum = join(torch.stack([lowest, highest]), "max").unbind()
    start = centred if shift_mean else values
    flat = torch.zeros_like(values) if shift_mean else values
    return torch.where(maximum == -negated_min, flat, start * torch.rsqrt(variance + eps)).to(widen(advantages).dtype)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], it is {value}")


def _group_sum(values: Tensor, members: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add(0, members, values)


def _flat_ids(mask: Tensor, seq_ids: Tensor | None) -> Tensor:
    """[M] sequence of each token of the flattened batch; a row is a sequence where no ids are given."""
    if seq_ids is not None:
        return seq_ids.reshape(-1)
    rows = mask.shape[0] if mask.dim() > 1 else 1
    return torch.arange(rows, device=mask.device).repeat_interleave(mask.numel() // max(rows, 1))


def _between(inside: Tensor, ids: Tensor) -> Tensor:
    """[M] bool: from the first to the last True token of each sequence, all tokens in between included."""
    position = torch.arange(1, inside.numel() + 1, device=inside.device)
    size = int(ids.max()) + 1 if ids.numel() else 1
    slots = torch.where(inside, ids, 0)
    last = position.new_zeros(size).scatter_reduce(0, slots, torch.where(inside, position, 0), "amax")
    first = position.new_full((size,), inside.numel() + 1)
    first = first.scatter_reduce(0, slots, torch.where(inside, position, inside.numel() + 1), "amin")
    known = ids.clamp(min=0)
    return (ids >= 0) & (position >= first[known]) & (position <= last[known])


def _continues(ids: Tensor) -> Tensor:
    """[M] bool: True where the next token is of the same sequence."""
    result = torch.zeros_like(ids, dtype=torch.bool)
    result[:-1] = ids[1:] == ids[:-1]
    return result


def _scatter(values: Tensor, places: Tensor, kept: Tensor, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    flat[places] = values[kept].float()
    return flat.reshape(like.shape)
