"""Learning from examples: the loop of supervised fine-tuning, preference optimisation and reward models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from strop.config import Config
from strop.loops.online import TrainingSummary
from strop.loops.prepare_examples import prepare_examples

if TYPE_CHECKING:
    from strop.loops.supervised_run import SupervisedRun


async def train_supervised(
    config: Config, *, fresh: bool, recipe: str | None, profile: int | None = None
) -> TrainingSummary:
    """See `strop.train`."""
    async with open_supervised_run(config, fresh=fresh, recipe=recipe, profile=profile) as run:
        await run.begin()
        while not run.done:
            # Where an interrupt is seen: between steps, never within one.
            await asyncio.sleep(0)
            batch = await run.next_batch()
            stats = await run.update(batch)
            run.step += 1
            run.record(batch, stats)
            await run.evaluate_and_save_if_due()
        model = await run.finish()
        return TrainingSummary(run.folder, model, run.step, run.before, run.after, run.best, run.stopped)


@asynccontextmanager
async def open_supervised_run(
    config: Config, *, fresh: bool = False, recipe: str | None = None, profile: int | None = None
) -> AsyncIterator[SupervisedRun]:
    """A run with everything in memory, at the step it had reached. Leaving it closes files and gives the lock back.

    Args:
        profile: a step to record, 1 for the first (`loops/profile.py`).
    """
    prepared = prepare_examples(config)
    # Not at the top of the file: this imports torch, which takes seconds, and a wrong path is found before.
    from strop.loops.supervised_run import SupervisedRun

    async with SupervisedRun.opened(prepared, fresh=fresh, recipe=recipe) as run:
        if profile is not None:
            run.profile_step(profile)
        yield run
