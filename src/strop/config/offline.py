"""`offline:` reinforcement learning on completions that were sampled before."""

from __future__ import annotations

from typing import Literal

from strop.config.base import StrictModel


class RolloutColumns(StrictModel):
    """Which columns of the data are what, beside the prompt and the answer of `data.train.columns`. The names are those
    that `strop rollout` writes; other columns travel with the row to rewards."""

    group: str | None = None
    """Column whose equal values make a group. When not set it is `group`, else `prompt_id`, else every row is a group
    of its own; equal prompts make a group only if this names the prompt's column."""
    prompt_ids: str = "prompt_ids"
    """Column with the prompt's token ids; where the data has none, the prompt is rendered and tokenised."""
    completion: str = "completion"
    """Column with the completion as text; where the data has no token ids, it is tokenised."""
    completion_ids: str = "completion_ids"
    """Column with the token ids that were sampled, the token that ended the completion included."""
    logprobs: str = "logprobs"
    """Column with the log-probability of each of these tokens, at the temperature that they were sampled at."""
    reward: str = "reward"
    """Column with what the completion is worth, a number."""
    status: str | None = "status"
    """Column that says how the completion ended: `stop`, `length`, or an error's name for one without a reward. Without
    it every completion counts as one that ended by itself."""
    temperature: str | None = "temperature"
    """Column with the sampling temperature, which must be `rollout.temperature`."""


class OfflineSettings(StrictModel):
    """`offline:` learn from completions that were sampled before, by any policy, instead of sampling: the rows of
    `data.train` are completions, and a step trains `rollout.groups_per_step` groups of them."""

    columns: RolloutColumns = RolloutColumns()
    """Which columns hold the completions."""
    logprobs: Literal["recorded", "compute", "none"] = "recorded"
    """What the policy that sampled thought of its tokens, which ratios and corrections are measured against: as the
    data has it, or computed with the weights that the run starts from. With `none` nobody knows: each step takes its
    completions as the policy's own, and what needs the numbers is refused."""
    rewards: Literal["recorded", "verify"] = "recorded"
    """`recorded` takes the rewards of the data; `verify` has the verifiers of `rewards` score the completions."""
