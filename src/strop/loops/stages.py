"""What is to be done with each stage of a pipeline: skip it, go on with it, or begin it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from strop.config import Config
from strop.config.pipeline import PipelineConfig, inputs, reference_of, with_paths
from strop.errors import StropError, UserError
from strop.loops.folder import check_same
from strop.loops.lineage import inputs_of
from strop.loops.selection import evaluations_of, ranking, stop_reason
from strop.tracking.pipeline_directory import PipelineManifest, read_pipeline
from strop.tracking.run_directory import read_manifest
from strop.training.checkpoint import best_checkpoints, latest_checkpoint, read_state

Action = Literal["skip", "go on", "begin"]


def plan(config: PipelineConfig, folder: Path, again: set[str]) -> dict[str, Action]:
    """What is to be done with each stage of a pipeline that is there.

    Args:
        again: stages that are to be trained anew.

    Raises:
        UserError: a stage that has been trained, at least in part, would be trained otherwise now, or from another
            model: it is neither kept nor thrown away without being told.
    """
    manifest = read_pipeline(folder)
    actions: dict[str, Action] = {}
    for stage, recipe in config.stages.items():
        run = run_of(folder, manifest, stage)
        if stage in again or run is None:
            actions[stage] = "begin"
            continue
        if changing := [name for name in inputs(recipe) if actions[name] != "skip"]:
            how = "anew" if actions[changing[0]] == "begin" else "further"
            what = f"it was trained from what stage {changing[0]} had made, which is now to be trained {how}"
            raise UserError(f"stage {stage}: {what}", where=str(run), mend=_mend(stage))
        with in_stage(stage):
            settled = settle(config, stage, folder, manifest)
            models = inputs_of(settled)
        with in_stage(stage, mend=_mend(stage)):
            check_same(run, settled, models)
        actions[stage] = "skip" if _is_done(run, settled) else "go on"
    return actions


def anew(config: PipelineConfig, stages: Sequence[str]) -> set[str]:
    """Some stages, and all that use what they make, directly or not.

    Raises:
        UserError: there is no stage of that name; the nearest one is named.
    """
    for stage in stages:
        if stage not in config.stages:
            close = get_close_matches(stage, config.stages, n=1)
            mend = f"did you mean {close[0]}?" if close else f"the stages are {', '.join(config.stages)}"
            raise UserError(f"there is no stage {stage!r} in this pipeline", where=f"--retrain {stage}", mend=mend)
    found = set(stages)
    for name, recipe in config.stages.items():
        if found & set(inputs(recipe)):
            found.add(name)
    return found


def settle(config: PipelineConfig, stage: str, folder: Path, manifest: PipelineManifest) -> Config:
    """The recipe of a stage as that of an ordinary run, in the pipeline's folder.

    Raises:
        UserError: a stage whose best checkpoint is asked for has none.
    """

    def found(path: str) -> str:
        reference = reference_of(path)
        if reference is None:
            return path
        run = run_of(folder, manifest, reference.stage)
        assert run is not None, f"stage {reference.stage} comes before {stage}"
        if not reference.best:
            return str(run)
        best = best_of(run, config.stages[reference.stage])
        if best is None:
            what = f"stage {reference.stage} has no best checkpoint: none of its evaluations gave a score"
            raise UserError(what, where=str(run), mend=f"write stage:{reference.stage} for its last checkpoint")
        # Not the pointer: another evaluation of that run must not change what this one began with.
        return str(best)

    recipe: Config = with_paths(config.stages[stage], found)
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": stage, "folder": str(folder)})})


def run_of(folder: Path, manifest: PipelineManifest, stage: str) -> Path | None:
    """The run of a stage, if it has been begun."""
    entry = manifest.stage(stage)
    if entry is None or entry.run is None or not (folder / entry.run / "run.json").is_file():
        return None
    return folder / entry.run


def best_of(run: Path, config: Config) -> Path | None:
    """The best checkpoint of a run by its recipe; None if it has none."""
    checkpoints = run / "checkpoints"
    latest, settings = latest_checkpoint(checkpoints), config.checkpoint.best
    if latest is None or settings is None:
        return None
    steps = [step for step, _ in ranking(evaluations_of(read_state(latest)), settings)]
    best = best_checkpoints(checkpoints, steps, 1)
    return checkpoints / f"step-{best[0]:06d}" if best else None


@contextmanager
def in_stage(stage: str, *, mend: str = "") -> Iterator[None]:
    """Let errors say which stage they are of. mend: instead of their own."""
    try:
        yield
    except StropError as error:
        for one in {id(one): one for one in (*getattr(error, "problems", ()), error)}.values():
            one.what, one.mend = f"stage {stage}: {one.what}", mend or one.mend
        error.args = (error.block(),)
        raise


def _is_done(run: Path, config: Config) -> bool:
    """Whether the same command would train nothing more in a run."""
    checkpoint = latest_checkpoint(run / "checkpoints")
    if checkpoint is None or read_manifest(run).status != "finished":
        return False
    state = read_state(checkpoint)
    ended = stop_reason(evaluations_of(state), config.evaluation.early_stop)
    return bool(state["step"] >= config.run.steps or ended)


def _mend(stage: str) -> str:
    return (
        f"undo the change; or train the stage and those that use it anew with `--retrain {stage}`, or all in a new "
        "pipeline with --fresh"
    )
