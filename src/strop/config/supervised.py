"""`supervised:` training on examples instead of on sampled completions."""

from __future__ import annotations

from typing import Literal

from strop.config.base import Auto, NonNegativeFloat, PositiveFloat, PositiveInt, Share, StrictModel

Method = Literal["sft", "reward_model", "process_reward", "dpo", "cdpo", "robust_dpo", "ipo", "simpo", "orpo", "kto"]


class ExampleColumns(StrictModel):
    """Which columns of the data are what, beside the prompt and the answer of `data.train.columns`."""

    messages: str = "messages"
    """Column with a whole conversation, for `sft`; used where the rows have it."""
    chosen: str = "chosen"
    """Column with the better completion: a text or messages."""
    rejected: str = "rejected"
    """Column with the worse completion."""
    margin: str | None = None
    """Column with how much better the chosen completion is, for `reward_model`."""
    ranked: str | None = None
    """Column with a list of two or more completions, best first, for `reward_model`; instead of `chosen` and
    `rejected`."""
    completion: str = "completion"
    """Column with the judged completion, for `kto`."""
    label: str = "label"
    """Column that says whether the completion is desirable, for `kto`: true or false."""
    steps: str = "steps"
    """Column with the steps of a solution, a list of texts, for `process_reward`."""
    labels: str = "labels"
    """Column that says of each step whether it is right, a list of true and false, for `process_reward`."""


class SupervisedSettings(StrictModel):
    """`supervised:` training on examples instead of on sampled completions. With this section a recipe has no
    `rewards`, and `run.steps` counts optimizer updates. A setting of `null` is the method's own choice."""

    method: Method = "sft"
    """`sft` (supervised fine-tuning), `reward_model` (scores, by Bradley-Terry or, for rankings, Plackett-Luce),
    `process_reward` (a score for each step of a solution), or a way of optimising preferences: `dpo`, `cdpo`,
    `robust_dpo`, `ipo`, `simpo`, `orpo`, and `kto` for completions judged one by one."""
    batch_size: PositiveInt = 32
    """Rows in one step."""
    max_tokens: PositiveInt | Auto = "auto"
    """Longest example in tokens, prompt included; `auto` is the model's context. `data.overlong_prompts` says what
    becomes of a longer one."""
    columns: ExampleColumns = ExampleColumns()
    """Which columns hold the examples."""
    beta: PositiveFloat | None = None
    """Strength of the pull to the reference (`dpo` and its kin), scale of the reward (`simpo`), or weight of the odds
    ratio (`orpo`)."""
    label_smoothing: Share | None = None
    """Share of labels that are wrong, below 0.5; of `cdpo` and `robust_dpo`."""
    length_normalised: bool | None = None
    """Means over the tokens of a completion instead of sums; of `dpo`, `cdpo`, `robust_dpo` and `ipo`."""
    margin: NonNegativeFloat | None = None
    """By how much the chosen completion must be better; of `simpo`."""
    nll_coef: NonNegativeFloat | None = None
    """Weight of a supervised term on the chosen completions; of all methods on pairs but `reward_model`."""
    desirable_weight: NonNegativeFloat | None = None
    """Weight of desirable completions; of `kto`."""
    undesirable_weight: NonNegativeFloat | None = None
    """Weight of undesirable completions; of `kto`."""
    centre: NonNegativeFloat | None = None
    """Weight of the square of a prompt's summed scores, which keeps scores around 0; of `reward_model`."""
