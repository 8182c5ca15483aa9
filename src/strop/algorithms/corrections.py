"""Corrections for tokens that came from a policy other than the one being trained.

The sampler and the trainer compute the same log-probability with other kernels, at other precision, or with older
weights; w = exp(trainer - sampler) says by how much. Everything here is a constant of the loss, computed over a whole
batch before denominators are counted.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import EXP_LIMIT, bounded_exp, fence, widen
from strop.algorithms.segments import segment_mean, segment_sum, spread

Level = Literal["token", "sequence", "geometric"]
Correction = Literal["none", "truncate", "band", "mask"]
MISMATCH = (
    "kl/sampler",
    "mismatch/kl_k1",
    "mismatch/abs_max",
    "mismatch/weight",
    "mismatch/weight_max",
    "mismatch/effective_share",
    "mismatch/clipped_share",
)
"""What is measured of w, and returned beside weights; see `importance_weights`."""


def importance_weights(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    *,
    level: Level = "token",
    kind: Correction = "none",
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights that multiply each token's policy loss, and the tokens that are left.

    Levels: `token` w_t = exp(trainer - sampler); `sequence` the product over a sequence's trained tokens; `geometric`
    the product's root of their number. Kinds:

    - `none`: w as it is.
    - `truncate`: w at most `high` and, if given, at least `low`. Truncated importance sampling.
    - `band`: w inside [low, high], 0 outside; a token outside still counts in denominators. IcePop.
    - `mask`: w inside [low, high]; tokens outside leave `keep_mask` and the denominators. Masked importance sampling.

    Args:
        trainer_logprobs: [T] or [B, T], of the trained policy before this step's updates.
        sampler_logprobs: same shape, as recorded when sampled; may be NaN where the mask is False.
        mask: bool, same shape.
        seq_ids: int64, same shape.
        low, high: bounds of w.

    Returns:
        (weights, keep_mask, metrics): weights float32, same shape, 0 where not kept; keep_mask bool; metrics, scalars
        over the tokens of `mask`: `kl/sampler` (k3 of KL(sampler || trainer)), `mismatch/kl_k1`, `mismatch/abs_max`
        (largest difference of log-probabilities), `mismatch/weight` and `mismatch/weight_max`, both of w before its
        bounds, `mismatch/effective_share` (effective sample size of the weights / tokens), `mismatch/clipped_share`.

    Raises:
        ValueError: an unknown level or kind; bounds that the kind needs and lacks, or does not use.

    Source: truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456, and for this mismatch
    https://fengyao.notion.site/off-policy-rl; IcePop, Ring-1T (arXiv 2510.18855); masks and sequence level,
    https://richardli.xyz/rl-collapse.
    """
    _check_bounds(level, kind, low, high)
    inside, (trainer, sampler) = fence(mask, trainer_logprobs.detach(), sampler_logprobs.detach())
    difference = trainer - sampler
    if level == "token":
        exponent = difference
    else:
        over = segment_sum if level == "sequence" else segment_mean
        exponent = spread(over(difference, inside, seq_ids), inside, seq_ids).to(difference.dtype)
    weights = torch.where(inside, bounded_exp(exponent), 0.0)
    floor, ceiling = 0.0 if low is None else low, torch.inf if high is None else high
    bounded, kept = weights, inside
    tokens = inside.sum().clamp(min=1)
    clipped = torch.zeros_like(tokens)
    if kind != "none":
        outside = inside & ((weights < floor) | (weights > ceiling))
        clipped = outside.sum()
        if kind == "truncate":
            bounded = torch.where(inside, weights.clamp(floor, ceiling), 0.0)
        else:
            bounded = torch.where(outside, 0.0, weights)
            kept = inside & ~outside if kind == "mask" else inside
    values = (
        (torch.expm1(difference.clamp(max=EXP_LIMIT)) - difference).sum() / tokens,
        -difference.sum() / tokens,
        difference.abs().max() if difference.numel() else difference.sum(),
        weights.sum() / tokens,
        weights.max() if weights.numel() else weights.sum(),
        effective_sample_size(bounded, inside) / tokens,
        clipped / tokens,
    )
    return bounded, kept, dict(zip(MISMATCH, values, strict=True))


