"""Divergence from a reference policy: estimators from sampled tokens, and what is made of them.

All estimate KL(policy || reference) for tokens sampled from the policy. Value and gradient are different things. As a
term of a loss, in expectation over the policy's own tokens, the gradient of

- `k1` is 0: it only adds noise; use it in the reward, where it is exact.
- `k2` is the gradient of KL(policy || reference).
- `k3` is the gradient of KL(reference || policy), the other direction.
- `k1` and `k3` with `importance_weighted=True` is the gradient of KL(policy || reference).

Source: http://joschu.net/blog/kl-approx.html for k1, k2, k3; arXiv 2506.09477 and arXiv 2510.01555 for the gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import EXP_LIMIT, bounded_exp, fence, hide, widen
from strop.algorithms.segments import segment_sum

Kind = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: Kind = "k3",
    *,
    clamp: float | None = None,
    input_clamp: float | None = None,
    importance_weighted: bool = False,
    old_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, with d = logprobs - ref_logprobs.

    `k1` d; `k2` d^2 / 2; `k3` exp(-d) + d - 1; `abs` |d|.

    Args:
        logprobs: [T] or [B, T], of the sampled tokens under the policy, with a graph where gradients are wanted.
        ref_logprobs: same shape, under the reference; never differentiated.
        clamp: opt-in bound of the result to [-clamp, clamp]. It ends the gradient too: at 10, k3 has none beyond
            d = -2.61 nats.
        input_clamp: opt-in bound of d to [-input_clamp, input_clamp], with the same warning.
        importance_weighted: multiply by exp(logprobs - old_logprobs), with its gradient. Without `old_logprobs` the
            tokens are taken to be the policy's own: the value is unchanged and only the gradient gains a term.
        old_logprobs: same shape, under the policy that sampled; only with `importance_weighted`.
        mask: bool, same shape; where False the result is 0 and there is no gradient.

    Returns:
        float32 (float64 for float64 input), same shape, differentiable in `logprobs`.

    Raises:
        ValueError: an unknown kind, a clamp that is not positive, `old_logprobs` without `importance_weighted`.

    Source: http://joschu.net/blog/kl-approx.html; `k3` in the loss, GRPO (arXiv 2402.03300) eq. 4.
    """
    if kind not in ("k1", "k2", "k3", "abs"):
        raise ValueError(f"unknown KL estimator {kind!r}")
    if any(bound is not None and not bound > 0 for bound in (clamp, input_clamp)):
        raise ValueError("a clamp must be positive")
    if old_logprobs is not None and not importance_weighted:
        raise ValueError("old_logprobs has no effect without importance_weighted=True")
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach()
    inside, (policy, reference, sampled_by) = fence(mask, logprobs, ref_logprobs.detach(), old)
    difference = policy - reference
    if input_clamp is not None:
        difference = difference.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        result = difference
    elif kind == "k2":
        result = difference.square() / 2
    elif kind == "k3":
        # expm1 keeps the small values that exp(x) - 1 would lose to rounding.
        result = torch.expm1((-difference).clamp(max=EXP_LIMIT)) + difference
    else:
        result = difference.abs()
    if clamp is not None:
        result = result.clamp(-clamp, clamp)
    if importance_weighted:
        result = result * bounded_exp(policy - sampled_by)
    return hide(result, inside, mask)


def kl_in_reward(rewards: Tensor, kl: Tensor, mask: Tensor, seq_ids: Tensor, *, kl_coef: float) -> Tensor:
    """Reward of each sequence less its divergence: rewards - kl_coef x (sum of `kl` over its trained tokens).

    Before any baseline, without a graph. With `k1` the policy gradient of the result contains the exact gradient of
    KL(policy || reference).

    Args:
        rewards: [N] float.
        kl: [T] or [B, T], from `kl_estimate`.
        mask: bool, same shape as `kl`.
        seq_ids: int64, same shape, 0..N-1.

    Returns:
        [N] float32 (float64 for float64 input).

    Source: RLHF (arXiv 2203.02155) eq. 2.
    """
    penalty = segment_sum(kl.detach(), mask, seq_ids)
    if penalty.numel() < rewards.numel():
        penalty = torch.nn.functional.pad(penalty, (0, rewards.numel() - penalty.numel()))
    return (rewards - kl_coef * penalty[: rewards.numel()]).to(widen(rewards).dtype)


def adaptive_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, steps: float) -> float:
    """The coefficient for the next update, which steers the measured divergence towards a target.

    kl_coef x (1 + clip(kl / target - 1, -0.2, 0.2) x steps / horizon).

    Args:
        kl: measured divergence of a step, in nats per sequence (or per token, if `target` is).
        target: the divergence wanted, same unit, above 0.
        horizon: how many `steps` an error of 20 % takes to change the coefficient by 20 %.
        steps: what has passed since the last call, in the unit of `horizon` (episodes in the source).

    Raises:
        ValueError: a target or a horizon that is not positive.

    Source: arXiv 1909.08593, section 2.2.
    """
    if not (target > 0 and horizon > 0):
        raise ValueError("target and horizon must be positive")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * steps / horizon)
