"""`run:`, `evaluation:`, `checkpoint:`, `tracking:` and `hardware:` everything around the loop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from strop.config.base import Auto, NonNegativeInt, PositiveInt, StrictModel


class RunSettings(StrictModel):
    """`run:` how long, from which seed, under which name."""

    steps: PositiveInt = 100
    """Steps of reinforcement learning."""
    seed: NonNegativeInt = 0
    """Seed of everything that is random: new weights, order of the data, each sampled token."""
    name: str | None = None
    """Name of the run's folder; the recipe's file name when not set."""
    folder: str = "runs"
    """Where runs are kept."""

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, value: str | None) -> str | None:
        if value is not None and (not value or "/" in value or value.startswith(".")):
            raise ValueError("a run's name is one folder name: no slashes, no leading dot")
        return value


class EvaluationSettings(StrictModel):
    """`evaluation:` scores on `data.eval`, before the first step, at intervals, and after the last."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only at the start and at the end."""
    prompts: PositiveInt | None = None
    """Use only the first prompts, so many; all of them when not set."""
    samples: PositiveInt = 1
    """Completions for each prompt; accuracy is their mean."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion; `rollout.max_new_tokens` when not set."""


class CheckpointSettings(StrictModel):
    """`checkpoint:` what is kept so that a run can go on after anything."""

    every: PositiveInt = 10
    """Steps between checkpoints; one is always written at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""


class TrackingSettings(StrictModel):
    """`tracking:` where numbers go. The run folder always has `metrics.jsonl`."""

    display: Literal["auto", "live", "plain", "off"] = "auto"
    """What the terminal shows: a live panel, a line a step, or nothing; `auto` is `live` on a terminal, `plain` in a
    file or pipe."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb_project: str | None = None
    """Project on Weights & Biases (extra `wandb`)."""
    mlflow_uri: str | None = None
    """Tracking address of an MLflow server or folder (extra `mlflow`)."""
    episodes_every: NonNegativeInt = 1
    """Steps between files of whole episodes, token by token; 0 writes none."""


class HardwareSettings(StrictModel):
    """`hardware:` the only section that differs between machines; `auto` fills it."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model lives; `auto` takes a CUDA card, else Apple's GPU, else the CPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads of torch; `auto` is one for each core the process may use."""
