"""Publication to engines in processes of their own: move, compare, probe, and only then let them go on.

    pause all | offer -> deliver | take -> verify all | probe the trainer -> probe all -> commit all -> resume all

An engine serves a version only when all engines hold it and it is proved for all. If anything fails, the engines stay
paused, and the error says which one and which tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from strop.errors import RunFailure
from strop.publishing.manifest import NAMED, Fault, Manifest, told
from strop.publishing.proof import Probe
from strop.publishing.sides import Delivered
from strop.publishing.transports.protocol import Offer

T = TypeVar("T")

CAUSE = (
    "All tensors are what was sent, so something that was derived from older weights is stale (packed weights, merged "
    "adapters, caches), or the engine computes another model"
)
# Seconds in which others may fail too after one has.
GRACE = 2.0
MEND = "the run stops so that nothing is trained on samples of other weights; resume from the checkpoint"


class PublishingTrainer(Protocol):
    """The trainer as the publisher sees it (`TrainerSide`, or a handle of one in another process)."""

    async def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer: ...

    async def deliver(self) -> Delivered: ...

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]: ...

    async def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]: ...


class PublishedEngine(Protocol):
    """An engine as the publisher sees it (`EngineSide`, or a handle of one in another process)."""

    async def pause(self) -> None: ...

    async def take(self, offer: Offer) -> None: ...

    async def verify(self, manifest: Manifest) -> list[Fault]: ...

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]: ...

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...


class Publisher:
    """Publishes versions, one at a time.

    Args:
        probe: what trainer and engines score. wait: most seconds for each of the steps; None for no limit.
    """

    def __init__(self, probe: Probe, *, wait: float | None = None) -> None:
        self._probe = probe
        self._wait = wait

    async def publish(
        self,
        trainer: PublishingTrainer,
        engines: Mapping[str, PublishedEngine],
        *,
        version: int,
        whole: bool = False,
    ) -> dict[str, float]:
        """Make all engines serve `version`; returns metrics.

        Args:
            engines: by the names that errors call them.
            whole: some engine does not hold the version before this one (it was started anew, or failed).

        Returns:
            publish/bytes: moved to each engine. publish/checksum_seconds: of the trainer's checksums and of the slowest
            engine's. publish/probe_seconds: what the probe adds, from when all engines are compared until all scores
            are, and what rounding does where it is asked; the trainer begins with its own while engines compare.
            publish/seconds: of everything, checksum_seconds and probe_seconds included. publish/probe_gap: nats.

        Raises:
            RunFailure: an engine does not hold or serve the version, or something was lost; engines stay paused.
        """
        started = time.perf_counter()

        async def every(step: str, call: Callable[[PublishedEngine], Awaitable[T]]) -> dict[str, T]:
            calls = {f"engine {name}": _as_coroutine(call(engine)) for name, engine in engines.items()}
            return await self._all(step, calls)

        # The offer only announces, so that nothing moves before all are paused.
        begun: dict[str, Coroutine[Any, Any, Any]] = {
            f"engine {name}": _as_coroutine(engine.pause()) for name, engine in engines.items()
        }
        begun["the trainer"] = _as_coroutine(trainer.offer(version, takers=len(engines), whole=whole))
        offer: Offer = (await self._all("pausing and announcing", begun))["the trainer"]
        delivered = await self._move(trainer, engines, offer)
        manifest = delivered.manifest
        lists = self._probe.token_lists
        # Nothing that engines do has a bearing on the trainer's scores.
        scoring = asyncio.ensure_future(self._all("probing", {"the trainer": _as_coroutine(trainer.score(lists))}))
        tasks: list[asyncio.Future[Any]] = [scoring]
        try:
            before = time.perf_counter()
            found = await every("comparing", lambda engine: engine.verify(manifest))
            compared = time.perf_counter() - before
            _refuse({name: faults for name, faults in found.items() if faults}, version, len(manifest.entries))

            before = time.perf_counter()
            tasks.append(asyncio.ensure_future(every("probing", lambda engine: engine.score(lists))))
            mine, theirs = await asyncio.gather(*tasks)
        except Exception:
            # Ranks that score together would meet in half of it whatever they are asked next.
            await asyncio.wait([scoring])
            raise
        finally:
            _leave(tasks)
        named = {name.removeprefix("engine "): scores for name, scores in theirs.items()}

        async def rounding() -> list[np.ndarray]:
            asked = {"the trainer": _as_coroutine(trainer.rounding(lists))}
            return (await self._all("measuring the rounding", asked))["the trainer"]

        gap = await self._probe.judge(mine["the trainer"], named, rounding=rounding, version=version, cause=CAUSE)
        probed = time.perf_counter() - before

        await every("committing", lambda engine: engine.commit(version))
        await every("resuming", lambda engine: engine.resume())
        return {
            "publish/version": float(version),
            "publish/bytes": float(delivered.moved),
            "publish/seconds": time.perf_counter() - started,
            "publish/checksum_seconds": manifest.checksum_seconds + compared,
            "publish/probe_seconds": probed,
            "publish/probe_gap": gap,
        }

    async def _move(
        self, trainer: PublishingTrainer, engines: Mapping[str, PublishedEngine], offer: Offer
    ) -> Delivered:
        def takes(of: Offer) -> dict[str, Coroutine[Any, Any, Any]]:
            return {f"engine {name}": _as_coroutine(engine.take(of)) for name, engine in engines.items()}

        deliver: dict[str, Coroutine[Any, Any, Any]] = {"the trainer": _as_coroutine(trainer.deliver())}
        if offer.streams:
            done = await self._all("moving", deliver | takes(offer))
        else:
            done = await self._all("writing", deliver)
            await self._all("taking", takes(done["the trainer"].offer))
        delivered: Delivered = done["the trainer"]
        return delivered

    async def _all(self, step: str, calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Run all at once; a failure is raised soon, with the names of all who failed."""
        tasks = {asyncio.ensure_future(call): name for name, call in calls.items()}
        try:
            done, pending = await asyncio.wait(tasks, timeout=self._wait, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(_error(task) for task in done):
                # One failure makes others fail; which is the cause must not depend on who was first to say so.
                done, pending = await asyncio.wait(tasks, timeout=GRACE)
        except BaseException:
            _leave(tasks)
            raise
        _leave(pending)
        failed = {name: error for task, name in tasks.items() if task in done and (error := _error(task))}
        if failed:
            told_of = ". ".join(
                f"In {name}: {error.what if isinstance(error, RunFailure) else f'{type(error).__name__}: {error}'}"
                for name, error in list(failed.items())[:NAMED]
            )
            more = f", and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
            first = next(iter(failed.values()))
            mend = first.mend if isinstance(first, RunFailure) and first.mend else MEND
            raise RunFailure(f"publishing weights failed at {step}. {told_of}{more}", mend=mend) from first
        if pending:
            late = ", ".join(sorted(tasks[task] for task in pending))
            raise RunFailure(f"publishing weights: no answer from {late} within {self._wait:g} s of {step}", mend=MEND)
        return {name: task.result() for task, name in tasks.items()}


def _refuse(found: Mapping[str, Sequence[Fault]], version: int, count: int) -> None:
    if not found:
        return
    texts = [f"{name}: {len(faults)} of {count} tensors: {told(faults)}" for name, faults in found.items()]
    raise RunFailure(f"version {version} of the weights did not arrive as it was sent. {'. '.join(texts)}", mend=MEND)


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return asyncio.CancelledError("given up") if task.cancelled() else task.exception()


def _leave(tasks: Any) -> None:
    """Stop waiting for tasks; what they raise from now on is of no interest."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _as_coroutine(call: Awaitable[T]) -> T:
    return await call
