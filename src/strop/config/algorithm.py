"""`algorithm:` the objective of reinforcement learning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import ModelPath, NonNegativeFloat, PositiveFloat, PositiveInt, Share, StrictModel
from strop.config.teachers import Divergence, OpenShare, TeacherSettings

OwnClass = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class CorrectionSettings(StrictModel):
    """What to do where trainer and sampler disagree about a token: w = exp(trainer's log-probability - sampler's).

    Needs one more forward pass, before the first update. How far the two disagree is always logged (`mismatch/…`)."""

    kind: Literal["none", "truncate", "band", "mask"] | None = None
    """How w weighs the policy's loss: at most `high` (`truncate`), 0 outside [low, high] (`band`, IcePop), or with such
    tokens left out of every term and count (`mask`). With `rollout.max_staleness` or `rollout.window.past` it is
    `truncate` at 2 unless the recipe says `none`; without, nothing is corrected when not set."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """Whose w: the token's (the default), the product over its sequence, or that product's root of their number."""
    low: NonNegativeFloat | None = None
    """Lower bound of w."""
    high: PositiveFloat | None = None
    """Upper bound of w."""
    veto: Share | None = None
    """Leave out every sequence that has a token with w below this."""
    off_policy: NonNegativeFloat | None = None
    """Leave out of the policy's loss each sequence with a negative mean advantage whose tokens have become less likely
    than when they were sampled by more than this, in nats a token (DeepSeek-V3.2)."""


class OverlongSettings(StrictModel):
    """What to do with completions that reach, or come near, `rollout.max_new_tokens`."""

    filter: bool = False
    """Do not train truncated completions; their rewards still count in the baseline of their group."""
    penalty: NonNegativeFloat | None = None
    """Taken from the reward of the longest completion; it begins at 0 and grows along a line (DAPO eq. 13)."""
    buffer: PositiveInt | None = None
    """Tokens over which the penalty grows; a fifth of `rollout.max_new_tokens` when not set."""


class AlgorithmSettings(StrictModel):
    """`algorithm:` a named algorithm, and what to change in it. A setting of `null` is the algorithm's own choice, or
    its dialect's; `strop algorithms show NAME` prints the choices that result. A setting without effect is refused."""

    name: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "gspo",
            "cispo",
            "rloo",
            "reinforce",
            "topr",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "remax",
            "ppo",
            "maxrl",
            "opd",
            "gkd",
        ]
        | OwnClass
    ) = "grpo"
    """A named algorithm (`strop algorithms list`), or a class of your own as `module:Class`."""
    dialect: Literal["verl", "trl", "nemo_rl", "slime", "openrlhf", "skyrl", "prime_rl"] | None = None
    """Fill in what the algorithm's paper leaves open as this framework does; a key that is set here wins."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a class of your own."""
    teacher: ModelPath | None = None
    """The model that `opd` and `gkd` learn from: whatever `model.path` may be, with the same tokenizer."""
    teachers: list[TeacherSettings] = Field(default_factory=list)
    """Several models to learn from, in place of `teacher`: the mean of their probabilities, by weight."""
    divergence: Divergence | None = None
    """How far the policy is from the teacher at a token; of `gkd`. `forward_kl` is KL(teacher || policy), `reverse_kl`
    KL(policy || teacher), `jensen_shannon` lies between the two and is the algorithm's own choice."""
    jsd_beta: OpenShare | None = None
    """Share of the teacher in the mixture of `jensen_shannon`: near 0 it is the forward divergence, near 1 the reverse
    one; 0.5 when not set."""
    top_k: PositiveInt | None = None
    """Likeliest tokens of the teacher that are told apart at each position, all others together being one more; of
    `gkd`. 64 when not set; a number as large as the vocabulary tells all apart."""
    baseline: Literal["mean", "leave_one_out", "none"] | None = None
    """What is subtracted from a reward: the mean of its group, the mean of the others, or nothing."""
    scale: Literal["none", "std", "population_std", "mean"] | None = None
    """What the difference is divided by."""
    scale_eps: NonNegativeFloat | None = None
    """Added to the divisor; 1e-6 in most frameworks, 1e-4 in TRL."""
    gamma: Share | None = None
    """Discount of each token's reward to go; of `reinforce_pp`."""
    whiten_unbiased: bool | None = None
    """Whiten advantages by the variance over n - 1 instead of n; of `reinforce_pp` and `reinforce_pp_baseline`."""
    lam: Share | None = None
    """Lambda of generalised advantage estimation; of `ppo`."""
    observations: Literal["skip", "state", "state_drop_rewards", "zero"] | None = None
    """What tokens that the environment wrote are to the estimation of advantages; of `ppo`."""
    value_clip: PositiveFloat | None = None
    """How far a value may move in one step; of `ppo`."""
    loss: Literal["ppo_clip", "reinforce"] | None = None
    """The policy loss of a token."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: PositiveFloat | None = None
    """Bound of the loss for negative advantages (arXiv 1912.09729); must be above 1."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"] | None = None
    """How token losses become one number; denominators are counted over the whole mini-batch."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the Kullback-Leibler penalty towards the reference; 0 loads no reference."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] | None = None
    """Estimator of the divergence (http://joschu.net/blog/kl-approx.html); `k3` unless a dialect says otherwise."""
    kl_in: Literal["loss", "reward"] | None = None
    """Where the penalty goes: a term of the loss (the default), or subtracted from the reward."""
    kl_clamp: PositiveFloat | None = None
    """Bound of the divergence at a token; it ends the gradient there, at 10 from 2.6 nats on."""
    kl_input_clamp: PositiveFloat | None = None
    """Bound of the difference of log-probabilities that the divergence is estimated from."""
    kl_importance_weighted: bool | None = None
    """Multiply the divergence by the ratio, so that the gradient of `k3` is that of the reverse divergence."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; at 0 entropy is measured without a graph."""
    positive_nll: NonNegativeFloat = 0.0
    """Weight of a supervised term on the tokens with a positive advantage (VAPO, arXiv 2504.05118)."""
    without_spread: Literal["keep", "drop", "resample"] | None = None
    """What becomes of a group whose rewards are all equal: trained as it is, left out of the step, or replaced by
    another prompt (DAPO's dynamic sampling)."""
    max_refills: PositiveInt | None = None
    """How often in a step groups may be replaced; one that still has no spread is then trained as it is. 3 when not
    set."""
    overlong: OverlongSettings = OverlongSettings()
    """What to do with completions that are too long."""
    correction: CorrectionSettings = CorrectionSettings()
    """What to do where trainer and sampler disagree."""

    @model_validator(mode="after")
    def _arguments_have_a_class(self) -> Self:
        if self.arguments and ":" not in self.name:
            raise ValueError(f"arguments has no effect: they are those of a class of your own, and name is {self.name}")
        return self

    @model_validator(mode="after")
    def _teachers_are_named_once(self) -> Self:
        if self.teacher is not None and self.teachers:
            raise ValueError("teacher and teachers exclude each other: name one model, or several with their weights")
        return self
