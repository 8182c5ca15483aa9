"""Which step `--profile` records."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from strop.config import Config
from strop.errors import UserError
from strop.loops.lineage import run_name
from strop.tracking.run_directory import RunDirectory

DEFAULT = 3
"""Before it torch is still filling its caches."""
Asked = int | Literal["default"]
"""The number of a step, or the third one that this command trains (or the last, if they are fewer)."""


def step_to_profile(config: Config, asked: Asked, *, fresh: bool, recipe: str | None) -> int:
    """The step that is recorded, 1 for the first; looks at where the run would go on, and writes nothing.

    Raises:
        UserError: there is no such step, or it is done already.
    """
    steps = config.run.steps
    newest = None if fresh else RunDirectory.latest(config.run.folder, run_name(config, recipe))
    done = 0 if newest is None else _steps_done(newest)
    if done >= steps:
        raise UserError(
            f"all {steps} steps of this run are done, and none is left to profile",
            where="--profile",
            mend="raise run.steps to go on with it, or start a new run with --fresh",
        )
    if asked == "default":
        return min(done + DEFAULT, steps)
    if not 1 <= asked <= steps:
        raise UserError(
            f"the run has no step {asked}: its steps are 1 to {steps}",
            where=f"--profile {asked}",
            mend="name one of them, or leave the number out for the third",
        )
    if asked <= done:
        raise UserError(
            f"step {asked} of this run is done: it goes on behind step {done}",
            where=f"--profile {asked}",
            mend=f"name one of the steps {done + 1} to {steps}, or start a new run with --fresh",
        )
    return asked


def _steps_done(run: Path) -> int:
    # Not at the top of the file: this imports torch.
    from strop.training.checkpoint import latest_checkpoint, read_state

    checkpoint = latest_checkpoint(run / "checkpoints")
    return 0 if checkpoint is None else int(read_state(checkpoint)["step"])
