"""Objectives over completions that are compared with each other: preference optimisation and reward models.

The sequences of a group follow each other, best first: the chosen one, then the rejected one. `TokenBatch.rewards`
holds, for a pair, how much better the chosen one should be (on the chosen one; 0 on the other), and for completions
that are judged one by one 1 for a desirable one and 0 for another. All losses are means over pairs, rankings or
completions, counted before a batch is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from strop.algorithms import preference
from strop.algorithms.base import LossTerms
from strop.algorithms.batch import TokenBatch
from strop.algorithms.policy_losses import Metrics
from strop.algorithms.segments import segment_count, segment_sum
from strop.algorithms.supervised import CrossEntropy, ProcessReward
from strop.algorithms.targets import Distillation


@dataclass(frozen=True)
class Pairs:
    """[P] each: log-probabilities of whole completions under the policy and the reference (0 without one), their number
    of trained tokens, and the margin that is asked for."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    margin: Tensor


@dataclass(kw_only=True)
class Comparison:
    """What all of these objectives have in common: groups stay whole, and what is counted is not tokens."""

    needs_entropy = False
    logs_entropy: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        return {"": float(max(1, len(torch.unique(batch.group_ids))))}

    def reduce(self, per_token: Tensor, batch: TokenBatch, denominator: float) -> Tensor:
        return per_token.sum() / denominator


@dataclass(kw_only=True)
class Pairwise(Comparison, ABC):
    """A chosen and a rejected completion of each prompt.

    nll_coef: weight of a supervised term on the chosen completions, averaged over their tokens (RPO, arXiv 2404.19733).
    """

    nll_coef: float = 0.0

    @abstractmethod
    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Metrics]:
        """([P] loss, metrics [P])."""

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        loss, units = self.pair_loss(pairs_of(batch, logprobs))
        terms = {"preference": loss}
        if self.nll_coef:
            terms["nll"] = -self.nll_coef * logprobs[_of_chosen(batch)]
        return LossTerms(terms, units=units)

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        return {"": float(max(1, batch.sequences // 2)), "nll": float(max(1, int(_of_chosen(batch).sum())))}


@dataclass(kw_only=True)
class Dpo(Pairwise):
    """Direct preference optimisation (arXiv 2305.18290) eq. 7.

    beta: strength of the pull to the reference. length_normalised: means over tokens instead of sums (arXiv 2411.15124
    eq. 6).
    """

    needs_reference: ClassVar[bool] = True
    beta: float = 0.1
    length_normalised: bool = False

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Metrics]:
        per_chosen = pairs.chosen_lengths if self.length_normalised else 1.0
        per_rejected = pairs.rejected_lengths if self.length_normalised else 1.0
        return self._formula()(
            pairs.chosen / per_chosen,
            pairs.rejected / per_rejected,
            pairs.ref_chosen / per_chosen,
            pairs.ref_rejected / per_rejected,
            beta=self.beta,
        )

    def _formula(self) -> Callable[..., tuple[Tensor, Metrics]]:
        return preference.dpo


@dataclass(kw_only=True)
class ConservativeDpo(Dpo):
    """cDPO: labels are wrong with probability `label_smoothing` (https://ericmitchell.ai/cdpo.pdf)."""

    label_smoothing: float = 0.1

    def _formula(self) -> Callable[..., tuple[Tensor, Metrics]]:
        return partial(preference.cdpo, label_smoothing=self.label_smoothing)


@dataclass(kw_only=True)
class RobustDpo(Dpo):
    """Robust DPO: an unbiased loss where labels are wrong with probability `label_smoothing` (arXiv 2403.00409)."""

    label_smoothing: float = 0.1

    def _formula(self) -> Callable[..., tuple[Tensor, Metrics]]:
        return partial(preference.robust_dpo, label_smoothing=self.label_smoothing)


@dataclass(kw_only=True)
class Ipo(Dpo):
    """IPO (arXiv 2310.12036) eq. 17, with sums over tokens as there; TRL's means are `length_normalised`."""

    def _formula(self) -> Callable[..., tuple[Tensor, Metrics]]:
        return preference.ipo


@dataclass(kw_only=True)
class SimPo(Pairwise):
    """SimPO (arXiv 2405.14734) eq. 6, without a reference. margin: gamma of the paper."""

    beta: float = 2.0
    margin: float = 1.0

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Metrics]:
        lengths = pairs.chosen_lengths, pairs.rejected_lengths
        return preference.simpo(pairs.chosen, pairs.rejected, *lengths, beta=self.beta, margin=self.margin)


@dataclass(kw_only=True)
class Orpo(Pairwise):
    """ORPO (arXiv 2403.07691) eq. 6 and 7, without a reference. beta: lambda of the paper."""

    beta: float = 0.1

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Metrics]:
        lengths = pairs.chosen_lengths, pairs.rejected_lengths
        return preference.orpo(pairs.chosen, pairs.rejected, *lengths, beta=self.beta)


