"""Supervised fine-tuning as an objective."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from strop.algorithms.base import LossTerms
from strop.algorithms.batch import TokenBatch


class CrossEntropy:
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the whole mini-batch."""

    needs_entropy = False
    needs_hits = True

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        return LossTerms({"nll": -logprobs}, {"token_accuracy": batch.extra["hits"]} if "hits" in batch.extra else {})

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        return {"": float(max(1, int(batch.loss_mask.sum())))}

    def reduce(self, per_token: Tensor, batch: TokenBatch, denominator: float) -> Tensor:
        return per_token.masked_fill(~batch.loss_mask, 0.0).sum() / denominator
