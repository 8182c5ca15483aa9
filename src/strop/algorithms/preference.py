"""Preference losses over pairs, or single completions, of known worth.

`chosen`, `rejected`: [P] log-probabilities of whole completions (sums over their tokens) under the policy, with a
graph; `ref_chosen`, `ref_rejected` under the reference, constants. Every function returns ([P] loss, metrics): take the
mean over all pairs of a batch, counted before it is cut. float64 input stays float64, all else is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from strop.algorithms.masking import widen
from strop.algorithms.policy_losses import Metrics


def dpo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, Metrics]:
    """-log sigmoid(beta (margin of the policy - margin of the reference)).

    Source: DPO (arXiv 2305.18290) eq. 7.
    """
    logits, metrics = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -logsigmoid(logits), metrics


def cdpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """DPO for labels that are wrong with probability `label_smoothing`.

    Source: https://ericmitchell.ai/cdpo.pdf.
    """
    _check_smoothing(label_smoothing)
    logits, metrics = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits), metrics


def robust_dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """An unbiased estimate of the DPO loss under labels that are wrong with probability `label_smoothing`.

    Source: robust DPO (arXiv 2403.00409) eq. 12.
    """
    _check_smoothing(label_smoothing)
    logits, metrics = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    loss = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    return loss / (1 - 2 * label_smoothing), metrics


def ipo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, Metrics]:
    """(margin of the policy - margin of the reference - 1 / (2 beta))^2.

    The source takes sums over tokens; TRL hands in means, which keeps long pairs from ruling the loss.

    Source: IPO (arXiv 2310.12036) eq. 17.
    """
    logits, metrics = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (logits / beta - 1 / (2 * beta)).square(), metrics


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """-log sigmoid(beta (mean chosen - mean rejected) - margin), without a reference.

    Args:
        chosen_lengths, rejected_lengths: [P] tokens of each completion, at least 1.
        margin: gamma of the paper.

    Source: SimPO (arXiv 2405.14734) eq. 6.
    """
    _check_beta(beta)
    better, worse = beta * widen(chosen) / chosen_lengths, beta * widen(rejected) / rejected_lengths
    return -logsigmoid(better - worse - margin), _reward_metrics(better, worse)


def orpo(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, Metrics]:
    """NLL of a chosen token - beta log sigmoid(log odds(chosen) - log odds(rejected)), without a reference.

    Odds are of the mean log-probability of a token, p / (1 - p).

    Args:
        chosen_lengths, rejected_lengths: [P] tokens of each completion, at least 1.
        beta: lambda of the paper.

    Source: ORPO (arXiv 2403.07691) eq. 6 and 7.
    """
    _check_beta(beta)
    better, worse = widen(chosen) / chosen_lengths, widen(rejected) / rejected_lengths
    log_odds = (better - worse) - (_log_other(better) - _log_other(worse))
    return -better - beta * logsigmoid(log_odds), _reward_metrics(beta * better, beta * worse)


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """Completions judged one by one: weight x (1 - sigmoid(+-beta (log-ratio - z))), z = max(kl, 0) a constant.

    Args:
        logprobs: [P] of whole completions, with a graph.
        ref_logprobs: [P].
        desirable: bool [P].
        kl: scalar, KL(policy || reference) estimated over the whole batch, for instance as the mean log-ratio of
            completions paired with other prompts.

    Source: KTO (arXiv 2402.01306) eq. 8.
    """
    _check_beta(beta)
    reward = widen(logprobs) - widen(ref_logprobs).detach()
    point = torch.as_tensor(kl, dtype=reward.dtype, device=reward.device).detach().clamp(min=0.0)
    sign = torch.where(desirable, 1.0, -1.0).to(reward.dtype)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(reward.dtype)
    loss = weight * torch.sigmoid(-beta * sign * (reward - point))
    return loss, {"preference/reward": (beta * reward).detach()}


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0) -> tuple[Tensor, Metrics]:
    """-log sigmoid(score of chosen - score of rejected - margin): the loss of a reward model.

    Args:
        chosen, rejected: [P] scores, with a graph.
        margin: how much better the chosen one should be, one number or [P].

    Source: arXiv 2203.02155 eq. 1; the margin, Llama 2 (arXiv 2307.09288) eq. 2.
    """
    better, worse = widen(chosen), widen(rejected)
    return -logsigmoid(better - worse - margin), _reward_metrics(better, worse)


def plackett_luce(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Metrics]:
    """-log of the probability that the completions of a prompt would be ranked as they are: of two, Bradley-Terry.

    Args:
        scores: [N] with a graph, those of a group one after the other, best first.
        group_ids: [N] int64, equal for the completions of one prompt, at least two of each.

    Returns:
        ([G] loss in order of first appearance, metrics [G]): `preference/accuracy` is the share of a group's pairs that
        the scores order rightly, `preference/margin` the mean difference of those pairs.

    Source: R. L. Plackett, The Analysis of Permutations (1975); for preferences, DPO (arXiv 2305.18290) eq. 18.
    """
    wide = widen(scores)
    losses, accuracy, margin = [], [], []
    for ranked in torch.split(wide, torch.unique_consecutive(group_ids, return_counts=True)[1].tolist()):
        if len(ranked) < 2:
            raise ValueError("a ranking needs at least two completions of a prompt")
        rest = torch.logcumsumexp(ranked.flip(0), 0).flip(0)
        losses.append((rest - ranked)[:-1].sum())
        gaps = (ranked[:, None] - ranked[None, :]).detach()
        upper = gaps[torch.triu(torch.ones_like(gaps), 1).bool()]
        accuracy.append((upper > 0).to(wide.dtype).mean())
        margin.append(upper.mean())
    metrics = {"preference/accuracy": torch.stack(accuracy), "preference/margin": torch.stack(margin)}
    return torch.stack(losses), metrics


def _implicit_rewards(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Metrics]:
    _check_beta(beta)
    better = beta * (widen(chosen) - widen(ref_chosen).detach())
    worse = beta * (widen(rejected) - widen(ref_rejected).detach())
    return better - worse, _reward_metrics(better, worse)


def _reward_metrics(better: Tensor, worse: Tensor) -> Metrics:
    better, worse = better.detach(), worse.detach()
    return {
        "preference/accuracy": (better > worse).to(better.dtype),
        "preference/margin": better - worse,
        "preference/chosen": better,
        "preference/rejected": worse,
    }


def _log_other(logprob: Tensor) -> Tensor:
    """log(1 - exp(logprob)), finite up to logprob = 0."""
    return torch.log(-torch.expm1(logprob.clamp(max=-torch.finfo(logprob.dtype).eps)))


def _check_smoothing(share: float) -> None:
    if not 0 <= share < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), it is {share}")


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta must be positive, it is {beta}")