def mismatch_metrics(trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """The metrics of `importance_weights` without bounds, of tensors on a CPU, in a third of its time: that looks at
    every token and makes weights of it, this at those of `mask` alone.

    Args:
        trainer_logprobs, sampler_logprobs: [T] float32; may be anything where the mask is False.
        mask: bool, [T].

    Returns:
        Numbers under the names of `importance_weights`.

    Source: as `importance_weights`.
    """
    # By NumPy's index, which takes a fifth of the time of torch's.
    between = (trainer_logprobs - sampler_logprobs).numpy()[mask.numpy()]
    if not len(between):
        return dict.fromkeys(MISMATCH, 0.0)
    # In float64 nothing small is lost in w - 1 - log w, nothing large overflows, and a single `exp` is enough.
    difference = torch.from_numpy(between).double()
    weights = torch.exp(difference.clamp(max=EXP_LIMIT))
    tokens, total, drift = len(between), float(weights.sum()), float(difference.sum())
    largest = float(weights.max())
    # As `effective_sample_size`; weights of nothing but far too unlikely tokens are too small to be squared.
    scaled = weights if largest > 1e-100 or largest == 0.0 else weights / largest
    squares = float(scaled.dot(scaled))
    values = (
        max(total - tokens - drift, 0.0) / tokens,
        -drift / tokens,
        float(max(between.max(), -between.min())),
        total / tokens,
        largest,
        float(scaled.sum()) ** 2 / squares / tokens if squares > 0 else 0.0,
        0.0,
    )
    return dict(zip(MISMATCH, values, strict=True))


def three_policies(
    sampler_logprobs: Tensor, proximal_logprobs: Tensor, current_logprobs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """How far apart the three policies of a step are that was sampled ahead.

    The sampler drew the tokens, with weights that may be some versions old. The proximal policy is the trained one
    before the step's first update: ratios are clipped around it, and the correction weighs tokens by proximal over
    sampler. The current one is what the last update of the step saw.

    Args:
        sampler_logprobs, proximal_logprobs, current_logprobs: [T] or [B, T]; may be NaN where the mask is False.
        mask: bool, same shape.

    Returns:
        Scalars over the tokens of `mask`, in nats: for `sampler_proximal`, `proximal_current` and `sampler_current` the
        mean of |difference| (`policies/…_abs`) and k3 of KL(first || second) (`policies/…_kl`).

    Source: the decoupled objective, Hilton et al. (arXiv 2110.00641); AReaL (arXiv 2505.24298) eq. 5.
    """
    given = (sampler_logprobs.detach(), proximal_logprobs.detach(), current_logprobs.detach())
    inside, (sampler, proximal, current) = fence(mask, *given)
    tokens = inside.sum().clamp(min=1)
    pairs = {
        "sampler_proximal": proximal - sampler,
        "proximal_current": current - proximal,
        "sampler_current": current - sampler,
    }
    found = {}
    for name, difference in pairs.items():
        found[f"policies/{name}_abs"] = difference.abs().sum() / tokens
        found[f"policies/{name}_kl"] = (torch.expm1(difference.clamp(max=60.0)) - difference).sum() / tokens
    return found


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 over the tokens of `mask`: how many equally weighted tokens they are worth.

    Args:
        weights: [T] or [B, T], at least 0.
        mask: bool, same shape.

    Returns:
        Scalar float; 0 when nothing is left.

    Source: Kong 1992, the usual (sum w)^2 / sum w^2.
    """
    inside = torch.where(mask.bool(), widen(weights.detach()), 0.0)
    largest = inside.max().clamp(min=torch.finfo(inside.dtype).tiny) if inside.numel() else torch.ones(())
    # Scaled by the largest, so that no square overflows.
    scaled = inside / largest
    squares = scaled.square().sum()
    return torch.where(squares > 0, scaled.sum().square() / squares.clamp(min=1e-30), 0.0)


def veto(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, seq_ids: Tensor, *, threshold: float = 1e-4
) -> Tensor:
    """Drop every sequence with a token whose w = exp(trainer - sampler) is below `threshold`.

    Such a token is one that the trained policy would all but never sample: a broken record rather than noise.

    Args:
        trainer_logprobs, sampler_logprobs, mask, seq_ids: [T] or [B, T], as in `importance_weights`.
        threshold: between 0 and 1.

    Returns:
        bool, same shape: `mask` without the sequences dropped.

    Source: verl, `rollout_token_veto_threshold`; https://richardli.xyz/rl-collapse.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"the veto threshold must lie between 0 and 1, it is {threshold}")
    inside, (trainer, sampler) = fence(mask, trainer_logprobs.detach(), sampler_logprobs.detach())
    broken = inside & (bounded_exp(trainer - sampler) < threshold)
    return inside & (spread(segment_sum(broken.float(), inside, seq_ids), inside, seq_ids) == 0)


def off_policy_sequence_mask(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor, seq_ids: Tensor, *, threshold: float
) -> Tensor:
    """Drop sequences with a negative advantage that the policy has moved too far away from.

    A sequence is dropped if the mean of its advantages is below 0 and the mean over its tokens of
    sampler_logprobs - logprobs is above `threshold` (in nats).

    Args:
        logprobs: [T] or [B, T], the policy's.
        sampler_logprobs: same shape, of the policy that sampled.
        advantages, mask, seq_ids: same shape.

    Returns:
        bool, same shape: `mask` without the sequences dropped.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking.
    """
    if not threshold >= 0:
        raise ValueError(f"the threshold must be at least 0, it is {threshold}")
    inside, (new, sampled, advantage) = fence(mask, logprobs.detach(), sampler_logprobs.detach(), advantages.detach())
    distance = segment_mean(sampled - new, inside, seq_ids)
    direction = segment_mean(advantage, inside, seq_ids)
    dropped = ((direction < 0) & (distance > threshold)).float()
    return inside & (spread(dropped, inside, seq_ids) == 0)


def _check_bounds(level: str, kind: str, low: float | None, high: float | None) -> None:
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"unknown level {level!r}")
    if kind not in ("none", "truncate", "band", "mask"):
        raise ValueError(f"unknown kind of correction {kind!r}")
    if kind == "none" and not (low is None and high is None):
        raise ValueError("low and high have no effect with kind='none'")
    if kind == "truncate" and high is None:
        raise ValueError("kind='truncate' needs high")
    if kind == "band" and (low is None or high is None):
        raise ValueError("kind='band' needs low and high")
    if kind == "mask" and low is None and high is None:
        raise ValueError("kind='mask' needs low, high or both")
    if (low is not None and low < 0) or (low is not None and high is not None and low > high):
        raise ValueError(f"bounds must satisfy 0 <= low <= high, they are {low} and {high}")
