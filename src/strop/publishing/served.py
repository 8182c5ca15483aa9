"""Publication to servers that load weights themselves: the trainer writes them as a model's folder, each server loads
it, and each has to score the probe as the trainer does before anything more is sampled."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from strop.publishing.proof import Probe

T = TypeVar("T")
CAUSE = (
    "The server has loaded another model's weights than were written, keeps something that it had derived from older "
    "ones, or computes another model"
)


class LoadingEngine(Protocol):
    """An engine as this publisher sees it (`ServedEngine`)."""

    async def pause(self) -> None: ...

    async def load(self, folder: Path, version: int) -> None: ...

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]: ...

    async def resume(self) -> None: ...


class ServedPublisher:
    """Publishes versions through a folder.

    Args:
        engines: by the names that errors call them. probe: what trainer and engines score. folder: where versions are
            written, which servers see under the same name; the last one stays. tokenizer: written beside the weights.
        aside: runs what asks the trainer.
    """

    def __init__(
        self,
        engines: dict[str, LoadingEngine],
        probe: Probe,
        folder: Callable[[], Path],
        tokenizer: Any,
        aside: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._engines = engines
        self._probe = probe
        self._folder = folder
        self._tokenizer = tokenizer
        self._aside = aside
        self._before: Path | None = None

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """While the trainer's weights become those of a version; here nobody else reads them meanwhile."""
        yield

    async def publish(self, trainer: Any, *, version: int) -> dict[str, float]:
        """Make the servers serve `version`; returns metrics.

        Returns:
            publish/bytes: of the folder. publish/seconds: of everything, publish/probe_seconds included.
            publish/probe_gap: nats.

        Raises:
            RunFailure: a server did not take the weights, or does not serve them. All stay paused.
        """
        started = time.perf_counter()
        await self._each(lambda engine: engine.pause())
        target = self._folder().absolute() / f"version-{version:06d}"
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._aside(lambda: trainer.export(self._tokenizer, target))
        await self._each(lambda engine: engine.load(target, version))
        before = time.perf_counter()
        lists = self._probe.token_lists
        mine = await self._aside(lambda: trainer.score(lists))
        theirs = dict(zip(self._engines, await self._each(lambda engine: engine.score(lists)), strict=True))
        gap = await self._probe.judge(
            mine,
            theirs,
            rounding=lambda: self._aside(lambda: trainer.rounding(lists)),
            version=version,
            cause=CAUSE,
        )
        probed = time.perf_counter() - before
        await self._each(lambda engine: engine.resume())
        if self._before is not None and self._before != target:
            shutil.rmtree(self._before, ignore_errors=True)
        self._before = target
        return {
            "publish/version": float(version),
            "publish/bytes": float(sum(file.stat().st_size for file in target.rglob("*") if file.is_file())),
            "publish/seconds": time.perf_counter() - started,
            "publish/probe_seconds": probed,
            "publish/probe_gap": gap,
        }

    async def _each(self, ask: Callable[[LoadingEngine], Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*(ask(engine) for engine in self._engines.values())))
