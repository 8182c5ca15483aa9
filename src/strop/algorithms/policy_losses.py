"""Policy losses: one number for each token, with a graph, and what to log about it.

Common to all: r = exp(logprobs - old_logprobs). `logprobs` [T] or [B, T] has the graph; `old_logprobs` (the policy that
the step began with) and `advantages` have the same shape and are constants. Where `mask` (bool, optional) is False the
result is 0 and has no gradient; without a mask a token with an input that is not finite gets NaN and no gradient.
Losses are float32 (float64 for float64 input) and are summed by `aggregation.aggregate`. Metrics are detached, per
token, and their mean over trained tokens is what one logs (their maximum, for names in `_max`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import EXP_LIMIT, bounded_exp, fence, hide
from strop.algorithms.segments import segment_mean, segment_sum, spread

Metrics = dict[str, Tensor]


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with `dual_clip` c, at most -c A where A < 0.

    Metrics: those of the ratio, `policy/clip_fraction` (tokens at which the clip decides) and, with `dual_clip`,
    `policy/dual_clip_fraction`.

    Raises:
        ValueError: a negative clip, or `dual_clip` not above 1.

    Source: PPO (arXiv 1707.06347) eq. 7; DAPO (arXiv 2503.14476) eq. 10 for two bounds; arXiv 1912.09729 for the dual
    clip.
    """
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, it is {dual_clip}")
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = bounded_exp(new - old)
    plain = -ratio * advantage
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = torch.maximum(plain, clipped)
    metrics = ratio_metrics(new, old)
    metrics["policy/clip_fraction"] = (clipped > plain).detach().to(loss.dtype)
    if dual_clip is not None:
        bound = torch.where(advantage < 0, -dual_clip * advantage, torch.inf)
        metrics["policy/dual_clip_fraction"] = (loss > bound).detach().to(loss.dtype)
        loss = torch.minimum(loss, bound)
    return hide(loss, inside, mask), metrics