@dataclass(kw_only=True)
class Kto(Comparison):
    """KTO (arXiv 2402.01306) eq. 8: completions judged one by one, each a group of its own.

    kl: the estimate of KL(policy || reference) of the current batch; because of `needs_divergence`, whoever trains sets
    it before each update, from completions paired with other prompts.
    """

    needs_reference: ClassVar[bool] = True
    needs_divergence: ClassVar[bool] = True
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        assert batch.ref_logprobs is not None, "the trainer has not filled ref_logprobs"
        desirable = batch.rewards > 0.5
        loss, units = preference.kto(
            segment_sum(logprobs, batch.loss_mask, batch.seq_ids),
            segment_sum(batch.ref_logprobs, batch.loss_mask, batch.seq_ids),
            desirable,
            self.kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        reward = units["preference/reward"]
        return LossTerms(
            {"preference": loss}, units={"preference/accuracy": ((reward > self.beta * self.kl) == desirable).float()}
        )


@dataclass(kw_only=True)
class RewardModel(Comparison):
    """Bradley-Terry for pairs, Plackett-Luce for rankings of more, on scores instead of log-probabilities.

    The one trained token of a sequence is its last; what the model gives there is its score. centre: weight of the mean
    square of a prompt's summed scores, which keeps them around 0 (arXiv 2312.09244, section 4).
    """

    centre: float = 0.0

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        scores = segment_sum(logprobs, batch.loss_mask, batch.seq_ids)
        counts = torch.unique_consecutive(batch.group_ids, return_counts=True)[1]
        if bool((counts == 2).all()):
            loss, units = preference.bradley_terry(scores[0::2], scores[1::2], margin=batch.rewards[0::2])
        else:
            loss, units = preference.plackett_luce(scores, batch.group_ids)
        terms = {"preference": loss}
        if self.centre:
            groups = torch.repeat_interleave(torch.arange(len(counts), device=scores.device), counts)
            summed = torch.zeros(len(counts), dtype=scores.dtype, device=scores.device).index_add(0, groups, scores)
            terms["centre"] = self.centre * summed.square()
        return LossTerms(terms, units=units)


def pairs_of(batch: TokenBatch, logprobs: Tensor) -> Pairs:
    """The pairs of a batch whose sequences are chosen, rejected, chosen, rejected, ...

    Args:
        logprobs: [T] of the policy, with a graph.

    Raises:
        ValueError: the groups are not pairs.
    """
    if not torch.equal(batch.group_ids[0::2], batch.group_ids[1::2]) or batch.sequences % 2:
        raise ValueError("every group must be a chosen and a rejected completion, next to each other")
    mask, ids = batch.loss_mask, batch.seq_ids
    sums, lengths = segment_sum(logprobs, mask, ids), segment_count(mask, ids).clamp(min=1.0)
    given = torch.zeros_like(sums) if batch.ref_logprobs is None else segment_sum(batch.ref_logprobs, mask, ids)
    return Pairs(sums[0::2], sums[1::2], given[0::2], given[1::2], lengths[0::2], lengths[1::2], batch.rewards[0::2])


def _of_chosen(batch: TokenBatch) -> Tensor:
    """[T] bool: the trained tokens of chosen completions."""
    return batch.loss_mask & (batch.seq_ids % 2 == 0)


OBJECTIVES: dict[str, Any] = {
    "sft": CrossEntropy,
    "distillation": Distillation,
    "dpo": Dpo,
    "cdpo": ConservativeDpo,
    "robust_dpo": RobustDpo,
    "ipo": Ipo,
    "simpo": SimPo,
    "orpo": Orpo,
    "kto": Kto,
    "reward_model": RewardModel,
    "process_reward": ProcessReward,
}
"""By the name that a recipe gives (`supervised.method`)."""
