"""`model:` which language model is trained, and how it is held in memory."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import (
    Auto,
    ModelPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)

Recompute = bool | Literal["keep_attention"]
"""Which activations of a block are computed again in the backward pass: none, all, or all but attention's results."""


class NewModel(StrictModel):
    """A small Llama-shaped model with random weights and a character tokenizer, made on the spot."""

    characters: str = "0123456789+-*/=() ?abcdefghijklmnopqrstuvwxyz"
    """The alphabet of the tokenizer; one token for each character, beside the padding and end-of-text tokens."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    layers: PositiveInt = 4
    """Number of transformer blocks."""
    heads: PositiveInt = 4
    """Number of attention heads; must divide `hidden_size`."""
    key_value_heads: PositiveInt | None = None
    """Number of key/value heads (grouped-query attention); as many as `heads` when not set."""
    intermediate_size: PositiveInt | None = None
    """Width of the feed-forward layers; four times `hidden_size` when not set."""
    context: PositiveInt = 256
    """Longest sequence in tokens."""

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of 2 x heads ({2 * self.heads})")
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not a multiple of key_value_heads {self.key_value_heads}")
        twice = next((c for at, c in enumerate(self.characters) if c in self.characters[:at]), None)
        if twice is not None:
            raise ValueError(f"characters holds the character {twice!r} twice")
        return self


class AdaptiveSettings(StrictModel):
    """Ranks that move, while training, to the adapters where they matter (AdaLoRA, arXiv 2303.10512). Every adapter
    begins with `model.lora.rank`; updates are those of the optimizer."""

    target_rank: PositiveInt | Auto = "auto"
    """Rank of an adapter in the end, on average; `auto` is two thirds of `model.lora.rank`."""
    tinit: NonNegativeInt | Auto = "auto"
    """Updates before the first rank is taken away; `auto` is a tenth of the run's."""
    tfinal: NonNegativeInt | Auto = "auto"
    """Updates at the end in which the ranks stay as they are; `auto` is half of the run's."""
    delta_t: PositiveInt | Auto = "auto"
    """Updates from one reallocation to the next; `auto` makes at most some hundred of them."""
    beta1: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Smoothing of how sensitive the loss is to a weight."""
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Smoothing of how far that strays."""
    orth_reg_weight: NonNegativeFloat = 0.5
    """Weight of the term in the loss that keeps the directions of an adapter apart."""

    def rank_of(self, rank: int) -> int:
        """`target_rank`, given the rank of the beginning."""
        return max(1, rank * 2 // 3) if self.target_rank == "auto" else self.target_rank

    def phases(self, updates: int) -> tuple[int, int, int]:
        """(tinit, tfinal, delta_t) of a run of so many updates."""
        tinit = updates // 10 if self.tinit == "auto" else self.tinit
        tfinal = updates // 2 if self.tfinal == "auto" else self.tfinal
        delta_t = max(1, (updates - tinit - tfinal) // 100) if self.delta_t == "auto" else self.delta_t
        return tinit, tfinal, delta_t


class LoraConfig(StrictModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685) through peft; the base weights stay frozen."""

    rank: PositiveInt = 16
    """Rank r of each adapter."""
    alpha: PositiveFloat = 32.0
    """Numerator of the adapter's scale, alpha / r."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(r) instead, so that updates do not shrink as the rank grows (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Also learn the length of each row of the weights, apart from its direction (DoRA, arXiv 2402.09353). Slower."""
    dropout: NonNegativeFloat = 0.0
    """Dropout before the adapter; 0 keeps the first mini-batch exactly on-policy."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter, or `all-linear` for every linear layer but the output head."""
    adaptive: AdaptiveSettings | None = None
    """Let the ranks move to where they matter; every adapter keeps its rank when not set."""

    @model_validator(mode="after")
    def _ranks_can_move(self) -> Self:
        if self.adaptive is None:
            return self
        for name in ("dora", "rank_stabilised"):
            if getattr(self, name):
                raise ValueError(f"peft has no {name} for adapters whose ranks move: leave out {name} or adaptive")
        if self.adaptive.rank_of(self.rank) >= self.rank:
            raise ValueError(
                f"adaptive.target_rank ({self.adaptive.rank_of(self.rank)}) must be below rank ({self.rank}), or there "
                "is nothing to reallocate"
            )
        return self


class ModelSettings(StrictModel):
    """`model:` which language model is trained, and how it is held in memory."""

    path: ModelPath | None = None
    """A Hugging Face folder, a name on the Hub, a name that `strop models list` shows, a run, or in a pipeline
    `stage:NAME`. Not with `create`."""
    create: NewModel | None = None
    """Make a small model with random weights instead of loading one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights in forward and backward; `auto` is bfloat16 on a GPU and float32 on a CPU.
    Under bfloat16 the optimizer keeps float32 masters."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights; the reference policy is then the model with adapters off."""
    activation_checkpointing: Recompute | Auto = "auto"
    """Recompute each block's activations in the backward pass: less memory, and up to a third more time.
    `keep_attention` computes all again but the results of attention, the dearest part of long sequences, in all blocks
    but the first (on GPUs in bfloat16; elsewhere it is the same as `true`). `auto` is the first of false,
    `keep_attention` and true with which the longest sequence fits the memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's folder."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.create is None):
            raise ValueError("set exactly one of `path` (a model to load) and `create` (a model to make)")
        return self
