"""Pipelines: stages in order, each an ordinary run; done ones are skipped, a stopped one goes on where it was."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.config import Config
from strop.config.loading import config_hash
from strop.config.pipeline import PipelineConfig
from strop.errors import UserError
from strop.loops.online import TrainingSummary
from strop.loops.preflight import check_stages
from strop.loops.stages import Action, anew, best_of, in_stage, plan, run_of, settle
from strop.loops.train import train_run
from strop.tracking.display import make_display
from strop.tracking.pipeline_directory import PipelineDirectory, StageEntry, StageStatus, read_pipeline
from strop.tracking.pipelines import finished_line, print_pipeline
from strop.tracking.run_directory import ASKED_TO_LEAVE, read_manifest
from strop.tracking.series import folder_name, next_number
from strop.training.checkpoint import latest_checkpoint, read_state


@dataclass(frozen=True)
class PipelineSummary:
    """How a pipeline ended: its folder, and how each stage did, by name, in order, up to one that had to leave."""

    folder: Path
    stages: dict[str, TrainingSummary]

    @property
    def model(self) -> Path:
        """Folder of the model that the last stage made."""
        return list(self.stages.values())[-1].model


def train_pipeline(
    config: PipelineConfig, *, fresh: bool, recipe: str | None, retrain: Sequence[str]
) -> PipelineSummary:
    """See `strop.train`."""
    name = config.name or (Path(recipe).stem if recipe else "pipeline")
    again = anew(config, retrain)
    newest = None if fresh else PipelineDirectory.latest(config.folder, name)
    if newest is None and again:
        what = "all stages of a new pipeline are trained, so `--retrain` has no effect"
        raise UserError(what, where=f"--retrain {' '.join(retrain)}", mend="leave it out")
    actions: dict[str, Action] = dict.fromkeys(config.stages, "begin")
    done: dict[str, Path] = {}
    if newest is not None:
        actions = plan(config, newest, again)
        runs = {stage: run_of(newest, read_pipeline(newest), stage) for stage in config.stages}
        done = {stage: run for stage, run in runs.items() if run is not None and actions[stage] == "skip"}
    check_stages(config, done)
    if newest is None:
        directory = PipelineDirectory.create(config.folder, name, list(config.stages))
    else:
        directory = PipelineDirectory.open(newest)
    with directory:
        _note_stages(directory, config, again)
        found: dict[str, TrainingSummary] = {}
        for number, stage in enumerate(config.stages, 1):
            if stage in done:
                found[stage] = _skip(directory, config.stages[stage], stage, done[stage])
            else:
                found[stage] = _train(directory, config, stage, f"stage {number} of {len(actions)}: {stage}")
                if _was_left(found[stage]):
                    # Nor does another stage begin on a machine that is about to be taken.
                    directory.close("interrupted")
                    break
    if any(stage.tracking.display != "off" for stage in config.stages.values()):
        from rich.console import Console

        print_pipeline(Console(), directory.path)
    return PipelineSummary(directory.path, found)


def _note_stages(directory: PipelineDirectory, config: PipelineConfig, again: set[str]) -> None:
    """Write down the stages as the recipe has them now. Those to be trained anew are without a run from here on, so
    that after a stop the same command without `--retrain` goes on with the new ones."""
    entries = []
    for stage in config.stages:
        entry = directory.manifest.stage(stage) or StageEntry(stage)
        if stage in again:
            replaced = (*entry.replaced, *([entry.run] if entry.run is not None else []))
            entry = StageEntry(stage, replaced=replaced)
        entries.append(entry)
    directory.update(stages=tuple(entries))


def _train(directory: PipelineDirectory, config: PipelineConfig, stage: str, title: str) -> TrainingSummary:
    entry = directory.manifest.stage(stage)
    assert entry is not None
    # The name is noted before the run is made: after a kill in between, the run goes on instead of beginning twice.
    run = entry.run or folder_name(stage, next_number(directory.path, stage, "run.json"))
    with in_stage(stage):
        settled = settle(config, stage, directory.path, directory.manifest)
    directory.update_stage(stage, run=run, status="running", config_hash=config_hash(settled))
    _say(settled, title)
    try:
        with in_stage(stage):
            summary = train_run(settled, fresh=not (directory.path / run / "run.json").is_file(), recipe=None)
    except BaseException as error:
        directory.update_stage(stage, status="interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    status: StageStatus = "interrupted" if _was_left(summary) else "finished"
    directory.update_stage(stage, run=summary.folder.name, status=status)
    _free_memory()
    return summary


def _was_left(summary: TrainingSummary) -> bool:
    """Whether a stage's run saved and ended because it was asked to (SIGUSR1): it goes on with the same command."""
    return summary.stopped == ASKED_TO_LEAVE


def _skip(directory: PipelineDirectory, recipe: Config, stage: str, run: Path) -> TrainingSummary:
    """Say that a stage is done; how it ended is in its folder."""
    _say(recipe, finished_line(stage, run))
    directory.update_stage(stage, status="finished")
    manifest, checkpoint = read_manifest(run), latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    best = best_of(run, recipe)
    return TrainingSummary(
        folder=run,
        model=checkpoint / "model",
        steps=int(read_state(checkpoint)["step"]),
        before=dict(manifest.scores.get("before") or {}),
        after=dict(manifest.scores.get("after") or {}),
        best=None if best is None else best / "model",
        stopped=manifest.stopped,
    )


def _free_memory() -> None:
    """Let go of the models of a stage before the next one loads its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(config: Config, text: str) -> None:
    display = make_display(config.tracking)
    display.message(text)
    display.close()
