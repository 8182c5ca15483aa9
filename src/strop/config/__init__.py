"""Configuration: strict pydantic models, one file for each concern, and the loader that fills them.

Source of the words: `docs/architecture.md`, section 6. This room imports neither torch nor any other room.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from strop.config.algorithm import AlgorithmSettings
from strop.config.base import StrictModel
from strop.config.data import DataSettings
from strop.config.model import ModelSettings
from strop.config.rewards import RewardSettings
from strop.config.rollout import RolloutSettings
from strop.config.run import CheckpointSettings, EvaluationSettings, HardwareSettings, RunSettings, TrackingSettings
from strop.config.sandbox import SandboxSettings
from strop.config.supervised import SupervisedSettings
from strop.config.training import CriticSettings, TrainingSettings, WarmupSettings


class Config(StrictModel):
    """A whole recipe. `strop config explain KEY` prints what a key does."""

    model: ModelSettings
    """Which language model is trained."""
    data: DataSettings
    """Where prompts come from."""
    rewards: RewardSettings | None = None
    """What a completion is worth; needed unless the recipe is supervised."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where programs run that the model wrote."""
    supervised: SupervisedSettings | None = None
    """Learn from examples instead of from sampled completions; none when not set."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """The objective."""
    rollout: RolloutSettings = RolloutSettings()
    """How completions are sampled."""
    training: TrainingSettings = TrainingSettings()
    """How the weights are updated."""
    critic: CriticSettings = CriticSettings()
    """The critic of `ppo`."""
    warmup: WarmupSettings | None = None
    """Supervised steps before reinforcement learning; none when not set."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """When and how held-out prompts are scored."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When the state is saved."""
    tracking: TrackingSettings = TrackingSettings()
    """Where numbers go."""
    run: RunSettings = RunSettings()
    """How long, from which seed, under which name."""
    hardware: HardwareSettings = HardwareSettings()
    """What it runs on."""

    @model_validator(mode="after")
    def _one_source_of_truth(self) -> Self:
        if self.supervised is None and self.rewards is None:
            raise ValueError(
                "`rewards` is missing: reinforcement learning needs to know what a completion is worth (or set "
                "`supervised`, to learn from examples)"
            )
        if self.supervised is not None and self.rewards is not None:
            raise ValueError("`rewards` and `supervised` exclude each other: examples are not scored")
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        groups, parts = self.rollout.groups_per_step, self.training.mini_batches
        if groups % parts:
            raise ValueError(
                f"rollout.groups_per_step ({groups}) cannot be divided into training.mini_batches ({parts}) equal parts"
            )
        return self


__all__ = ["Config"]
