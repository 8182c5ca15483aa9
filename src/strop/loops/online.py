"""Reinforcement learning: the loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.loops.prepare import prepare

if TYPE_CHECKING:
    from strop.loops.run import Run


@dataclass(frozen=True)
class TrainingSummary:
    """How a run ended. before, after: held-out scores by name; empty without `data.eval`."""

    folder: Path
    model: Path
    steps: int
    before: dict[str, float]
    after: dict[str, float]


def train(config: Config, *, fresh: bool = False, recipe: str | None = None) -> TrainingSummary:
    """Train, or go on where the newest run of this recipe stopped.

    Args:
        config: the recipe. fresh: start a new run instead of going on. recipe: its file, which names the run.

    Raises:
        UserError: something in the recipe cannot work; nothing was written.
        RunFailure: something failed while running; the last checkpoint is kept.
    """
    return _run_async(lambda: _train(config, fresh=fresh, recipe=recipe))


async def _train(config: Config, *, fresh: bool, recipe: str | None) -> TrainingSummary:
    async with open_run(config, fresh=fresh, recipe=recipe) as run:
        await run.begin()
        while run.step < config.run.steps:
            groups = await run.collect()
            batch = run.build_batch(groups)
            stats = run.update(batch)
            run.step += 1
            await run.publish()
            run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
        return TrainingSummary(run.folder, await run.finish(), run.step, run.before, run.after)


@asynccontextmanager
async def open_run(config: Config, *, fresh: bool = False, recipe: str | None = None) -> AsyncIterator[Run]:
    """A run with everything in memory, at the step it had reached. Leaving it closes files and gives the lock back."""
    prepared = prepare(config)
    # Not at the top of the file: this imports torch, which takes seconds, and a wrong path is found before.
    from strop.loops.run import Run

    run = await Run.open(prepared, fresh=fresh, recipe=recipe)
    try:
        yield run
    except BaseException as error:
        await run.close(error)
        raise
    else:
        await run.close(None)


def _run_async(work: Callable[[], Any]) -> Any:
    """Run a coroutine to its end, also from inside a notebook, whose own event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _terminated_as_interrupt():
            return asyncio.run(work())
    result: list[Any] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(work()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target, name="strop")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, so that it is noted as interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


__all__ = ["TrainingSummary", "open_run", "train"]
