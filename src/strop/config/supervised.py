"""`supervised:` training on examples instead of on sampled completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.config.base import Auto, NonNegativeFloat, PositiveFloat, PositiveInt, Share, StrictModel
from strop.config.teachers import Divergence, OpenShare, TeacherSettings

Method = Literal[
    "sft",
    "distillation",
    "reward_model",
    "process_reward",
    "dpo",
    "cdpo",
    "robust_dpo",
    "ipo",
    "simpo",
    "orpo",
    "kto",
]


class ExampleColumns(StrictModel):
    """Which columns of the data are what, beside the prompt and the answer of `data.train.columns`."""

    messages: str = "messages"
    """Column with a whole conversation, for `sft` and `distillation`; used where the rows have it."""
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
    """`sft` (supervised fine-tuning), `distillation` (from teachers, on given texts), `reward_model` (scores, by
    Bradley-Terry or, for rankings, Plackett-Luce), `process_reward` (a score for each step of a solution), or a way of
    optimising preferences: `dpo`, `cdpo`, `robust_dpo`, `ipo`, `simpo`, `orpo`, and `kto` for completions judged one by
    one."""
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
    reference: Literal["auto", "model", "adapter_off", "precomputed"] = "auto"
    """Where the reference's log-probabilities come from, for methods that have one: a frozen copy of the model
    (`model`), the model with its adapter off (`adapter_off`), or the model before its first step, asked once for all
    the data and kept in the run's folder (`precomputed`). `auto` is `adapter_off` with `model.lora`, else `model`."""
    neftune_alpha: PositiveFloat | None = None
    """Noise on the embeddings while training, uniform in +-alpha / sqrt(tokens x width) (NEFTune, arXiv 2310.05914); of
    `sft`. Its authors use 5 to 15."""
    teachers: list[TeacherSettings] = Field(default_factory=list)
    """The models that `distillation` learns from: the mean of their probabilities, by weight."""
    targets: str | None = None
    """File with what the teachers say of the data, which `strop teach` writes; with it no teacher is loaded. Of
    `distillation`."""
    divergence: Divergence | None = None
    """How far the student is from the teachers at a token; of `distillation`. `forward_kl` (its own choice) is
    KL(teacher || student), `reverse_kl` KL(student || teacher), `jensen_shannon` lies between the two."""
    jsd_beta: OpenShare | None = None
    """Share of the teacher in the mixture of `jensen_shannon`: near 0 it is the forward divergence, near 1 the reverse
    one; 0.5 when not set."""
    top_k: PositiveInt | None = None
    """Likeliest tokens of the teachers that are told apart at each position, all others together being one more; of
    `distillation`. 64 when not set, or what `targets` holds; a number as large as the vocabulary tells all apart."""
    temperature: PositiveFloat | None = None
    """Of the teachers' and the student's distributions; the divergence is multiplied by its square, which keeps the
    size of its gradient (arXiv 1503.02531). Of `distillation`; 1 when not set, or that of `targets`."""
    cross_entropy_weight: Share | None = None
    """Share of the data's own tokens in the loss, (1 - w) x divergence + w x negative log-likelihood; of
    `distillation`. 0 when not set."""
