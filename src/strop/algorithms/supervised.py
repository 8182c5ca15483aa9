"""Objectives that are means over trained tokens: supervised fine-tuning, process rewards, a critic's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from strop.algorithms.base import LossTerms
from strop.algorithms.batch import TokenBatch


class TokenMean:
    """Each term is averaged over the trained tokens of the whole mini-batch."""

    needs_entropy = False

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        return {"": float(max(1, int(batch.loss_mask.sum())))}

    def reduce(self, per_token: Tensor, batch: TokenBatch, denominator: float) -> Tensor:
        return per_token.masked_fill(~batch.loss_mask, 0.0).sum() / denominator


class CrossEntropy(TokenMean):
    """Negative log-likelihood of the trained tokens."""

    needs_hits: ClassVar[bool] = True
    logs_entropy: ClassVar[bool] = False
    counts_alike: ClassVar[bool] = True

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        return LossTerms({"nll": -logprobs}, {"token_accuracy": batch.extra["hits"]} if "hits" in batch.extra else {})


class ProcessReward(TokenMean):
    """A process reward model: a binary cross-entropy at the end of each step of a solution (arXiv 2305.20050).

    The trained tokens are the last ones of the steps; `extra["labels"]` [T] is 1 where a step is right, 0 where not.
    """

    logs_entropy: ClassVar[bool] = False

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        labels = batch.extra["labels"]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logprobs, labels, reduction="none")
        right = ((logprobs.detach() > 0) == (labels > 0.5)).float()
        return LossTerms({"process": loss}, {"preference/accuracy": right})


class Values(TokenMean):
    """What a critic minimises: the value loss of an algorithm (`PPO.value_loss`)."""

    logs_entropy: ClassVar[bool] = False

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        loss, metrics = self._algorithm.value_loss(batch, logprobs)
        return LossTerms({"value": loss}, metrics)


class WithValues:
    """An algorithm and beside it the value loss of a head on the policy's backbone, reduced like the policy's.

    Args:
        algorithm: one with `value_loss`. coef: weight of the value loss: c1 of PPO (arXiv 1707.06347) eq. 9.
        head_alone: minimise the value loss alone, by the head alone.
    """

    needs_values: ClassVar[bool] = True

    def __init__(self, algorithm: Any, coef: float, *, head_alone: bool = False) -> None:
        self._algorithm = algorithm
        self._coef = coef
        self.head_alone = head_alone
        self.needs_entropy: bool = algorithm.needs_entropy and not head_alone
        self.whole_groups: bool = getattr(algorithm, "whole_groups", False)
        self.logs_entropy: bool = getattr(algorithm, "logs_entropy", True) and not head_alone

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        found = LossTerms({}) if self.head_alone else self._algorithm.loss(batch, logprobs, entropy)
        loss, metrics = self._algorithm.value_loss(batch, batch.extra["new_values"])
        return LossTerms({**found.terms, "value": self._coef * loss}, {**found.metrics, **metrics}, found.units)

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        counts: Mapping[str, float] = self._algorithm.denominators(batch)
        return counts

    def reduce(self, per_token: Tensor, batch: TokenBatch, denominator: float) -> Tensor:
        summed: Tensor = self._algorithm.reduce(per_token, batch, denominator)
        return summed


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the trained tokens; 0 where the returns are all equal.

    Source: the diagnostic of OpenAI Baselines, `baselines/common/math_util.py`.
    """
    inside = mask.bool()
    target, error = returns[inside].double(), (returns - values)[inside].double()
    if len(target) < 2 or bool(target.max() == target.min()):
        return 0.0
    return float(1 - error.var() / target.var())