def reinforce(
    logprobs: Tensor, advantages: Tensor, *, old_logprobs: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """-A log pi: the policy gradient itself, right for tokens that the policy sampled as it is now.

    Metrics: those of the ratio, when `old_logprobs` is given; the loss does not depend on it.

    Source: Williams 1992, doi 10.1007/BF00992696.
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach()
    inside, (new, before, advantage) = fence(mask, logprobs, old, advantages.detach())
    metrics = {} if old_logprobs is None else ratio_metrics(new, before)
    return hide(-advantage * new, inside, mask), metrics


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    token_level: bool = False,
) -> tuple[Tensor, Metrics]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s the ratio of a whole sequence, exp(mean of log r).

    With `token_level` (GSPO-token) the value is the same, and a token's gradient goes to that token alone, so that
    advantages may differ within a sequence. Meant for the aggregation `sequence_mean`. Needs whole sequences.

    Args:
        mask: bool, the shape of `logprobs`.
        seq_ids: int64, same shape.

    Source: GSPO (arXiv 2507.18071) eq. 5 and 7; eq. 13 and 14 for `token_level`.
    """
    _check_clip(clip_low, clip_high)
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    mean = spread(segment_mean(new - old, inside, seq_ids), inside, seq_ids).to(new.dtype)
    if token_level:
        # The mean is a constant here; new - new.detach() is 0 and carries the token's own gradient.
        mean = mean.detach() + new - new.detach()
    ratio = bounded_exp(mean)
    plain = -ratio * advantage
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    metrics = ratio_metrics(new, old) | {"policy/sequence_ratio": ratio.detach()}
    metrics["policy/clip_fraction"] = (clipped > plain).detach().to(plain.dtype)
    return hide(torch.maximum(plain, clipped), inside, mask), metrics


def topr(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, seq_ids: Tensor
) -> tuple[Tensor, Metrics]:
    """-w A log pi with w = min(1, s) where A < 0, else 1; s is the ratio of a whole sequence, a constant.

    What is good is learned however unlikely the policy finds it; what is bad is only pushed away from while the policy
    would still do it, so that completions of another policy cannot push it without end. Advantages are meant to be
    equal within a sequence, and the aggregation to be `sequence_mean_token_sum`. Needs whole sequences.

    Metrics: those of the ratio, `policy/sequence_ratio`, and `policy/tapered_fraction`, the tokens with w below 1.

    Args:
        mask: bool, the shape of `logprobs`.
        seq_ids: int64, same shape.

    Source: tapered off-policy REINFORCE (arXiv 2503.14286), the gradient of its canonical form.
    """
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    together = spread(segment_sum((new - old).detach(), inside, seq_ids), inside, seq_ids).to(new.dtype)
    ratio = bounded_exp(together)
    weight = torch.where(advantage < 0, ratio.clamp(max=1.0), 1.0)
    metrics = ratio_metrics(new, old) | {"policy/sequence_ratio": ratio}
    metrics["policy/tapered_fraction"] = (weight < 1).to(new.dtype)
    return hide(-weight * advantage * new, inside, mask), metrics


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Metrics]:
    """-A x the geometric mean over a sequence of its clipped token ratios.

    log r of each token is clipped to [-clip_low, clip_high] on the side on which PPO would clip it (above for A > 0,
    below for A < 0); note that the bounds are of log r. Meant for the aggregation `sequence_mean`. Needs whole
    sequences.

    Args:
        mask: bool, the shape of `logprobs`.
        seq_ids: int64, same shape.

    Source: GMPO (arXiv 2507.20673), the objective with token-level clipping.
    """
    _check_clip(clip_low, clip_high)
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    log_ratio = new - old
    sign = torch.sign(advantage)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
    log_ratio = torch.where(advantage == 0, log_ratio, pessimistic)
    mean = spread(segment_mean(log_ratio, inside, seq_ids), inside, seq_ids).to(new.dtype)
    metrics = ratio_metrics(new, old)
    metrics["policy/clip_fraction"] = (log_ratio != new - old).detach().to(new.dtype)
    return hide(-bounded_exp(mean) * advantage, inside, mask), metrics


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log pi, the clipped ratio a constant: no token loses its gradient.

    The default `clip_low` of 1 is no lower bound, as in the paper's experiments.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    _check_clip(clip_low, clip_high)
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = bounded_exp(new - old).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = ratio_metrics(new, old)
    metrics["policy/clip_fraction"] = (weight != ratio).to(new.dtype)
    return hide(-weight * advantage * new, inside, mask), metrics


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip; tau is `tau_positive` where A > 0.

    Metrics: those of the ratio and `policy/gate`, the weight of a token's gradient relative to REINFORCE with ratio r,
    4 p (1 - p) with p the sigmoid: 1 on-policy.

    Raises:
        ValueError: a temperature that is not positive.

    Source: SAPO (arXiv 2511.20347), the soft gate.
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError("tau_positive and tau_negative must be positive")
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(new.dtype)
    probability = torch.sigmoid(tau * (bounded_exp(new - old) - 1))
    metrics = ratio_metrics(new, old) | {"policy/gate": (4 * probability * (1 - probability)).detach()}
    return hide(-4 / tau * probability * advantage, inside, mask), metrics


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    threshold: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-M r A, where M drops a token that has left the trust region and would go further.

    M is 0 where the divergence is above `threshold` and either A > 0 and r > 1, or A < 0 and r < 1. The divergence is
    that of the choice "this token or another", p old and q new probability: `tv` |p - q|; `kl` p log(p / q) +
    (1 - p) log((1 - p) / (1 - q)). The paper takes for `old_logprobs` those of the policy that sampled. SkyRL reports
    thresholds of 0.2 for `tv` and 0.05 for `kl`.

    Raises:
        ValueError: an unknown divergence or a threshold that is not positive.

    Source: DPPO (arXiv 2602.04879) eq. 11 to 14.
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f"unknown divergence {divergence!r}")
    if not threshold > 0:
        raise ValueError(f"the threshold must be positive, it is {threshold}")
    inside, (new, old, advantage) = fence(mask, logprobs, old_logprobs.detach(), advantages.detach())
    ratio = bounded_exp(new - old)
    # Rounding may put a log-probability a hair above 0, and at 1 the "other" has no logarithm.
    most = 1 - torch.finfo(new.dtype).eps
    before, now = torch.exp(old).clamp(max=most), torch.exp(new.detach()).clamp(max=most)
    if divergence == "tv":
        distance = (before - now).abs()
    else:
        distance = before * (old - new.detach()) + (1 - before) * (torch.log1p(-before) - torch.log1p(-now))
    leaving = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
    dropped = leaving & (distance > threshold)
    metrics = ratio_metrics(new, old)
    metrics["policy/clip_fraction"] = dropped.to(new.dtype)
    metrics["policy/divergence"] = distance
    return hide(torch.where(dropped, 0.0, -ratio * advantage), inside, mask), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """(V - R)^2 / 2; with `clip`, the larger of it and the same for V within `clip` of the old value.

    Args:
        values: [T] or [B, T], the critic's, with a graph.
        old_values: same shape, the critic's before this step.
        returns: same shape, the targets.

    Raises:
        ValueError: a clip that is not positive.

    Source: PPO (arXiv 1707.06347) eq. 9; the clip is that of the published code (arXiv 2005.12729).
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, it is {clip}")
    inside, (new, old, target) = fence(mask, values, old_values.detach(), returns.detach())
    loss = (new - target).square()
    metrics = {"value/error": (new - target).detach().abs()}
    if clip is not None:
        bounded = (torch.minimum(torch.maximum(new, old - clip), old + clip) - target).square()
        metrics["value/clip_fraction"] = (bounded > loss).detach().to(new.dtype)
        loss = torch.maximum(loss, bounded)
    return hide(loss / 2, inside, mask), metrics


def entropy_bonus(entropy: Tensor, *, coef: float, mask: Tensor | None = None) -> Tensor:
    """-coef x entropy, per token.

    Args:
        entropy: [T] or [B, T], of each token's distribution, in nats, with a graph.

    Source: A3C (arXiv 1602.01783), entropy regularisation.
    """
    inside, (values,) = fence(mask, entropy)
    return hide(-coef * values, inside, mask)


def positive_nll(logprobs: Tensor, positive: Tensor, *, coef: float, mask: Tensor | None = None) -> Tensor:
    """-coef x log pi of the tokens of successful completions: an auxiliary supervised term.

    VAPO divides it by the tokens of successful completions: give the aggregation `mask & positive`.

    Args:
        logprobs: [T] or [B, T], the policy's, with a graph.
        positive: bool, same shape, True at the tokens of completions that count as successes.

    Source: VAPO (arXiv 2504.05118), positive example LM loss.
    """
    inside, (new,) = fence(mask, logprobs)
    return hide(-coef * torch.where(positive, new, 0.0), inside, mask)


def ratio_metrics(logprobs: Tensor, old_logprobs: Tensor) -> Metrics:
    """`policy/ratio`, `policy/ratio_max` and `policy/kl_old`, the k3 estimate of KL(old || policy), per token.

    Args:
        logprobs, old_logprobs: same shape, with masked tokens set to the same constant in both.
    """
    difference = (logprobs - old_logprobs).detach()
    ratio = bounded_exp(difference)
    return {
        "policy/ratio": ratio,
        "policy/ratio_max": ratio,
        "policy/kl_old": torch.expm1(difference.clamp(max=EXP_LIMIT)) - difference,
    }


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must be at least 0, they are {clip_low} and {clip_high}")
