"""The named algorithms that learn from a teacher: the policy samples, the teacher says what it thinks of each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.algorithms.distillation import Divergence, reverse_kl_advantages
from strop.algorithms.policy_gradient import PolicyGradient, trained
from strop.algorithms.policy_losses import Metrics
from strop.algorithms.targets import distillation_loss


@dataclass(kw_only=True)
class OPD(PolicyGradient):
    """On-policy distillation: https://thinkingmachines.ai/blog/on-policy-distillation, arXiv 2306.13649.

    A = the teacher's log-probability of each sampled token less the policy's own; rewards are only reported.
    """

    name: str = field(default="opd", init=False)
    needs_teacher: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = (
        "baseline", "scale", "scale_eps", "kl_in", "overlong_penalty", "overlong_buffer"
    )  # fmt: skip

    def advantages(self, batch: TokenBatch) -> Tensor:
        policy = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        return reverse_kl_advantages(policy, trained(batch.teacher_logprobs), mask=batch.loss_mask)

    def compares_groups(self) -> bool:
        return False


@dataclass(kw_only=True)
class GKD(PolicyGradient):
    """On-policy generalised knowledge distillation: arXiv 2306.13649, algorithm 1 with lambda = 1.

    The loss of a sampled token is the divergence between the teacher's and the policy's whole distribution at its
    place, over the teacher's `top_k` likeliest tokens and all others together. No gradient goes through the sampling;
    rewards are only reported.
    """

    name: str = field(default="gkd", init=False)
    divergence: Divergence = "jensen_shannon"
    jsd_beta: float = 0.5
    """Share of the teacher in the mixture of `jensen_shannon`."""
    top_k: int = 64
    """Tokens that are told apart."""
    needs_teacher: ClassVar[bool] = True
    needs_targets: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = (
        "baseline", "scale", "scale_eps", "loss_kind", "clip_low", "clip_high", "dual_clip", "positive_nll", "kl_in",
        "correction_off_policy", "overlong_penalty", "overlong_buffer",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, it is {self.top_k}")
        super().__post_init__()

    def advantages(self, batch: TokenBatch) -> Tensor:
        """[T] zeros: nothing is compared, the loss itself says where to go."""
        return torch.zeros(batch.input_ids.shape[0], device=batch.input_ids.device)

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return distillation_loss(batch, kind=self.divergence, beta=self.jsd_beta)

    def compares_groups(self) -> bool:
        return False

    def idle(self) -> dict[str, str]:
        why = super().idle()
        if self.divergence != "jensen_shannon":
            why["jsd_beta"] = f"with divergence {self.divergence!r}"
        return why
