"""Objectives over compared completions: against sums written out by hand, in float64, and independent of the cuts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.algorithms.paired import OBJECTIVES, Kto, ProcessReward, RewardModel, pairs_of

LENGTHS = [5, 7, 4, 4, 6, 3]
PROMPT = 2


def batch_of(seed: int = 0, groups: list[int] | None = None) -> tuple[TokenBatch, Tensor]:
    """Six sequences, three pairs, with log-probabilities in float64 that need a gradient."""
    random = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    mask = positions >= PROMPT
    logprobs = -torch.rand(total, generator=random, dtype=torch.float64) * 2
    reference = -torch.rand(total, generator=random, dtype=torch.float64) * 2
    batch = TokenBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        position_ids=positions,
        seq_ids=ids,
        loss_mask=mask,
        sampler_logprobs=torch.full((total,), math.nan),
        versions=torch.full((total,), -1),
        rewards=torch.tensor([0.5, 0.0, 1.0, 0.0, 0.0, 0.0]),
        group_ids=torch.tensor(groups or [7, 7, 8, 8, 9, 9]),
        truncated=torch.zeros(len(LENGTHS), dtype=torch.bool),
        ref_logprobs=reference,
    )
    return batch, torch.where(mask, logprobs, 0.0).requires_grad_()


def total(objective: Any, batch: TokenBatch, logprobs: Tensor) -> Tensor:
    found = objective.loss(batch, logprobs, None)
    counted = objective.denominators(batch)
    return torch.stack([
        objective.reduce(term, batch, counted.get(name, counted[""])).double() for name, term in found.terms.items()
    ]).sum()  # fmt: skip


def sums(batch: TokenBatch, values: Tensor) -> tuple[list[float], list[int]]:
    """By plain loops: the sum over trained tokens, and their number, of each sequence."""
    added, counted = [0.0] * len(LENGTHS), [0] * len(LENGTHS)
    for token in range(len(values)):
        if batch.loss_mask[token]:
            added[int(batch.seq_ids[token])] += float(values[token])
            counted[int(batch.seq_ids[token])] += 1
    return added, counted


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(method: str, batch: TokenBatch, logprobs: Tensor) -> float:
    assert batch.ref_logprobs is not None
    policy, counts = sums(batch, logprobs.detach())
    reference, _ = sums(batch, batch.ref_logprobs)
    losses = []
    for c, r in ((0, 1), (2, 3), (4, 5)):
        h = (policy[c] - policy[r]) - (reference[c] - reference[r])
        mean_c, mean_r = policy[c] / counts[c], policy[r] / counts[r]
        odds = mean_c - mean_r - (math.log(1 - math.exp(mean_c)) - math.log(1 - math.exp(mean_r)))
        losses.append(
            {
                "dpo": -log_sigmoid(0.1 * h),
                "cdpo": -0.9 * log_sigmoid(0.1 * h) - 0.1 * log_sigmoid(-0.1 * h),
                "robust_dpo": (-0.9 * log_sigmoid(0.1 * h) + 0.1 * log_sigmoid(-0.1 * h)) / 0.8,
                "ipo": (h - 1 / (2 * 0.1)) ** 2,
                "simpo": -log_sigmoid(2.0 * (mean_c - mean_r) - 1.0),
                "orpo": -mean_c - 0.1 * log_sigmoid(odds),
                "reward_model": -log_sigmoid(policy[c] - policy[r] - float(batch.rewards[c])),
            }[method]
        )
    return sum(losses) / 3


@pytest.mark.parametrize("method", ["dpo", "cdpo", "robust_dpo", "ipo", "simpo", "orpo", "reward_model"])
def test_a_pairs_loss_is_the_formula(method: str) -> None:
    batch, logprobs = batch_of()
    objective = OBJECTIVES[method]()
    assert float(total(objective, batch, logprobs)) == pytest.approx(by_hand(method, batch, logprobs), rel=1e-6)


@pytest.mark.parametrize("method", [name for name in OBJECTIVES if name not in ("process_reward", "distillation")])
def test_gradients_in_float64(method: str) -> None:
    batch, logprobs = batch_of(1)
    objective: Any = OBJECTIVES[method]()
    assert torch.autograd.gradcheck(lambda values: total(objective, batch, values), (logprobs,))


def test_length_normalised_dpo_takes_means() -> None:
    batch, logprobs = batch_of()
    assert batch.ref_logprobs is not None
    policy, counts = sums(batch, logprobs.detach())
    reference, _ = sums(batch, batch.ref_logprobs)
    gap = [(policy[at] - reference[at]) / counts[at] for at in range(6)]
    expected = sum(-log_sigmoid(0.3 * (gap[c] - gap[c + 1])) for c in (0, 2, 4)) / 3
    objective = OBJECTIVES["dpo"](beta=0.3, length_normalised=True)
    assert float(total(objective, batch, logprobs)) == pytest.approx(expected, rel=1e-6)


def test_the_supervised_term_is_a_mean_over_chosen_tokens() -> None:
    batch, logprobs = batch_of()
    policy, counts = sums(batch, logprobs.detach())
    nll = -sum(policy[at] for at in (0, 2, 4)) / sum(counts[at] for at in (0, 2, 4))
    plain = total(OBJECTIVES["dpo"](), batch, logprobs)
    both = total(OBJECTIVES["dpo"](nll_coef=0.5), batch, logprobs)
    assert float(both - plain) == pytest.approx(0.5 * nll, rel=1e-6)


def test_kto_is_the_formula() -> None:
    batch, logprobs = batch_of(groups=[1, 2, 3, 4, 5, 6])
    assert batch.ref_logprobs is not None
    batch.rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    policy, _ = sums(batch, logprobs.detach())
    reference, _ = sums(batch, batch.ref_logprobs)
    objective = Kto(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5, kl=0.3)
    expected = 0.0
    for at in range(6):
        sign, weight = (1, 1.5) if batch.rewards[at] else (-1, 0.5)
        expected += weight * (1 - 1 / (1 + math.exp(-0.2 * sign * (policy[at] - reference[at] - 0.3))))
    assert float(total(objective, batch, logprobs)) == pytest.approx(expected / 6, rel=1e-6)


def test_a_ranking_of_three_is_plackett_luce() -> None:
    batch, logprobs = batch_of(groups=[1, 1, 1, 2, 2, 2])
    scores, _ = sums(batch, logprobs.detach())
    expected = 0.0
    for ranked in (scores[:3], scores[3:]):
        for at in range(2):
            expected -= ranked[at] - math.log(sum(math.exp(score) for score in ranked[at:]))
    assert float(total(RewardModel(), batch, logprobs)) == pytest.approx(expected / 2, rel=1e-6)


def test_centring_pulls_the_sum_of_a_pairs_scores_to_zero() -> None:
    batch, logprobs = batch_of()
    scores, _ = sums(batch, logprobs.detach())
    expected = sum((scores[c] + scores[c + 1]) ** 2 for c in (0, 2, 4)) / 3
    extra = total(RewardModel(centre=0.1), batch, logprobs) - total(RewardModel(), batch, logprobs)
    assert float(extra) == pytest.approx(0.1 * expected, rel=1e-6)


def test_a_process_reward_is_a_cross_entropy_at_the_marked_tokens() -> None:
    batch, scores = batch_of()
    batch.extra["labels"] = (torch.arange(len(scores)) % 2).double()
    inside = [token for token in range(len(scores)) if batch.loss_mask[token]]
    expected = 0.0
    for token in inside:
        p = 1 / (1 + math.exp(-float(scores[token])))
        expected -= math.log(p) if batch.extra["labels"][token] else math.log(1 - p)
    assert float(total(ProcessReward(), batch, scores)) == pytest.approx(expected / len(inside), rel=1e-6)


def test_equal_policy_and_reference_give_log_two() -> None:
    batch, logprobs = batch_of()
    batch.ref_logprobs = logprobs.detach().clone()
    found = OBJECTIVES["dpo"]().loss(batch, logprobs, None)
    assert found.terms["preference"].tolist() == pytest.approx([math.log(2)] * 3, rel=1e-12)
    assert float(found.units["preference/margin"].abs().max()) == 0.0


def test_groups_that_are_not_pairs_are_refused() -> None:
    batch, logprobs = batch_of(groups=[1, 1, 1, 2, 2, 2])
    with pytest.raises(ValueError, match="next to each other"):
        pairs_of(batch, logprobs)


@pytest.mark.parametrize("method", ["dpo", "simpo", "reward_model"])
def test_the_cuts_do_not_change_the_loss(method: str) -> None:
    batch, logprobs = batch_of()
    objective: Any = OBJECTIVES[method]()
    whole = total(objective, batch, logprobs)
    counted = objective.denominators(batch)
    parts = torch.zeros((), dtype=torch.float64)
    for chosen in (torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])):
        cut = batch.select(chosen)
        values = logprobs[torch.isin(batch.seq_ids, chosen)]
        for name, term in objective.loss(cut, values, None).terms.items():
            parts = parts + objective.reduce(term, cut, counted.get(name, counted[""]))
    assert float(parts) == pytest.approx(float(whole), rel=1e-12)
