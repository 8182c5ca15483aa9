"""The named algorithms, each as its paper has it, and `build_algorithm`, which makes one from its name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from strop.algorithms.advantages import Baseline, Observations, Scale, discounted_returns, gae, group_relative, whiten
from strop.algorithms.aggregation import Mode
from strop.algorithms.batch import TokenBatch
from strop.algorithms.dialects import DIALECTS, preset
from strop.algorithms.estimators import remax, token_rewards
from strop.algorithms.policy_gradient import PolicyGradient, choice_of, resolved, shown, to_tokens, trained
from strop.algorithms.policy_losses import Metrics, cispo, gspo, topr, value_loss
from strop.algorithms.sampling_rules import WithoutSpread
from strop.algorithms.taught import GKD, OPD

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
    identity: ClassVar[tuple[str, ...]] = ("baseline", "scale", "aggregation")
    aggregation: Mode = "constant"


@dataclass(kw_only=True)
class RLOO(PolicyGradient):
    """REINFORCE with a leave-one-out baseline: arXiv 2402.14740.

    A = r - mean of the others in the group; the gradient of the whole completion's log-probability, unclipped, so one
    update for each batch of samples.
    """

    name: str = field(default="rloo", init=False)
    identity: ClassVar[tuple[str, ...]] = ("baseline", "scale", "loss_kind", "aggregation")
    baseline: Baseline = "leave_one_out"
    loss_kind: LossKind = "reinforce"
    aggregation: Mode = "sequence_mean_token_sum"


@dataclass(kw_only=True)
class REINFORCE(PolicyGradient):
    """The policy gradient without a baseline: Williams 1992, doi 10.1007/BF00992696.

    A = r; a group may be a single completion.
    """

    name: str = field(default="reinforce", init=False)
    identity: ClassVar[tuple[str, ...]] = ("baseline", "scale", "loss_kind", "aggregation")
    baseline: Baseline = "none"
    loss_kind: LossKind = "reinforce"
    aggregation: Mode = "sequence_mean_token_sum"


@dataclass(kw_only=True)
class TOPR(PolicyGradient):
    """Tapered off-policy REINFORCE: arXiv 2503.14286.

    For completions of another policy. A = r - mean of the group; REINFORCE, in which a completion with a negative
    advantage counts as much as the policy would still sample it, at most once: w = min(1, ratio of the whole sequence).
    """

    name: str = field(default="topr", init=False)
    needs_sampler: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("loss_kind", "clip_low", "clip_high", "dual_clip")
    identity: ClassVar[tuple[str, ...]] = ("aggregation",)
    aggregation: Mode = "sequence_mean_token_sum"

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return topr(logprobs, old_logprobs, trained(batch.advantages), batch.loss_mask, batch.seq_ids)


@dataclass(kw_only=True)
class DAPO(PolicyGradient):
    """Decoupled clip and dynamic sampling: arXiv 2503.14476.

    GRPO with a higher upper clip, the mean over all tokens, groups without spread replaced, and a penalty that grows
    over the last tokens of a completion, to 1 at the longest (an overlong penalty of 0 switches it off).
    """

    name: str = field(default="dapo", init=False)
    identity: ClassVar[tuple[str, ...]] = ("baseline", "scale", "clip_low", "clip_high", "aggregation")
    scale: Scale = "std"
    clip_high: float = 0.28
    overlong_penalty: float = 1.0
    without_spread: WithoutSpread = "resample"


@dataclass(kw_only=True)
class MaxRL(PolicyGradient):
    """Maximum likelihood reinforcement learning: arXiv 2602.02710.

    A = (r - mean of the group) / mean of the group, for rewards of at least 0: the gradient of the log of the success
    rate, where others follow the success rate.
    """

    name: str = field(default="maxrl", init=False)
    identity: ClassVar[tuple[str, ...]] = ("baseline", "scale", "scale_eps", "aggregation")
    scale: Scale = "mean"
    aggregation: Mode = "sequence_mean_token_sum"


@dataclass(kw_only=True)
class GSPO(PolicyGradient):
    """Group sequence policy optimisation: arXiv 2507.18071, eq. 5 and 7.

    GRPO's advantages; the ratio of the whole sequence, its length's root, is clipped instead of each token's.
    """

    name: str = field(default="gspo", init=False)
    fixed: ClassVar[tuple[str, ...]] = ("loss_kind", "dual_clip")
    identity: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "aggregation")
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
    identity: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
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
    whiten_unbiased: bool = True

    def advantages(self, batch: TokenBatch) -> Tensor:
        rewards = _token_rewards(self, batch)
        returns = discounted_returns(rewards, batch.loss_mask, gamma=self.gamma, seq_ids=batch.seq_ids)
        return whiten(returns, batch.loss_mask, unbiased=self.whiten_unbiased)

    def compares_groups(self) -> bool:
        return False


@dataclass(kw_only=True)
class ReinforcePPBaseline(PolicyGradient):
    """REINFORCE++-baseline: arXiv 2501.03262.

    A = r - mean of the group, whitened over all tokens of the batch instead of divided by the group's own std.
    """

    name: str = field(default="reinforce_pp_baseline", init=False)
    fixed: ClassVar[tuple[str, ...]] = ("scale", "scale_eps")
    identity: ClassVar[tuple[str, ...]] = ("baseline",)
    whiten_unbiased: bool = True

    def advantages(self, batch: TokenBatch) -> Tensor:
        first, _ = batch.episodes()
        per_episode = group_relative(self.rewards(batch), batch.group_ids[first], baseline=self.baseline)
        return whiten(to_tokens(per_episode, batch), batch.loss_mask, unbiased=self.whiten_unbiased)


@dataclass(kw_only=True)
class ReMax(PolicyGradient):
    """REINFORCE with the greedy completion's reward as baseline: arXiv 2310.10505.

    A = r - reward of the most likely completion of the same prompt.
    """

    name: str = field(default="remax", init=False)
    needs_greedy: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("baseline", "scale", "scale_eps")
    identity: ClassVar[tuple[str, ...]] = ("loss_kind", "aggregation")
    loss_kind: LossKind = "reinforce"
    aggregation: Mode = "sequence_mean_token_sum"

    def advantages(self, batch: TokenBatch) -> Tensor:
        first, _ = batch.episodes()
        return to_tokens(remax(self.rewards(batch), trained(batch.greedy_rewards)[first]), batch)

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
    whiten_unbiased: bool = True

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
        return whiten(advantages, batch.loss_mask, unbiased=self.whiten_unbiased)

    def value_loss(self, batch: TokenBatch, values: Tensor) -> tuple[Tensor, Metrics]:
        """[T] per-token loss of the critic, to be reduced like the policy's.

        Args:
            values: [T] float32 with a graph.
        """
        old, returns = trained(batch.values), trained(batch.returns)
        return value_loss(values, old, returns, clip=self.value_clip, mask=batch.loss_mask)

    def compares_groups(self) -> bool:
        return False


ALGORITHMS: dict[str, type[PolicyGradient]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "topr": TOPR,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "remax": ReMax,
    "ppo": PPO,
    "maxrl": MaxRL,
    "opd": OPD,
    "gkd": GKD,
}


def build_algorithm(
    kind: str | type[PolicyGradient],
    *,
    group_size: int,
    max_new_tokens: int,
    dialect: str | None = None,
    **choices: Any,
) -> PolicyGradient:
    """The algorithm of a name, with some of its choices changed.

    Args:
        kind: a key of `ALGORITHMS`, or a class of one's own.
        group_size: completions of each prompt.
        max_new_tokens: longest completion in tokens.
        dialect: a key of `DIALECTS`: what that framework does where the algorithm leaves it open.
        choices: fields of the class, `loss_kind` by the name `loss`; None keeps the algorithm's own choice.

    Raises:
        ValueError: an unknown name, a choice that the algorithm does not have, one that is out of range or has no
            effect beside the others, or a group too small for its baseline.
    """
    if isinstance(kind, str) and kind not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {kind!r}; there are {', '.join(ALGORITHMS)}")
    made_from = ALGORITHMS[kind] if isinstance(kind, str) else kind
    algorithm = _in_dialect(made_from, dialect, _given(made_from, choices), max_new_tokens)
    if made_from not in ALGORITHMS.values():
        algorithm.name = made_from.__name__
    if algorithm.needs_group and group_size < 2:
        raise ValueError(
            f"{algorithm.name} compares the completions of a prompt, so group_size must be at least 2, it is "
            f"{group_size}; the algorithm 'reinforce' works with 1"
        )
    return algorithm


def _given(kind: type[PolicyGradient], choices: dict[str, Any]) -> dict[str, Any]:
    """Field name -> value, for the choices that were made."""
    defaults = {choice_of(f.name): (f.name, f.default) for f in fields(kind) if f.init}
    given = {}
    for choice, value in choices.items():
        if value is None:
            continue
        if choice not in defaults:
            raise ValueError(f"{shown(choice)} is not a choice of the algorithm {algorithm_name(kind)!r}")
        field_name, default = defaults[choice]
        # The configuration always states these, so a value equal to the default says nothing.
        if choice in ("kl_coef", "entropy_coef", "positive_nll") and value == default:
            continue
        given[field_name] = value
    return given


def _in_dialect(
    kind: type[PolicyGradient], dialect: str | None, given: dict[str, Any], max_new_tokens: int
) -> PolicyGradient:
    """The algorithm with what was given, and what the dialect says of the rest.

    A dialect changes neither what was given nor what makes the algorithm what it is, and says nothing of a choice
    without effect.
    """
    # Before anything is filled in: a choice refused here is the user's, not the dialect's.
    algorithm = kind(max_new_tokens=max_new_tokens, **given)
    algorithm.refuse_idle(given)
    if dialect is None:
        return algorithm
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}; there are {', '.join(DIALECTS)}")
    filled = dict(given)
    for choice, value in preset(dialect).items():
        if choice in given or choice in kind.identity or not hasattr(algorithm, choice):
            continue
        if choice not in algorithm.idle():
            filled[choice] = value
            algorithm = kind(max_new_tokens=max_new_tokens, **filled)
    algorithm.refuse_idle(given)
    return algorithm


def algorithm_name(kind: type[PolicyGradient]) -> str:
    """The name of a built-in algorithm, or that of the class."""
    return next((name for name, other in ALGORITHMS.items() if other is kind), kind.__name__)


def _token_rewards(algorithm: PolicyGradient, batch: TokenBatch) -> Tensor:
    """[T] the reward at the last trained token of each sequence, rewards of turns at theirs, less the penalty at every
    token, if there is one."""
    penalty = algorithm.penalty(batch)
    coef = 0.0 if penalty is None else algorithm.kl_coef
    found = token_rewards(algorithm.scores(batch), batch.loss_mask, batch.seq_ids, kl=penalty, kl_coef=coef)
    return found if batch.turn_rewards is None else found + torch.where(batch.loss_mask, batch.turn_rewards, 0.0)


__all__ = [
    "ALGORITHMS",
    "CISPO",
    "DAPO",
    "GKD",
    "GRPO",
    "GSPO",
    "OPD",
    "PPO",
    "REINFORCE",
    "RLOO",
    "TOPR",
    "DrGRPO",
    "MaxRL",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "build_algorithm",
    "resolved",
]
