"""What the named policy-gradient algorithms have in common: the three hooks, written once.

A named algorithm is a subclass of a few lines that changes defaults, or the hook in which its paper differs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from strop.algorithms.advantages import Baseline, Scale, group_relative
from strop.algorithms.aggregation import Mode, aggregate, denominators
from strop.algorithms.base import LossTerms
from strop.algorithms.batch import TokenBatch
from strop.algorithms.corrections import Correction, Level, importance_weights, off_policy_sequence_mask, veto
from strop.algorithms.kl import Kind, kl_estimate, kl_in_reward
from strop.algorithms.policy_losses import Metrics, entropy_bonus, positive_nll, ppo_clip, reinforce
from strop.algorithms.sampling_rules import WithoutSpread, soft_overlong_penalty
from strop.algorithms.segments import segment_count


@dataclass(kw_only=True)
class PolicyGradient:
    """Group-relative advantages, a policy loss, and optionally a penalty towards a reference and an entropy bonus.

    Args:
        max_new_tokens: longest completion, for the aggregation `constant`.

    The other fields are the choices that a user may change; each is explained by the function it is handed to.

    Raises:
        ValueError: a choice that is out of range, or that would have no effect beside the others.
    """

    max_new_tokens: int
    baseline: Baseline = "mean"
    scale: Scale = "none"
    scale_eps: float = 1e-6
    loss_kind: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Mode = "token_mean"
    kl_coef: float = 0.0
    kl_kind: Kind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_clamp: float | None = None
    kl_input_clamp: float | None = None
    kl_importance_weighted: bool = False
    entropy_coef: float = 0.0
    positive_nll: float = 0.0
    """Weight of the likelihood of tokens with a positive advantage (VAPO's term)."""

    correction: Correction | None = None
    correction_level: Level = "token"
    correction_low: float | None = None
    correction_high: float | None = None
    correction_veto: float | None = None
    """Sequences with a token whose weight is below it are not trained."""
    correction_off_policy: float | None = None
    """Sequences with a negative advantage and a mean drift above it, in nats, get no policy gradient."""

    overlong_filter: bool = False
    """Truncated completions are not trained; their rewards still count in the baseline."""
    overlong_penalty: float = 0.0
    """Taken from the reward of the longest completion, less for shorter ones, 0 before the buffer begins."""
    overlong_buffer: int | None = None
    """Tokens over which the penalty grows; None is a fifth of the longest completion."""
    without_spread: WithoutSpread = "keep"
    """What becomes of groups whose rewards are all equal."""
    max_refills: int = 3
    """With `resample`: how often such a group is replaced before it is trained as it is."""

    name: str = field(default="", init=False)
    needs_entropy: bool = field(default=False, init=False)
    needs_reference: bool = field(default=False, init=False)
    needs_group: bool = field(default=False, init=False)
    needs_old_logprobs: bool = field(default=False, init=False)
    """Whether the policy must score the tokens before the first update, even where it is the one that sampled them."""
    needs_critic: ClassVar[bool] = False
    """Whether `values` must be filled before `advantages`, which then fills `returns`."""
    needs_greedy: ClassVar[bool] = False
    """Whether `greedy_rewards` must be filled before `advantages`."""
    needs_sampler: ClassVar[bool] = False
    """Whether it makes no sense without the log-probabilities of whoever sampled."""
    needs_teacher: ClassVar[bool] = False
    """Whether `teacher_logprobs` must be filled before `advantages`."""
    needs_targets: ClassVar[bool] = False
    """Whether the teacher's whole distributions must be there: see `algorithms/targets.py`."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Choices that the algorithm does not leave open."""
    identity: ClassVar[tuple[str, ...]] = ()
    """Choices that make the algorithm what its paper says: a user may change them, a dialect does not."""

    def __post_init__(self) -> None:
        self.needs_entropy = self.entropy_coef != 0
        self.needs_reference = self.kl_coef != 0
        self.needs_group = self.compares_groups()
        self.needs_old_logprobs = self.correction is not None or self.correction_veto is not None
        self.refuse_idle(changed_fields(self))
        if self.scale == "mean" and self.kl_coef and self.kl_in == "reward":
            raise ValueError("scale 'mean' needs rewards of at least 0, which kl_in 'reward' cannot keep")
        if self.scale == "mean" and self.overlong_penalty and "scale" not in self.fixed:
            raise ValueError("scale 'mean' needs rewards of at least 0, which overlong.penalty cannot keep")
        if self.max_refills < 1:
            raise ValueError(f"max_refills must be at least 1, it is {self.max_refills}")
        if self.correction_off_policy is not None and not self.correction_off_policy >= 0:
            raise ValueError(f"correction.off_policy must be at least 0, it is {self.correction_off_policy}")
        if self.positive_nll < 0:
            raise ValueError(f"positive_nll must be at least 0, it is {self.positive_nll}")
        # The functions check their own bounds; a call on nothing finds a bad one now instead of at the first update. A
        # hook written by a user need not work on nothing.
        hooks = (type(self).correct, type(self).advantages, type(self).rewards, type(self).policy_loss)
        if all(hook.__module__.startswith("strop.") for hook in hooks):
            nothing = empty_batch()
            self.correct(nothing)
            nothing.advantages = self.advantages(nothing)
            self.policy_loss(nothing.sampler_logprobs, nothing.sampler_logprobs, nothing)

    # Before the three hooks of `base.Algorithm`: what the sampler did otherwise.

    def correct(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Measure how far trainer and sampler disagree, and with `correction` prepare to weigh tokens by it.

        Call it over a whole batch once `old_logprobs` is filled, before `advantages` and `denominators`. With
        `correction` it sets `extra["importance_weights"]`, and it takes rejected tokens out of `loss_mask`, those of
        sequences under a veto too.

        Returns:
            The scalar metrics of `corrections.importance_weights`.
        """
        weights, kept, metrics = importance_weights(
            trained(batch.old_logprobs),
            batch.sampler_logprobs,
            batch.loss_mask,
            batch.seq_ids,
            level=self.correction_level,
            kind=self.correction or "none",
            low=self.correction_low,
            high=self.correction_high,
        )
        if self.correction is not None:
            batch.extra["importance_weights"] = weights
        if self.correction_veto is not None:
            left = veto(
                trained(batch.old_logprobs),
                batch.sampler_logprobs,
                batch.loss_mask,
                batch.seq_ids,
                threshold=self.correction_veto,
            )
            metrics["mismatch/veto_share"] = (batch.loss_mask & ~left).sum() / batch.loss_mask.sum().clamp(min=1)
            kept = kept & left
        batch.loss_mask = kept
        return metrics

    # The three hooks of `base.Algorithm`.

    def advantages(self, batch: TokenBatch) -> Tensor:
        """[T] float32: each trained token has the advantage of its episode, others 0."""
        first, _ = batch.episodes()
        per_episode = group_relative(
            self.rewards(batch), batch.group_ids[first], baseline=self.baseline, scale=self.scale, eps=self.scale_eps
        )
        return to_tokens(per_episode, batch)

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        """Terms `policy`, `kl` and `entropy`; without `old_logprobs` the policy is taken to be the one that sampled."""
        mask = batch.loss_mask
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        policy, metrics = self.policy_loss(logprobs, old, batch)
        if self.correction is not None:
            policy = policy * batch.extra["importance_weights"]
        if self.correction_off_policy is not None:
            near = off_policy_sequence_mask(
                logprobs,
                batch.sampler_logprobs,
                trained(batch.advantages),
                mask,
                batch.seq_ids,
                threshold=self.correction_off_policy,
            )
            metrics["mismatch/off_policy_share"] = (mask & ~near).float()
            policy = torch.where(near, policy, 0.0)
        terms = {"policy": policy}
        if self.positive_nll:
            positive = trained(batch.advantages) > 0
            terms["positive_nll"] = positive_nll(logprobs, positive, coef=self.positive_nll, mask=mask)
        if batch.ref_logprobs is not None:
            metrics["kl/ref"] = kl_estimate(logprobs.detach(), batch.ref_logprobs, "k3", mask=mask)
        if self.kl_coef and self.kl_in == "loss":
            terms["kl"] = self.kl_coef * kl_estimate(
                logprobs,
                trained(batch.ref_logprobs),
                self.kl_kind,
                clamp=self.kl_clamp,
                input_clamp=self.kl_input_clamp,
                importance_weighted=self.kl_importance_weighted,
                old_logprobs=old if self.kl_importance_weighted else None,
                mask=mask,
            )
        if self.entropy_coef:
            assert entropy is not None, "needs_entropy was ignored"
            terms["entropy"] = entropy_bonus(entropy, coef=self.entropy_coef, mask=mask)
        return LossTerms(terms=terms, metrics=metrics)

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        """One denominator for all terms."""
        counts = denominators(batch.loss_mask, batch.seq_ids, max_new_tokens=self.max_new_tokens)
        return {"": counts[self.aggregation]}

    def reduce(self, per_token: Tensor, batch: TokenBatch, denominator: float) -> Tensor:
        """`aggregate` in the algorithm's mode."""
        return aggregate(per_token, batch.loss_mask, batch.seq_ids, mode=self.aggregation, denominator=denominator)

    # What a subclass may change.

    def policy_loss(self, logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """[T] per-token policy loss, and its metrics."""
        advantages = trained(batch.advantages)
        if self.loss_kind == "reinforce":
            return reinforce(logprobs, advantages, old_logprobs=old_logprobs, mask=batch.loss_mask)
        return ppo_clip(
            logprobs,
            old_logprobs,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            mask=batch.loss_mask,
        )

    def compares_groups(self) -> bool:
        """Whether a group of one has no advantage."""
        return self.baseline != "none" or self.scale != "none"

    def rewards(self, batch: TokenBatch) -> Tensor:
        """[E] reward of each episode, less the penalty for its length, and where `kl_in` is "reward" the divergence."""
        first, episode = batch.episodes()
        rewards = self.scores(batch)[first]
        penalty = self.penalty(batch)
        if penalty is None:
            return rewards
        return kl_in_reward(rewards, penalty, batch.loss_mask, episode[batch.seq_ids], kl_coef=self.kl_coef)

    def scores(self, batch: TokenBatch) -> Tensor:
        """[N] what the verifiers gave, less the penalty for the length of the episode."""
        if not self.overlong_penalty:
            return batch.rewards
        _, episode = batch.episodes()
        # Sampled tokens have a version, whether or not they are trained.
        counts = segment_count(batch.versions >= 0, episode[batch.seq_ids])
        lengths = torch.nn.functional.pad(counts, (0, max(batch.sequences - len(counts), 0)))
        penalty = soft_overlong_penalty(
            lengths, max_tokens=self.max_new_tokens, buffer=self.buffer(), factor=self.overlong_penalty
        )
        return batch.rewards + penalty[episode]

    def buffer(self) -> int:
        """Tokens over which the penalty for length grows: DAPO's 4,096 of 20,480 where it is not set."""
        return max(self.max_new_tokens // 5, 1) if self.overlong_buffer is None else self.overlong_buffer

    def penalty(self, batch: TokenBatch) -> Tensor | None:
        """[T] divergence from the reference that belongs in the reward; None where there is no such penalty.

        It is that of the policy before this step: `old_logprobs`, or where these are not filled, what the sampler saw.
        """
        if not self.kl_coef or self.kl_in == "loss":
            return None
        policy = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        return kl_estimate(
            policy,
            trained(batch.ref_logprobs),
            self.kl_kind,
            clamp=self.kl_clamp,
            input_clamp=self.kl_input_clamp,
            mask=batch.loss_mask,
        )

    def idle(self) -> dict[str, str]:
        """Choices that have no effect beside the others: name -> why."""
        why: dict[str, str] = dict.fromkeys(self.fixed, f"with {self.name}, which has its own way")
        if self.loss_kind == "reinforce" and "loss_kind" not in self.fixed:
            why |= dict.fromkeys(("clip_low", "clip_high", "dual_clip"), "with loss 'reinforce'")
        if self.scale == "none":
            why["scale_eps"] = "with scale 'none'"
        if not self.kl_coef:
            choices = ("kl_kind", "kl_in", "kl_clamp", "kl_input_clamp", "kl_importance_weighted")
            why |= dict.fromkeys(choices, "while kl_coef is 0")
        elif self.kl_in == "reward":
            why["kl_importance_weighted"] = "with kl_in 'reward', whose policy gradient weighs it already"
        if self.correction is None:
            levels = ("correction_level", "correction_low", "correction_high")
            why |= dict.fromkeys(levels, "without correction.kind")
        if not self.overlong_penalty:
            why["overlong_buffer"] = "while overlong.penalty is 0"
        if not self.compares_groups():
            why["without_spread"] = "where the completions of a prompt are not compared with each other"
        if self.without_spread != "resample":
            why["max_refills"] = "unless without_spread is 'resample'"
        return why

    def refuse_idle(self, given: Collection[str]) -> None:
        """Raise ValueError if a choice of `given` has no effect."""
        for choice, why in self.idle().items():
            if choice in given:
                raise ValueError(f"{shown(choice)} has no effect {why} (algorithm {self.name!r})")


def changed_fields(algorithm: PolicyGradient) -> set[str]:
    """Names of the choices that differ from the algorithm's own."""
    return {
        f.name
        for f in fields(algorithm)
        if f.init and f.default is not MISSING and getattr(algorithm, f.name) != f.default
    }


def resolved(algorithm: PolicyGradient) -> dict[str, Any]:
    """The choices in force: name -> value, without those that have no effect, under the names of the configuration."""
    idle = algorithm.idle()
    values = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.init and f.name not in idle}
    if algorithm.aggregation != "constant":
        del values["max_new_tokens"]
    return {"name": algorithm.name} | {shown(name): value for name, value in values.items()}


def choice_of(name: str) -> str:
    """The name of a field as a keyword of `build_algorithm`: `loss` itself is taken by the hook."""
    return "loss" if name == "loss_kind" else name


def shown(name: str) -> str:
    """The configuration's key of a field, below `algorithm`."""
    if name == "correction":
        return "correction.kind"
    for section in ("correction", "overlong"):
        if name.startswith(f"{section}_"):
            return f"{section}.{name.removeprefix(f'{section}_')}"
    return choice_of(name)


def to_tokens(per_episode: Tensor, batch: TokenBatch) -> Tensor:
    """[T] float32: each trained token has the number of its episode, [E]; others have 0."""
    _, episode = batch.episodes()
    # Not by `[…]`, which takes nine times as long on a CPU.
    return torch.where(batch.loss_mask, per_episode[episode].index_select(0, batch.seq_ids), 0.0)


def trained(tensor: Tensor | None) -> Tensor:
    """A tensor of the batch that must have been filled by now."""
    assert tensor is not None, "the batch lacks a tensor that the algorithm asked for"
    return tensor


def empty_batch() -> TokenBatch:
    """A batch of no tokens, with everything filled that an algorithm may ask for."""
    reals, ids, flags = torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    return TokenBatch(
        input_ids=ids,
        position_ids=ids,
        seq_ids=ids,
        loss_mask=flags,
        sampler_logprobs=reals,
        versions=ids,
        rewards=reals,
        group_ids=ids,
        truncated=flags,
        old_logprobs=reals,
        ref_logprobs=reals,
        values=reals,
        teacher_logprobs=reals,
        greedy_rewards=reals,
        extra={name: torch.zeros(0, 2) for name in ("target_logprobs", "student_logprobs")},
    )
