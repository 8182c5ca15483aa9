"""What a loss makes of a teacher's targets: the distributions that a student learns at each trained token.

Targets are told in events (see `algorithms/distillation.py`): K tokens that the teacher finds likeliest, and all others
together. Whoever asks the teacher leaves them in the batch: `extra["target_ids"]` [T, K] int32 and
`extra["target_logprobs"]` [T, K + 1] float32, the last of which is that of all other tokens. For an objective with
`needs_targets` the trainer adds what the student says of the same events, `extra["student_logprobs"]` [T, K + 1] with a
graph, and `extra["agreement"]` [T], 1 where the student's likeliest token is the teacher's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.base import LossTerms
from strop.algorithms.batch import TokenBatch
from strop.algorithms.distillation import Divergence, event_divergence
from strop.algorithms.policy_losses import Metrics
from strop.algorithms.supervised import TokenMean


@dataclass(kw_only=True)
class Distillation(TokenMean):
    """Learning from teachers on given texts: (1 - w) temperature^2 x divergence - w x log-likelihood of the text.

    The divergence is that of the teachers' and the student's distributions at `temperature`, each term averaged over
    the trained tokens.

    Source: the temperature and its square, arXiv 1503.02531 section 2; the divergences, GKD (arXiv 2306.13649).
    """

    needs_hits: ClassVar[bool] = True
    needs_targets: ClassVar[bool] = True
    divergence: Divergence = "forward_kl"
    jsd_beta: float = 0.5
    top_k: int = 64
    temperature: float = 1.0
    cross_entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        # It checks its own bounds; a call on nothing finds a bad one now instead of at the first update.
        event_divergence(torch.zeros(0, 2), torch.zeros(0, 2), self.divergence, beta=self.jsd_beta)

    @property
    def targets_temperature(self) -> float:
        return self.temperature

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        divergence, metrics = distillation_loss(batch, kind=self.divergence, beta=self.jsd_beta)
        weight = self.cross_entropy_weight
        terms = {"divergence": (1 - weight) * self.temperature**2 * divergence}
        if weight:
            terms["nll"] = -weight * logprobs
        metrics["nll"] = -logprobs.detach()
        if "hits" in batch.extra:
            metrics["token_accuracy"] = batch.extra["hits"]
        return LossTerms(terms, metrics)


def distillation_loss(batch: TokenBatch, *, kind: Divergence, beta: float) -> tuple[Tensor, Metrics]:
    """([T] divergence of each trained token, metrics [T]) of a batch with targets.

    Metrics: the divergence; `coverage`, the teacher's probability of the K tokens; `agreement`.
    """
    teacher, student = batch.extra["target_logprobs"], batch.extra["student_logprobs"]
    loss = event_divergence(student, teacher, kind, beta=beta, mask=batch.loss_mask)
    metrics = {
        "distillation/divergence": loss.detach(),
        "distillation/coverage": torch.where(batch.loss_mask, 1 - teacher[:, -1].exp(), 0.0),
    }
    if "agreement" in batch.extra:
        metrics["distillation/agreement"] = batch.extra["agreement"]
    return loss, metrics
