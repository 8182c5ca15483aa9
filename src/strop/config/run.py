"""`run:`, `evaluation:`, `checkpoint:`, `tracking:` and `hardware:` everything around the loop."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.config.base import Auto, NonNegativeFloat, NonNegativeInt, PositiveInt, StrictModel
from strop.config.rewards import Verifiers, check_names

LEAST_LOAD_EVERY = 0.1


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


class WatchedMetric(StrictModel):
    """A score on held-out data that something is decided by."""

    metric: str
    """Its name in `metrics.jsonl`: `eval/accuracy`, `eval/reward`, or of examples `eval/loss` and so on."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Whether more or less of it is better; `auto` knows, but for `eval/completion_length`."""


class EarlyStopSettings(WatchedMetric):
    """End the run before its last step when a held-out score has stopped getting better."""

    patience: PositiveInt = 3
    """Evaluations in a row that may pass without a new best; the run ends after so many."""
    min_delta: NonNegativeFloat = 0.0
    """By how much a new best has to be better than the last one."""


class BestSettings(WatchedMetric):
    """Keep the checkpoints that score best on held-out data, beside the newest ones. `checkpoints/best` names the very
    best one."""

    keep: PositiveInt = 1
    """Best checkpoints that are kept."""


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
    verifiers: Verifiers | None = None
    """What held-out completions are scored by; `rewards.verifiers` when not set. With a learned reward in training, an
    exact one here says whether the policy gets better or only better at pleasing."""
    correct_at: float = 1.0
    """Score of the first of these verifiers from which a completion counts as correct; `rewards.correct_at` is not
    asked."""
    early_stop: EarlyStopSettings | None = None
    """End the run when a held-out score has stopped getting better; it goes on to its last step when not set."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_names(self.verifiers or [])
        return self


class CheckpointSettings(StrictModel):
    """`checkpoint:` what is kept so that a run can go on after anything."""

    every: PositiveInt = 10
    """Steps between checkpoints; one is always written at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
    in_background: bool | Auto = "auto"
    """Copy what a checkpoint holds to the CPU's memory, and write it while training goes on; the next checkpoint, and
    the end of the run, wait for it. `auto` does so where the copy takes at least 64 MiB and at most a quarter of the
    memory that is free. The last checkpoint of a run is never written so: nothing is left to go on with."""
    best: BestSettings | None = None
    """Keep the best checkpoints too, by a held-out score; only the newest when not set."""


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
    load_every: NonNegativeFloat = 10.0
    """Seconds between two looks at processors, memory and cards of the machines, for `load.jsonl`; 0 for none, and at
    least 0.1 else."""

    @model_validator(mode="after")
    def _not_all_the_time(self) -> Self:
        if 0 < self.load_every < LEAST_LOAD_EVERY:
            raise ValueError(
                f"load_every ({self.load_every:g}) is less than {LEAST_LOAD_EVERY:g}: looking takes time itself; 0 "
                "switches it off"
            )
        return self


class HardwareSettings(StrictModel):
    """`hardware:` the only section that differs between machines; `auto` fills it."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model lives; `auto` takes a CUDA card, else Apple's GPU, else the CPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads of torch; `auto` is one for each core the process may use."""
    deterministic: bool | Auto = "auto"
    """Compute the same bits again, so that a run that was killed and goes on ends with the same parameters. `auto` is
    true on a CPU, where it costs nothing, and false on a GPU, where the fastest kernels add up in any order."""
