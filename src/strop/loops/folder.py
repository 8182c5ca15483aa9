"""Which folder a run writes to: a new one, or the newest of its name, at its latest checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.config import Config
from strop.config.loading import config_hash, differences, load_config, resolved_yaml
from strop.errors import UserError
from strop.loops.assembly import Roles
from strop.loops.lineage import Inputs, inputs_of, other_models, run_name, same_models
from strop.loops.prepare import Prepared
from strop.tracking.display import Display
from strop.tracking.episodes import drop_episodes_after
from strop.tracking.load import LoadSampler
from strop.tracking.metrics import MetricsWriter, read_metrics
from strop.tracking.run_directory import RunDirectory, read_manifest
from strop.tracking.timeline import TimelineWriter
from strop.tracking.trackers import open_trackers
from strop.training.checkpoint import latest_checkpoint, read_state

# What may change when a run goes on: it does not change what the steps compute, but for how old their tokens are, which
# each token says itself.
MAY_CHANGE = (
    "rollout.max_staleness",
    "rollout.in_flight_updates",
    "rollout.update_every",
    "run.steps",
    "run.folder",
    "run.name",
    "checkpoint.",
    "tracking.",
    "evaluation.",
    "alarms.",
    "hardware.threads",
    "cluster.",
)
# Among these, what decides what the scores mean that are compared with each other.
MUST_STAY = ("evaluation.verifiers", "evaluation.correct_at")


@dataclass
class OpenedFolder:
    """A run's folder, locked by this process, with where to go on from."""

    directory: RunDirectory
    metrics: MetricsWriter
    checkpoint: Path | None
    state: dict[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()
    timeline: TimelineWriter | None = None
    load: LoadSampler | None = None

    def close(self, error: BaseException) -> None:
        """Give the folder back after something failed."""
        self.close_files()
        close_after(self.directory, error)

    def close_files(self) -> None:
        """Close what is written all the time."""
        for one in (self.load, self.metrics, self.timeline):
            if one is not None:
                one.close()


def close_after(directory: RunDirectory, error: BaseException) -> None:
    """Note in a run's manifest how it ended. asyncio turns Ctrl-C into a cancellation before the run sees it."""
    seen = KeyboardInterrupt() if isinstance(error, asyncio.CancelledError) else error
    directory.__exit__(type(seen), seen, None)


def open_folder(prepared: Prepared, roles: Roles, display: Display, *, fresh: bool, recipe: str | None) -> OpenedFolder:
    """A new run's folder, or the newest one of its name.

    Raises:
        UserError: the newest run was trained with a recipe that computes something else, or another process trains it.
    """
    config = prepared.config
    name = run_name(config, recipe)
    inputs = inputs_of(config)
    newest = None if fresh else RunDirectory.latest(config.run.folder, name)
    if newest is None:
        directory = RunDirectory.create(
            config.run.folder,
            name,
            config_yaml=resolved_yaml(config),
            config_hash=config_hash(config),
            steps=config.run.steps,
            seeds={"run": config.run.seed},
            data={"train": prepared.train.source.describe(), "fingerprint": prepared.train.source.fingerprint},
            model={"name": roles.loaded.name, "fingerprint": roles.loaded.fingerprint},
            parent=inputs.get("model.path", {}).get("run"),
            inputs=inputs,
        )
        return _opened(directory, config, display, None)
    check_same(newest, config, inputs)
    directory = RunDirectory.open(newest)
    try:
        directory.write_config(
            resolved_yaml(config), config_hash=config_hash(config), steps=config.run.steps, inputs=inputs
        )
        return _opened(directory, config, display, latest_checkpoint(directory.checkpoints_folder))
    except BaseException as error:
        close_after(directory, error)
        raise


def check_same(run: Path, config: Config, inputs: Inputs) -> None:
    """Raise UserError if going on with `config` would compute something else than the run did so far.

    Args:
        inputs: the models that it names, as they are now. The same model at another place is no change.
    """
    saved, then = load_config(run / "config.yaml"), read_manifest(run).inputs
    same = same_models(then, inputs)
    changed = [(key, old, new) for key, old, new in differences(saved, config) if key not in same and not _may(key)]
    if others := [key for key in other_models(then, inputs) if key not in {key for key, _, _ in changed}]:
        models = "; ".join(f"{key}: {inputs[key]['path']}" for key in others)
        raise UserError(
            f"a model that this run began with or asks is another one now ({models})",
            where=str(run),
            mend="name the checkpoint that it was, if it is still there, or start a new run with --fresh",
        )
    if saved.run.steps != config.run.steps:
        if config.training.optimizer.schedule != "constant":
            changed.append(("run.steps (the learning rate follows it)", saved.run.steps, config.run.steps))
        if config.model.lora is not None and config.model.lora.adaptive is not None:
            changed.append(("run.steps (the ranks of adapters follow it)", saved.run.steps, config.run.steps))
    if changed:
        listed = "; ".join(f"{key}: {old!r} -> {new!r}" for key, old, new in changed[:5])
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise UserError(
            f"the recipe has changed since this run began ({listed}{more})",
            where=str(run),
            mend="undo the change to go on with the run, or start a new one with --fresh",
        )


def _may(key: str) -> bool:
    """Whether a key may change when a run goes on."""
    if key.startswith(MUST_STAY):
        return False
    return any(key == may or (may.endswith(".") and key.startswith(may)) for may in MAY_CHANGE)


def _opened(directory: RunDirectory, config: Config, display: Display, checkpoint: Path | None) -> OpenedFolder:
    state = read_state(checkpoint) if checkpoint is not None else {}
    step = int(state["step"]) if state else None
    sinks = open_trackers(config.tracking, directory, config=config.model_dump(mode="json"), resumed_at=step)

    def warn(text: str) -> None:
        display.message(text, "warning")

    metrics = MetricsWriter(directory.metrics_path, sinks, warn=warn)
    timeline = TimelineWriter(directory.timeline_path, warn=warn)
    timeline.truncate_after(0 if step is None else step)
    if step is None:
        metrics.truncate_after(0, kind="warmup")
        metrics.truncate_after(-1)
    else:
        metrics.truncate_after(step)
        drop_episodes_after(directory.episodes_folder, step)
    history = [record.metrics for record in read_metrics(directory.metrics_path, kind="train")]
    load = LoadSampler(directory.load_path, config.tracking.load_every, warn=warn)
    return OpenedFolder(directory, metrics, checkpoint, state, history, timeline, load)
