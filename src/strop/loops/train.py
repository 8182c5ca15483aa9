"""Training by whatever method a recipe asks for, or stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from strop.config import Config
from strop.config.pipeline import PipelineConfig
from strop.errors import RunFailure, UserError
from strop.loops.event_loop import run_to_end
from strop.loops.lineage import run_name
from strop.loops.online import TrainingSummary, train_online
from strop.loops.profile_step import Asked, step_to_profile
from strop.loops.supervised import train_supervised
from strop.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from strop.cluster.supervision import WorkerLost
    from strop.loops.pipeline import PipelineSummary


@overload
def train(
    config: Config, *, fresh: bool = False, recipe: str | None = None, profile: Asked | None = None
) -> TrainingSummary: ...


@overload
def train(
    config: PipelineConfig, *, fresh: bool = False, recipe: str | None = None, retrain: Sequence[str] = ()
) -> PipelineSummary: ...


@overload
def train(
    config: Config | PipelineConfig,
    *,
    fresh: bool = False,
    recipe: str | None = None,
    retrain: Sequence[str] = (),
    profile: Asked | None = None,
) -> TrainingSummary | PipelineSummary: ...


def train(
    config: Config | PipelineConfig,
    *,
    fresh: bool = False,
    recipe: str | None = None,
    retrain: Sequence[str] = (),
    profile: Asked | None = None,
) -> TrainingSummary | PipelineSummary:
    """Train, or go on where the newest run of this recipe, or the newest pipeline, stopped.

    Args:
        config: the recipe or pipeline. fresh: start a new one instead of going on. recipe: its file, which names it.
        retrain: stages of a pipeline to train anew, with all that use what they make.
        profile: the step of a run to record (docs/performance.md), or "default"; None records none.

    Raises:
        UserError: something in the recipe cannot work; nothing was written.
        RunFailure: something failed while running; the last checkpoint is kept.
    """
    if isinstance(config, PipelineConfig):
        from strop.loops.pipeline import train_pipeline

        if profile is not None:
            what = "a pipeline is several runs, and a profile is of one"
            mend = "train a stage by a recipe of its own with --profile"
            raise UserError(what, where="--profile", mend=mend)
        return train_pipeline(config, fresh=fresh, recipe=recipe, retrain=retrain)
    if retrain:
        what = f"there is no stage {retrain[0]!r}: this recipe is not a pipeline"
        raise UserError(what, where=f"--retrain {retrain[0]}", mend="leave it out; --fresh starts a new run")
    return train_run(config, fresh=fresh, recipe=recipe, profile=profile)


def train_run(config: Config, *, fresh: bool, recipe: str | None, profile: Asked | None = None) -> TrainingSummary:
    """Train one recipe to its end; see `train`."""
    loop: Callable[..., Coroutine[Any, Any, TrainingSummary]] = (
        train_online if config.supervised is None else train_supervised
    )
    if profile is not None:
        loop = partial(loop, profile=step_to_profile(config, profile, fresh=fresh, recipe=recipe))
    if config.cluster.kind == "local":
        return run_to_end(lambda: loop(config, fresh=fresh, recipe=recipe))
    return run_to_end(lambda: _whatever_is_lost(loop, config, fresh=fresh, recipe=recipe))


async def _whatever_is_lost(loop: Any, config: Config, *, fresh: bool, recipe: str | None) -> TrainingSummary:
    """Go on from the last checkpoint when a process is lost, `cluster.supervision.restarts` times."""
    from strop.cluster.supervision import RESTARTS, Restarts, show_on_stderr

    restarts = Restarts(config.cluster.supervision)
    RESTARTS.set(restarts)
    folder, name = config.run.folder, run_name(config, recipe)
    newest = RunDirectory.latest(folder, name)
    while True:
        try:
            summary: TrainingSummary = await loop(config, fresh=fresh, recipe=recipe)
            return summary
        except RunFailure as failure:
            loss = _loss_behind(failure)
            if loss is None:
                raise
            left = restarts.set_back(loss)
            # What was lost before it had a folder is not what is there under its name.
            fresh = fresh and RunDirectory.latest(folder, name) == newest
            show_on_stderr(f"{loss.what}\n  going on from the last checkpoint; {left} more such losses are mended")


def _loss_behind(failure: BaseException | None) -> WorkerLost | None:
    """The loss of a process; who was waiting for it may have said what could not be done without it."""
    from strop.cluster.supervision import WorkerLost

    while failure is not None and not isinstance(failure, WorkerLost):
        failure = failure.__cause__
    return failure


__all__ = ["TrainingSummary", "train", "train_run"]
