"""Configuration: strict pydantic models, one file for each concern, and the loader that fills them.

Source of the words: `docs/architecture.md`, section 6. This room imports neither torch nor any other room.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from strop.config.adapted_environments import EnvironmentSettings
from strop.config.alarms import AlarmSettings
from strop.config.algorithm import AlgorithmSettings
from strop.config.base import StrictModel
from strop.config.cluster import ClusterSettings
from strop.config.data import DataSettings
from strop.config.model import ModelSettings
from strop.config.offline import OfflineSettings
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
    """What a completion is worth; needed unless the recipe is supervised, or offline with recorded rewards."""
    alarms: AlarmSettings = AlarmSettings()
    """Signs that a reward is being hacked."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where programs run that the model wrote."""
    supervised: SupervisedSettings | None = None
    """Learn from examples instead of from sampled completions; none when not set."""
    environment: EnvironmentSettings | None = None
    """What answers the policy's turns; without it every completion is a single turn."""
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
    offline: OfflineSettings | None = None
    """Learn from completions that were sampled before; none when not set."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When the state is saved."""
    tracking: TrackingSettings = TrackingSettings()
    """Where numbers go."""
    run: RunSettings = RunSettings()
    """How long, from which seed, under which name."""
    hardware: HardwareSettings = HardwareSettings()
    """What it runs on."""
    cluster: ClusterSettings = ClusterSettings()
    """In how many processes, and where."""

    @model_validator(mode="after")
    def _one_source_of_truth(self) -> Self:
        if self.supervised is None and self.offline is None and self.rewards is None:
            raise ValueError(
                "`rewards` is missing: reinforcement learning needs to know what a completion is worth (or set "
                "`supervised`, to learn from examples)"
            )
        if self.supervised is not None and self.rewards is not None:
            raise ValueError("`rewards` and `supervised` exclude each other: examples are not scored")
        if self.supervised is not None and self.offline is not None:
            raise ValueError("`offline` and `supervised` exclude each other: examples have no rewards to learn from")
        if self.offline is not None and self.environment is not None:
            raise ValueError("`offline` and `environment` exclude each other: recorded completions are single turns")
        if self.offline is not None and self.offline.rewards == "verify" and self.rewards is None:
            raise ValueError("offline.rewards is `verify`, and there is no `rewards` to say what a completion is worth")
        return self

    @property
    def updates(self) -> int:
        """Optimizer updates that the trained model gets in the whole run."""
        if self.supervised is not None:
            return self.run.steps
        return max(0, self.run.steps - self.critic.warmup_steps) * self.training.mini_batches * self.training.epochs

    @model_validator(mode="after")
    def _ranks_have_time(self) -> Self:
        adaptive = None if self.model.lora is None else self.model.lora.adaptive
        if adaptive is not None:
            tinit, tfinal, _ = adaptive.phases(self.updates)
            if tinit >= self.updates - tfinal:
                raise ValueError(
                    f"model.lora.adaptive.tinit ({tinit}) and model.lora.adaptive.tfinal ({tfinal}) leave none of the "
                    f"run's {self.updates} updates to reallocate ranks in: lower them, or raise run.steps"
                )
        return self

    @model_validator(mode="after")
    def _environment_rewards(self) -> Self:
        second = self.alarms.second_opinion
        given = {
            "rewards.verifiers": self.rewards.verifiers if self.rewards is not None else [],
            "alarms.second_opinion.verifiers": second.verifiers if second is not None else [],
        }
        for key, verifiers in given.items():
            if self.environment is None and any(verifier.kind == "environment" for verifier in verifiers):
                raise ValueError(f"a verifier of kind `environment` in {key} needs the section `environment`")
        return self

    @model_validator(mode="after")
    def _tree_fits(self) -> Self:
        tree, environment = self.rollout.tree, self.environment
        if tree is None:
            return self
        if environment is None:
            raise ValueError("rollout.tree branches between turns, and without `environment` there is only one")
        if environment.kind == "self_play":
            raise ValueError("rollout.tree and a self_play environment exclude each other")
        if tree.at[-1] >= environment.max_turns:
            raise ValueError(
                f"rollout.tree.at names turn {tree.at[-1]}, counted from 0, and environment.max_turns "
                f"({environment.max_turns}) ends before it"
            )
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
