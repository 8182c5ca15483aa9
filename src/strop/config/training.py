"""`training:` and `warmup:` how the weights are updated."""

from __future__ import annotations

from typing import Literal

from strop.config.base import (
    AnyModelPath,
    Auto,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    StrictModel,
)
from strop.config.data import DataSource


class OptimizerSettings(StrictModel):
    """The optimizer, its schedule, and where its state is kept."""

    name: Literal["adamw", "adafactor", "muon", "adamw_8bit"] = "adamw"
    """`adamw` (arXiv 1711.05101). `adafactor` (1804.04235): a factored second moment, so almost no state. `muon`
    (2502.16982): orthogonal updates of the hidden matrices, AdamW for the rest. `adamw_8bit` (2110.02861): moments in
    8 bits, by bitsandbytes (the extra `bnb`)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's; Adafactor's are relative to the root mean
    square of each weight, so it wants a larger one (its authors: 1e-2)."""
    beta1: Share = 0.9
    """Decay of AdamW's first moment; under `muon` that of the weights left to AdamW. Not for `adafactor`."""
    beta2: Share = 0.999
    """Decay of AdamW's second moment; under `muon` that of the weights left to AdamW. Not for `adafactor`."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment; under `muon` of the weights left to it. Not for `adafactor`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases are never decayed."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; `null` leaves them as they are."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to `final_share` along a line or a cosine."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    final_share: Share = 0.0
    """Learning rate at the last update, as a share of the peak (not for `constant`)."""
    offload: bool = False
    """Keep masters and optimizer state in the CPU's memory and update there: less memory of the GPU, and slower."""


class TrainingSettings(StrictModel):
    """`training:` how a step's episodes become updates of the weights."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its schedule."""
    mini_batches: PositiveInt = 1
    """Optimizer updates that one step's groups are divided into (whole groups in each)."""
    epochs: PositiveInt = 1
    """Passes over the step's episodes."""
    tokens_per_micro_batch: PositiveInt | Auto = "auto"
    """Tokens in one forward and backward pass; `auto` is chosen from the memory. Results do not depend on it. A longer
    sequence gets a pass of its own."""
    logprob_chunk: PositiveInt | Auto = "auto"
    """Tokens whose logits exist at the same time. `auto` is 512, on a GPU up to 4,096, as its memory and the vocabulary
    allow."""
    compile: bool | Auto = "auto"
    """Compile the blocks of the model by torch.compile for the trainer's passes, all but attention, which takes up to a
    minute in the first step. `auto` does so on a GPU for models of 100 million weights and more, where it makes an
    update of all weights 1.4 times as fast (docs/performance.md). Not with `cluster.trainer.tensor`."""
    offload: bool = False
    """Keep masters and optimizer state in the CPU's memory while the engine samples, and on the GPU for the updates,
    which are the same bit for bit (docs/performance.md). The critic's too. `training.optimizer.offload` keeps them
    away for good and updates there."""


class CriticSettings(StrictModel):
    """`critic:` the model that `ppo` estimates values with: a second model with a scalar head, trained whole, or a
    scalar head on the policy itself."""

    shared: bool = False
    """Put the scalar head on the policy's own backbone: one pass gives log-probabilities and values, and one optimizer
    updates both. The head is no part of the model that is exported."""
    value_coef: PositiveFloat = 0.1
    """Weight of the value loss beside the policy's, with `shared`."""
    path: AnyModelPath | None = None
    """Model to begin with, of the policy's tokenizer: a language model, whose head then begins at 0, or a reward model,
    whose head is kept. The policy itself when not set. Not with `shared`."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """The optimizer and its schedule. With `shared` only `learning_rate` counts, as the head's own peak: all else is
    that of `training.optimizer`, whose schedule it follows."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the beginning in which the critic alone learns; with `shared`, its head alone."""


class WarmupSettings(StrictModel):
    """`warmup:` supervised steps on prompts and answers before reinforcement learning."""

    data: DataSource | None = None
    """Demonstrations: prompts, and what to answer; those of `data.train` when not set."""
    steps: PositiveInt = 100
    """Optimizer updates."""
    batch_size: PositiveInt = 64
    """Examples in one update."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-3, schedule="cosine", warmup_steps=10)
    """The optimizer and its schedule; its state is not carried over to reinforcement learning."""
