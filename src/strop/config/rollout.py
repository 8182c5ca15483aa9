"""`rollout:` how completions are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from strop.config.base import Auto, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


class EngineSettings(StrictModel):
    """The sampler engine."""

    kind: Literal["local"] = "local"
    """`local` samples with the trainer's own weights in the trainer's process."""
    max_sequences: PositiveInt | Auto = "auto"
    """Sequences decoded together; others wait for a free place. `auto` is 256, or fewer if the memory is small."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens processed in one forward pass."""
    pack_weights: bool | Auto = "auto"
    """Hold a second copy of the weights laid out for small matrix products. `auto` does so for float32 on a CPU,
    when the model is large enough to gain from it."""


class RolloutSettings(StrictModel):
    """`rollout:` how completions are sampled."""

    groups_per_step: PositiveInt = 8
    """Prompts in one step."""
    group_size: PositiveInt = 8
    """Completions of each prompt."""
    max_new_tokens: PositiveInt = 256
    """Longest completion in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are taken at the same temperature everywhere."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion, beside the end-of-text tokens of the model; the stop text is kept."""
    max_staleness: NonNegativeInt = 0
    """How many versions older than the trainer the weights that sampled a token may be; 0 is synchronous."""
    engine: EngineSettings = EngineSettings()
    """The sampler engine."""

    @field_validator("max_staleness")
    @classmethod
    def _synchronous_only(cls, value: int) -> int:
        if value > 0:
            raise ValueError("only 0 (synchronous) is supported in this version")
        return value

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, value: list[str]) -> list[str]:
        if any(not text for text in value):
            raise ValueError("an empty stop text would end every completion at once")
        return value
