"""Reinforcement learning: the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.config import Config
from strop.loops.prepare import prepare

if TYPE_CHECKING:
    from strop.loops.run import Run


@dataclass(frozen=True)
class TrainingSummary:
    """How a run ended.

    model: folder of the model after the last step. before, after: held-out scores by name; empty without `data.eval`.
    best: folder of the best model by `checkpoint.best`. stopped: why the run ended before its last step.
    """

    folder: Path
    model: Path
    steps: int
    before: dict[str, float]
    after: dict[str, float]
    best: Path | None = None
    stopped: str = ""


async def train_online(
    config: Config, *, fresh: bool, recipe: str | None, profile: int | None = None
) -> TrainingSummary:
    """See `strop.train`."""
    async with open_run(config, fresh=fresh, recipe=recipe, profile=profile) as run:
        await run.begin()
        while not run.done:
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step += 1
            await run.publish()
            await run.look(groups)
            run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
        model = await run.finish()
        return TrainingSummary(run.folder, model, run.step, run.before, run.after, run.best, run.stopped)


@asynccontextmanager
async def open_run(
    config: Config, *, fresh: bool = False, recipe: str | None = None, profile: int | None = None
) -> AsyncIterator[Run]:
    """A run with everything in memory, at the step it had reached. Leaving it closes files and gives the lock back.

    Args:
        profile: a step to record, 1 for the first (`loops/profile.py`).
    """
    with prepare(config) as prepared:
        # Not at the top of the file: this imports torch, which takes seconds, and a wrong path is found before.
        from strop.loops.run import Run

        async with Run.opened(prepared, fresh=fresh, recipe=recipe) as run:
            if profile is not None:
                run.profile_step(profile)
            yield run


__all__ = ["TrainingSummary", "open_run", "train_online"]
