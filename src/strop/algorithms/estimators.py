"""More advantages, built on those of `advantages.py`. Results are constants: they carry no graph."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages import Observations, Reduce, gae, group_relative, no_spread, whiten
from strop.algorithms.masking import exact_dtype
from strop.algorithms.segments import segment_count, segment_sum, spread


def batch_baseline(rewards: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """REINFORCE with the mean of the whole batch, all ranks together, as baseline.

    Args:
        rewards: [N] float.
        reduce: joins ranks, as in `advantages.whiten`.

    Returns:
        [N] float32.

    Source: Williams 1992, doi 10.1007/BF00992696, section 4 (reinforcement comparison).
    """
    values = rewards.detach().to(exact_dtype(rewards.device))
    sums = torch.stack([values.sum(), values.new_tensor(float(values.numel()))])
    total, count = (reduce(sums, "sum") if reduce else sums).unbind()
    return (values - total / count.clamp(min=1)).float()


def running_baseline(rewards: Tensor, baseline: float | None, *, decay: float = 0.95) -> tuple[Tensor, float]:
    """REINFORCE with a baseline that follows the rewards of earlier batches: b' = decay b + (1 - decay) mean.

    Args:
        rewards: [N] float.
        baseline: b after the last batch; None before the first one, which then takes its own mean.
        decay: in [0, 1).

    Returns:
        ([N] float32 advantages against b, b' for the next batch).

    Source: Williams 1992, doi 10.1007/BF00992696, section 4; RLOO (arXiv 2402.14740), the moving-average baseline.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must lie in [0, 1), it is {decay}")
    mean = float(rewards.detach().to(exact_dtype(rewards.device)).mean()) if rewards.numel() else 0.0
    start = mean if baseline is None else baseline
    return (rewards.detach() - start).float(), decay * start + (1 - decay) * mean


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Reward less that of the greedy completion of the same prompt.

    Args:
        rewards: [N] float.
        greedy_rewards: [N], of the prompt's most likely completion.

    Returns:
        [N] float32.

    Source: ReMax (arXiv 2310.10505), the greedy baseline.
    """
    return (rewards - greedy_rewards).detach().float()


def opo(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Reward less the baseline of least variance, the group's mean reward weighted by length.

    Args:
        rewards: [N] float.
        lengths: [N] sampled tokens, at least 1.
        group_ids: [N] int64.

    Returns:
        [N] float32; exactly 0 for a group without spread or of one.

    Source: OPO (arXiv 2505.23585), the length-weighted baseline.
    """
    _, members = torch.unique(group_ids, return_inverse=True)
    everyone = torch.ones_like(members, dtype=torch.bool)
    values = rewards.detach().to(exact_dtype(rewards.device))
    weighted = segment_sum(values * lengths, everyone, members)
    baseline = (weighted / segment_sum(lengths, everyone, members).clamp(min=1))[members]
    return torch.where(no_spread(rewards, group_ids), 0.0, values - baseline).float()


def maxrl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(reward - mean of the group) / mean of the group: the gradient of the log of the success rate, to order G.

    Args:
        rewards: [N] float, at least 0, usually 0 or 1.
        group_ids: [N] int64.

    Returns:
        [N] float32; exactly 0 for a group without spread.

    Source: MaxRL (arXiv 2602.02710), normalisation by the mean reward.
    """
    return group_relative(rewards, group_ids, baseline="mean", scale="mean", eps=0.0)


def pass_at_k(correct: Tensor, group_ids: Tensor, *, k: int) -> Tensor:
    """Advantages that raise the chance that at least one of k completions is right, in closed form.

    With n completions, w of them wrong: p = 1 - C(w, k) / C(n, k), s = sqrt(p (1 - p)); a right one has (1 - p) / s, a
    wrong one (1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s. A group that is sure to pass, or to fail, has 0.

    Args:
        correct: bool [N].
        group_ids: [N] int64.
        k: at least 1 and at most the size of every group.

    Returns:
        [N] float32.

    Raises:
        ValueError: a group smaller than k.

    Source: Pass@k training (arXiv 2508.10751), the analytical advantages.
    """
    _, members, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if k < 1 or bool((counts < k).any()):
        raise ValueError(f"pass@k with k = {k} needs k of at least 1 and groups of at least k completions")
    size = counts.to(exact_dtype(group_ids.device))
    wrong = torch.zeros_like(size).index_add(0, members, (~correct.bool()).to(size.dtype))

    def chance(start: int) -> Tensor:
        """C(wrong - start, k - start) / C(size - start, k - start), as a product of fractions."""
        result = torch.ones_like(size)
        for taken in range(start, k):
            result = result * ((wrong - taken).clamp(min=0) / (size - taken))
        return result

    fails, fails_with_me = chance(0), chance(1)
    deviation = (fails * (1 - fails)).sqrt()
    signal = deviation > 0
    divisor = torch.where(signal, deviation, 1.0)
    right = torch.where(signal, fails / divisor, 0.0)[members]
    others = torch.where(signal, (fails - fails_with_me) / divisor, 0.0)[members]
    return torch.where(correct.bool(), right, others).float()


def gdpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    weights: Tensor | None = None,
    eps: float = 1e-6,
    reduce: Reduce | None = None,
) -> Tensor:
    """Several rewards, each normalised within its group before they are added, and the sum whitened over the batch.

    Added before normalising, rewards of different size or rarity collapse into few distinct advantages.

    Args:
        rewards: [N, R] float, one column for each reward.
        group_ids: [N] int64.
        weights: [R]; all 1 when not given.
        reduce: joins ranks, as in `advantages.whiten`.

    Returns:
        [N] float32.

    Source: GDPO (arXiv 2601.05242).
    """
    columns = [group_relative(column, group_ids, baseline="mean", scale="std", eps=eps) for column in rewards.unbind(1)]
    factors = torch.ones(len(columns), device=rewards.device) if weights is None else weights.to(rewards.device)
    total = (torch.stack(columns, dim=1) * factors).sum(1)
    return whiten(total, torch.ones_like(total, dtype=torch.bool), reduce=reduce)


def token_rewards(
    rewards: Tensor, mask: Tensor, seq_ids: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """The reward of a sequence at its last trained token, less kl_coef x kl at each trained token.

    Args:
        rewards: [N] float.
        mask: bool [T] or [B, T].
        seq_ids: int64, same shape, 0..N-1.
        kl: same shape, from `kl.kl_estimate`; with `kl_coef`.

    Returns:
        float32, same shape, without a graph; 0 where the mask is False. A sequence without a trained token has none.

    Source: RLHF (arXiv 2203.02155) eq. 2; REINFORCE++ (arXiv 2501.03262), token-level penalty.
    """
    if (kl is None) != (kl_coef == 0.0):
        raise ValueError("kl and kl_coef go together")
    inside = mask.bool().reshape(-1)
    slots = torch.where(inside, seq_ids.reshape(-1), 0)
    places = torch.arange(1, inside.numel() + 1, device=inside.device)
    last = places.new_zeros(rewards.numel()).scatter_reduce(0, slots, torch.where(inside, places, 0), "amax")
    trained = last > 0
    result = torch.zeros(inside.numel(), device=inside.device)
    result[last[trained] - 1] = rewards.detach().float()[trained]
    if kl is not None:
        result = result - torch.where(inside, kl_coef * kl.detach().reshape(-1).float(), 0.0)
    return result.reshape(mask.shape)


def gae_decoupled(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | Tensor = 1.0,
    observations: Observations = "skip",
    seq_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with one lambda for the policy's advantages and another for the critic's targets.

    Args:
        rewards: token rewards, [T] or [B, T]; the rest as in `advantages.gae`.
        lam, critic_lam: one number or a tensor of the same shape.

    Returns:
        (advantages, returns), float32, same shape.

    Source: VC-PPO (arXiv 2503.01491) and VAPO (arXiv 2504.05118), decoupled GAE.
    """
    settings = {"gamma": gamma, "observations": observations, "seq_ids": seq_ids}
    advantages, _ = gae(rewards, values, mask, lam=lam, **settings)  # type: ignore[arg-type]
    _, returns = gae(rewards, values, mask, lam=critic_lam, **settings)  # type: ignore[arg-type]
    return advantages, returns


def length_adaptive_lam(mask: Tensor, seq_ids: Tensor, *, alpha: float = 0.05) -> Tensor:
    """lambda = 1 - 1 / (alpha x trained tokens of the sequence), at least 0, for `gae`.

    Args:
        mask: bool [T] or [B, T].
        seq_ids: int64, same shape.

    Returns:
        float32, same shape, the same for all tokens of a sequence; 0 where the mask is False.

    Source: VAPO (arXiv 2504.05118), length-adaptive GAE.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, it is {alpha}")
    lengths = segment_count(mask, seq_ids).clamp(min=1)
    return spread((1 - 1 / (alpha * lengths)).clamp(min=0.0), mask, seq_ids).float()
