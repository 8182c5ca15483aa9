"""The named algorithms, each as its paper has it, and `build_algorithm`, which makes one from its name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from strop.algorithms.advantages import Baseline, Observations, Scale, discounted_returns, gae, group_relative, whiten
from strop.algorithms.aggregation import Mode
from strop.algorithms.batch import TokenBatch
from strop.algorithms.distillation import reverse_kl_advantages
from strop.algorithms.estimators import remax, token_rewards
from strop.algorithms.policy_gradient import PolicyGradient, resolved, shown, trained
from strop.algorithms.policy_losses import Metrics, cispo, gspo, value_loss
from strop.algorithms.sampling_rules import soft_overlong_penalty
from strop.algorithms.segments import segment_count

LossKind = Literal["ppo_clip", "reinforce"]


@dataclass(kw_only=True)
class GRPO(PolicyGradient):
    """Group relative policy optimisation: DeepSeekMath, arXiv 2402.03300, eq. 3.

    A = (r - mean of the group) / std of the group; clipped ratio; mean over a sequence's tokens, then over sequences.
    """

    name: str = field(default="grpo", init=False)
    scale: Scale = "std"
    aggregation: Mode = "sequence_mean"


@dataclass(kw_only=True)
class DrGRPO(PolicyGradient):
    """GRPO done right: arXiv 2503.20783.

    No division by the group's std and none by a sequence's length: A = r - mean of the group; sum over all tokens,
    divided by sequences x longest completion.
    """

    name: str = field(default="dr_grpo", init=False)
    aggregation: Mode = "constant"


@dataclass(kw_only=True)
class RLOO(PolicyGradient):
    """REINFORCE with a leave-one-out baseline: arXiv 2402.14740.

    A = r - mean of the others in the group; the gradient of the whole completion's log-probability, unclipped, so one
    update for each batch of samples.
    """

    name: str = field(default="rloo", init=False)
    baseline: Baseline = "leave_one_out"
    loss_kind: LossKind = "reinforce"
    aggregation: Mode = "sequence_mean_token_sum"


@dataclass(kw_only=True)
class REINFORCE(PolicyGradient):
    """The policy gradient without a baseline: Williams 1992, doi 10.1007/BF00992696.

    A = r; a group may be a single completion.
    """

    name: str = field(default="reinforce", init=False)
    baseline: Baseline = "none"
    loss_kind: LossKind = "reinforce"
    aggregation: Mode = "sequence_mean_token_sum"


@dataclass(kw_only=True)
class DAPO(PolicyGradient):
    """Decoupled clip and dynamic sampling: arXiv 2503.14476.

    GRPO with a higher upper clip, the mean over all tokens, groups without spread replaced, and a penalty that grows
    over the last `overlong_buffer` tokens of a completion, to `overlong_penalty` at the longest (0 switches it off).
    """

    name: str = field(default="dapo", init=False)
    dynamic_sampling: ClassVar[bool] = True
    scale: Scale = "std"
    clip_high: float = 0.28
    overlong_buffer: int | None = None
    """None is a fifth of the longest completion, as in the paper (4,096 of 20,480)."""
    overlong_penalty: float = 1.0

    def rewards(self, batch: TokenBatch) -> Tensor:
        buffer = max(self.max_new_tokens // 5, 1) if self.overlong_buffer is None else self.overlong_buffer
        penalty = soft_overlong_penalty(
            _lengths(batch), max_tokens=self.max_new_tokens, buffer=buffer, factor=self.overlong_penalty
        )
        return super().rewards(batch) + penalty

    def idle(self) -> dict[str, str]:
        why = super().idle()
        return why if self.overlong_penalty else why | {"overlong_buffer": "while overlong_penalty is 0"}


@dataclass(kw_only=True)
class MaxRL(PolicyGradient):
    """Maximum likelihood reinforcement learning: arXiv 2602.02710.

    A = (r - mean of the group) / mean of the group, for rewards of at least 0: the gradient of the log of the success
    rate, where others follow the success rate.
    """

    name: str = field(default="maxrl", init=False)
    scale: Scale = "mean"
    aggregation: Mode = "sequence_mean_token_sum"


@dataclass(kw_only=True)
class GSPO(PolicyGradient):
    """Group sequence policy optimisation: arXiv 2507.18071, eq. 5 and 7.

    GRPO's advantages; the ratio of the whole sequence, its length's root, is clipped instead of each token's.
    """

    name: str = field(default="gspo", init=False)
    fixed: ClassVar[tuple[str, ...]] = ("loss_kind", "dual_clip")
    scale: Scale = "std"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Mode = "sequence_mean"

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return gspo(
            logprobs,
            old_logprobs,
            trained(batch.advantages),
            batch.loss_mask,
            batch.seq_ids,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


@dataclass(kw_only=True)
class CISPO(PolicyGradient):
    """Clipped importance-sampling weights: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.

    GRPO's advantages; the ratio is a clipped constant that weighs REINFORCE, so that no token loses its gradient.
    """

    name: str = field(default="cispo", init=False)
    fixed: ClassVar[tuple[str, ...]] = ("loss_kind", "dual_clip")
    scale: Scale = "std"
    clip_low: float = 1.0

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return cispo(
            logprobs,
            old_logprobs,
            trained(batch.advantages),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            mask=batch.loss_mask,
        )


@dataclass(kw_only=True)
class ReinforcePP(PolicyGradient):
    """REINFORCE++: arXiv 2501.03262.

    No critic and no groups: A = the discounted reward to go of each token, whitened over the whole batch. With `kl_in`
    "reward" the penalty (the paper's is `k1`) is taken from the reward of each token.
    """

    name: str = field(default="reinforce_pp", init=False)
    fixed: ClassVar[tuple[str, ...]] = ("baseline", "scale", "scale_eps")
    gamma: float = 1.0

    def advantages(self, batch: TokenBatch) -> Tensor:
        rewards = _token_rewards(self, batch)
        returns = discounted_returns(rewards, batch.loss_mask, gamma=self.gamma, seq_ids=batch.seq_ids)
        return whiten(returns, batch.loss_mask)

    def compares_groups(self) -> bool:
        return False


@dataclass(kw_only=True)
class ReinforcePPBaseline(PolicyGradient):
    """REINFORCE++-baseline: arXiv 2501.03262.

    A = r - mean of the group, whitened over all tokens of the batch instead of divided by the group's own std.
    """

    name: str = field(default="reinforce_pp_baseline", init=False)
    fixed: ClassVar[tuple[str, ...]] = ("scale", "scale_eps")

    def advantages(self, batch: TokenBatch) -> Tensor:
        per_sequence = group_relative(self.rewards(batch), batch.group_ids, baseline=self.baseline)
        return whiten(per_sequence[batch.seq_ids], batch.loss_mask)


@dataclass(kw_only=True)
class ReMax(PolicyGradient):
    """REINFORCE with the greedy completion's reward as baseline: arXiv 2310.10505.

    A = r - reward of the most likely completion of the same prompt.
    """

    name: str = field(default="remax", init=False)
    needs_greedy: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("baseline", "scale", "scale_eps")
    loss_kind: LossKind = "reinforce"
    aggregation: Mode = "sequence_mean_token_sum"

    def advantages(self, batch: TokenBatch) -> Tensor:
        per_sequence = remax(self.rewards(batch), trained(batch.greedy_rewards))
        return torch.where(batch.loss_mask, per_sequence[batch.seq_ids], 0.0)

    def compares_groups(self) -> bool:
        return False


@dataclass(kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation with a critic: arXiv 1707.06347.

    A = generalised advantage estimates from the critic's values, whitened over the batch. With `kl_in` "reward" the
    penalty is taken from the reward of each token.
    """

    name: str = field(default="ppo", init=False)
    needs_critic: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("baseline", "scale", "scale_eps")
    gamma: float = 1.0
    lam: float = 0.95
    observations: Observations = "skip"
    value_clip: float | None = 0.2

    def advantages(self, batch: TokenBatch) -> Tensor:
        """[T] float32; fills `batch.returns`, the critic's targets."""
        advantages, batch.returns = gae(
            _token_rewards(self, batch),
            trained(batch.values),
            batch.loss_mask,
            gamma=self.gamma,
            lam=self.lam,
            observations=self.observations,
            seq_ids=batch.seq_ids,
        )
        return whiten(advantages, batch.loss_mask)

    def value_loss(self, batch: TokenBatch, values: Tensor) -> tuple[Tensor, Metrics]:
        """[T] per-token loss of the critic, to be reduced like the policy's.

        Args:
            values: [T] float32 with a graph.
        """
        old, returns = trained(batch.values), trained(batch.returns)
        return value_loss(values, old, returns, clip=self.value_clip, mask=batch.loss_mask)

    def compares_groups(self) -> bool:
        return False


@dataclass(kw_only=True)
class OPD(PolicyGradient):
    """On-policy distillation: https://thinkingmachines.ai/blog/on-policy-distillation, arXiv 2306.13649.

    A = the teacher's log-probability of each sampled token less the policy's own; rewards are only reported.
    """

    name: str = field(default="opd", init=False)
    needs_teacher: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("baseline", "scale", "scale_eps", "kl_in")

    def advantages(self, batch: TokenBatch) -> Tensor:
        policy = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        return reverse_kl_advantages(policy, trained(batch.teacher_logprobs), mask=batch.loss_mask)

    def compares_groups(self) -> bool:
        return False


ALGORITHMS: dict[str, type[PolicyGradient]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "remax": ReMax,
    "ppo": PPO,
    "maxrl": MaxRL,
    "opd": OPD,
}


def build_algorithm(name: str, *, group_size: int, max_new_tokens: int, **choices: Any) -> PolicyGradient:
    """The algorithm of a name, with some of its choices changed.

    Args:
        name: a key of `ALGORITHMS`.
        group_size: completions of each prompt.
        max_new_tokens: longest completion in tokens.
        choices: fields of the configuration's `algorithm` section; None keeps the algorithm's own choice.

    Raises:
        ValueError: an unknown name, a choice that the algorithm does not have, one that is out of range or has no
            effect beside the others, or a group too small for its baseline.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    kind = ALGORITHMS[name]
    defaults = {shown(f.name): (f.name, f.default) for f in fields(kind) if f.init}
    given = {}
    for choice, value in choices.items():
        if value is None:
            continue
        if choice not in defaults:
            raise ValueError(f"{choice} is not a choice of the algorithm {name!r}")
        field_name, default = defaults[choice]
        # The configuration always states these, so a value equal to the default says nothing.
        if choice in ("kl_coef", "kl_kind", "kl_in", "entropy_coef") and value == default:
            continue
        given[field_name] = value
    algorithm = kind(max_new_tokens=max_new_tokens, **given)
    algorithm.refuse_idle(given)
    if algorithm.needs_group and group_size < 2:
        raise ValueError(
            f"{name} compares the completions of a prompt, so group_size must be at least 2, it is {group_size}; "
            "the algorithm 'reinforce' works with 1"
        )
    return algorithm


def _lengths(batch: TokenBatch) -> Tensor:
    """[N] trained tokens of each sequence."""
    counts = segment_count(batch.loss_mask, batch.seq_ids)
    return torch.nn.functional.pad(counts, (0, max(batch.sequences - len(counts), 0)))[: batch.sequences]


def _token_rewards(algorithm: PolicyGradient, batch: TokenBatch) -> Tensor:
    """[T] the reward at the last trained token of each sequence, less the penalty at every token, if there is one."""
    penalty = algorithm.penalty(batch)
    coef = 0.0 if penalty is None else algorithm.kl_coef
    return token_rewards(batch.rewards, batch.loss_mask, batch.seq_ids, kl=penalty, kl_coef=coef)


__all__ = [
    "ALGORITHMS",
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "OPD",
    "PPO",
    "REINFORCE",
    "RLOO",
    "DrGRPO",
    "MaxRL",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "build_algorithm",
    "resolved",
]
