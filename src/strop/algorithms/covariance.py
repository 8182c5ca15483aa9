"""Policy losses that hold back the tokens whose log-probability and advantage rise together, which eat the entropy.

Which tokens are held back is a matter of the whole mini-batch, so it is decided once, from the log-probabilities before
the update, and handed to the loss. (The paper's code decides within each micro-batch and from the current ones; on the
first update the two agree.)

Source: The entropy mechanism (arXiv 2505.22617), Clip-Cov and KL-Cov.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.masking import bounded_exp, exact_dtype, fence, hide
from strop.algorithms.policy_losses import Metrics, ppo_clip, ratio_metrics


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - its mean) x (A - its mean) at each token, means over the tokens of `mask`.

    Args:
        logprobs: [T] or [B, T], over the whole mini-batch.
        advantages, mask: same shape.

    Returns:
        float32 (float64 for float64 input), same shape, without a graph; 0 where the mask is False.
    """
    inside, (new, advantage) = fence(mask, logprobs.detach(), advantages.detach())
    dtype, count = exact_dtype(new.device), inside.sum().clamp(min=1)
    product = (new - new.sum(dtype=dtype) / count) * (advantage - advantage.sum(dtype=dtype) / count)
    return torch.where(inside, product, 0.0).to(new.dtype)


def select_clip_cov(
    covariance: Tensor,
    mask: Tensor,
    *,
    generator: torch.Generator,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Tokens that Clip-Cov takes out: a random `share` of all, drawn where low < covariance < high.

    At least one token is taken where there is a candidate.

    Returns:
        bool, the shape of `covariance`.
    """
    if not (0 < share <= 1 and low < high):
        raise ValueError("clip-cov needs a share in (0, 1] and low < high")
    inside = mask.bool()
    candidates = (inside & (covariance > low) & (covariance < high)).reshape(-1).nonzero().squeeze(1)
    count = max(int(share * int(inside.sum())), 1)
    draw = torch.randperm(len(candidates), generator=generator, device=generator.device).to(covariance.device)
    return _at(candidates[draw[:count]], covariance)


def select_kl_cov(covariance: Tensor, mask: Tensor, *, share: float = 2e-4) -> Tensor:
    """Tokens that KL-Cov holds: the `share` of all with the largest covariance, at least one.

    Returns:
        bool, the shape of `covariance`.
    """
    if not 0 < share <= 1:
        raise ValueError("kl-cov needs a share in (0, 1]")
    inside = mask.bool()
    tokens = int(inside.sum())
    count = min(max(int(share * tokens), 1), tokens)
    ranked = torch.where(inside, covariance, -torch.inf).reshape(-1)
    return _at(torch.topk(ranked, count).indices, covariance)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """`ppo_clip` without the `selected` tokens, whose loss and gradient are 0.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `policy_losses`.
        selected: bool, same shape, from `select_clip_cov`.
    """
    loss, metrics = ppo_clip(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    metrics["policy/covariance_fraction"] = selected.to(loss.dtype)
    return torch.where(selected, 0.0, loss), metrics


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    kl_coef: float = 1.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-r A, unclipped, plus kl_coef |log r| at the `selected` tokens.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `policy_losses`.
        selected: bool, same shape, from `select_kl_cov`.
    """
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be at least 0, it is {kl_coef}")
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    loss = -bounded_exp(new - old) * advantage + torch.where(selected, kl_coef * (new - old).abs(), 0.0)
    metrics = ratio_metrics(new, old) | {"policy/covariance_fraction": selected.to(loss.dtype)}
    return hide(loss, inside, mask), metrics


def _at(places: Tensor, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    flat[places] = True
    return flat.reshape(like.shape)
