"""Sampling ahead of training (`rollout.max_staleness`): when weights are published, and evaluations beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from strop.config import Config
from strop.errors import UserError
from strop.loops.spread import colocated

Scores = dict[str, float]


class Ahead:
    """What a run that samples ahead does otherwise than one that does not.

    An evaluation goes on beside training: it is of one version, so nothing is published until it has ended, or until
    the next step could not be sampled within the bound otherwise. Where its scores decide what comes next
    (`checkpoint.best`, `evaluation.early_stop`), or engine and trainer share their weights, it is waited for.

    Args:
        shares_weights: see `Place`.
    """

    def __init__(self, config: Config, *, shares_weights: bool) -> None:
        rollout = config.rollout
        self._every, self._bound = rollout.update_every, rollout.ahead
        decides = config.checkpoint.best is not None or config.evaluation.early_stop is not None
        self.evaluates_beside = self._bound > 0 and not shares_weights and not decides
        self._evaluating: asyncio.Task[Scores] | None = None
        self._step = 0

    def told(self, algorithm: Any) -> str:
        """What the display says of it; nothing where nothing is sampled ahead."""
        if not self._bound:
            return ""
        kind, high = getattr(algorithm, "correction", None), getattr(algorithm, "correction_high", None)
        bounded = "" if high is None else f" at {high:g}"
        weighed = f"weights of old tokens are corrected ({kind}{bounded})" if kind else "old tokens are not corrected"
        return f"up to {self._bound} steps ahead of training; {weighed}"

    def stays(self, step: int, *, served: int | None) -> bool:
        """Whether the weights that are served stay after a step, the first ones being those of step 0.

        The next window has groups of admission up to `served + rollout.ahead` steps.
        """
        if served is None or self._bound == 0 or step > served + self._bound:
            return False
        busy = self._evaluating is not None and not self._evaluating.done()
        return busy or step % self._every != 0

    @property
    def evaluating(self) -> int | None:
        """The step of the evaluation whose scores are still to come."""
        return None if self._evaluating is None else self._step

    def evaluate(self, step: int, work: Coroutine[Any, Any, Scores], note: Callable[[str, float, float], None]) -> None:
        """Begin an evaluation of the version that is served. note: is told from when until when it went on."""

        async def noted() -> Scores:
            started = time.perf_counter()
            found = await work
            note("evaluating", started, time.perf_counter())
            return found

        self._step = step
        self._evaluating = asyncio.get_running_loop().create_task(noted())

    async def evaluated(self) -> None:
        """Wait for the evaluation that is under way."""
        if self._evaluating is not None:
            await asyncio.wait({self._evaluating})

    def take(self) -> tuple[int, Scores] | None:
        """(step, scores) of an evaluation that has ended; None without one.

        Raises:
            Whatever it failed with.
        """
        if self._evaluating is None or not self._evaluating.done():
            return None
        done, self._evaluating = self._evaluating, None
        return self._step, done.result()

    async def close(self) -> None:
        """Give up what is under way."""
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.gather(self._evaluating, return_exceptions=True)


def idle_ahead(config: Config) -> Iterator[UserError]:
    """Settings of sampling ahead that would have no effect, or that cannot be met."""
    rollout = config.rollout
    if config.supervised is not None:
        return
    if config.offline is not None:
        if rollout.max_staleness:
            yield _idle("max_staleness", "with `offline`: nothing is sampled")
        return
    if rollout.max_staleness == 0:
        if not rollout.in_flight_updates:
            yield _idle("in_flight_updates", "with rollout.max_staleness: 0, where nothing is under way between steps")
        if rollout.engine.after_update != "auto":
            yield _idle("engine.after_update", "with rollout.max_staleness: 0, where nothing is under way then")
        if config.algorithm.correction.kind == "none" and not rollout.off_policy:
            yield UserError(
                "`algorithm.correction.kind: none` has no effect with rollout.max_staleness: 0, where nothing is "
                "corrected unless asked for",
                where="algorithm.correction.kind",
                mend="remove the line",
            )
        return
    if not rollout.in_flight_updates and rollout.engine.after_update != "auto":
        yield _idle("engine.after_update", "with rollout.in_flight_updates: false: nothing is under way at an update")
    shared = rollout.engine.kind == "local" and (config.cluster.kind == "local" or colocated(config))
    if rollout.update_every > 1 and shared:
        yield UserError(
            "the engine samples with the trainer's own weights here, which every update changes, so that "
            "`rollout.update_every` has no effect",
            where="rollout.update_every",
            mend="remove the line, or give the engine weights of its own (cluster.engines.placement: separate)",
        )
    if rollout.engine.kind == "vllm" and rollout.engine.after_update == "keep" and rollout.engine.prefix_caching:
        yield UserError(
            "vLLM cannot keep the keys and values of running completions and forget those of prompts",
            where="rollout.engine.after_update",
            mend="set rollout.engine.prefix_caching: false, or leave it on auto",
        )


def _idle(key: str, why: str) -> UserError:
    where = f"rollout.{key}"
    return UserError(f"`{where}` has no effect {why}", where=where, mend="remove the line")


__all__ = ["Ahead", "idle_ahead"]
