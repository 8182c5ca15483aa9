"""`algorithm:` the objective of reinforcement learning."""

from __future__ import annotations

from typing import Literal

from strop.config.base import NonNegativeFloat, PositiveFloat, StrictModel


class AlgorithmSettings(StrictModel):
    """`algorithm:` a named algorithm, and what to change in it. A setting of `null` is the algorithm's own choice;
    `strop config show` prints the choices that result."""

    name: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    """`grpo` (arXiv 2402.03300), `dr_grpo` (arXiv 2503.20783), `rloo` (arXiv 2402.14740) or `reinforce`."""
    baseline: Literal["mean", "leave_one_out", "none"] | None = None
    """What is subtracted from a reward: the mean of its group, the mean of the others, or nothing."""
    scale: Literal["none", "std", "population_std", "mean"] | None = None
    """What the difference is divided by."""
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
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the divergence (http://joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty goes: a term of the loss, or subtracted from the reward of each token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; at 0 entropy is measured without a graph."""
