"""What `overlap.py` starts: a run, timed over some steps, whose parts sleep or are real.

`sleeping`: an engine that takes a while for each token and has so many places, and a trainer that takes a while for a
step, neither of which needs a processor; the loop, windows, admission, the journal, turns and records are the run's
own. `real`: a run of `cluster: ray`, nothing of which is replaced.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import measure
import numpy as np
from driver_overhead_side import IdleEngine, IdlePublisher, IdleTrainer

from strop.loops import place, run
from strop.rollout.engine import SampleRequest, SampleResult

CHARACTERS = string.digits + string.ascii_letters + " ,.+-*/=()"
PARTS = ("training", "scoring", "publishing", "alarms")

T = TypeVar("T")


class SleepingEngine(IdleEngine):
    """An engine with a place for each completion of one window, which takes `seconds` for a window."""

    def __init__(self, config: Any, seconds: float) -> None:
        rollout = config.rollout
        super().__init__(rollout.groups_per_step, rollout.group_size, rollout.max_new_tokens)
        self._places = asyncio.Semaphore(rollout.groups_per_step * rollout.group_size)
        self._seconds = seconds
        self._changes, self._served = [0.0], [0]

    async def update_weights(self, update: Any) -> int:
        self._changes.append(time.perf_counter())
        self._served.append(update.version)
        return int(await super().update_weights(update))

    async def generate(self, request: SampleRequest) -> SampleResult:
        async with self._places:
            begun = time.perf_counter()
            await asyncio.sleep(self._seconds)
        result = await super().generate(request)
        # Each token is of the version that was served when its turn came.
        times = begun + self._seconds * np.arange(len(result.tokens)) / len(result.tokens)
        versions = np.array(self._served, np.int32)[np.searchsorted(self._changes, times, side="right") - 1]
        return SampleResult(result.tokens, result.logprobs, versions, result.finish)

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        return {}


class SleepingTrainer(IdleTrainer):
    """A trainer that takes a while for a step."""

    def __init__(self, optimizer: Any, seconds: float) -> None:
        super().__init__(optimizer)
        self._seconds = seconds

    def update(self, batch: Any, objective: Any) -> dict[str, float]:
        time.sleep(self._seconds)
        return super().update(batch, objective)


class Publisher(IdlePublisher):
    """Tells the engine its version."""

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        yield


class Apart(place.Here):
    """Engine and trainer in this process, which do not share their weights and need no processor."""

    def __init__(self, prepared: Any, seconds: float) -> None:
        super().__init__(prepared, place.assembly.load_roles(prepared))
        self.shares_weights = False
        self._seconds = seconds

    async def aside(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def make_trainer(self, optimizer: Any, **sizes: Any) -> Any:
        return SleepingTrainer(optimizer, self._seconds)

    def make_engine(self) -> Any:
        return SleepingEngine(self._prepared.config, self._seconds)

    def make_publisher(self, engine: Any) -> Any:
        return Publisher(engine)


def problems(count: int, length: int) -> list[dict[str, str]]:
    """Prompts of equal length."""
    return [{"prompt": f"{number:>{length - 1}}=", "answer": str(number)} for number in range(count)]


def parity(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing."""
    return [float(len(text) % 2) for text in completions]


def recipe(job: dict[str, Any], folder: str) -> Any:
    """The job as a recipe; what it does not say is strop's default."""
    from strop.config import Config

    sizes = job["sizes"]
    cluster: dict[str, Any] = {"kind": "local"}
    if job["kind"] == "real":
        cluster = {"kind": "ray", "engines": {"placement": job["placement"]}}
    data: dict[str, Any] = {
        "model": {
            "create": {
                "characters": CHARACTERS, "hidden_size": sizes["width"], "layers": sizes["layers"],
                "heads": max(2, sizes["width"] // 32), "context": sizes["prompt"] + sizes["tokens"],
            }
        },
        "data": {
            "train": {
                "path": "overlap_side:problems",
                "arguments": {"count": 2 * sizes["groups"], "length": sizes["prompt"]},
            }
        },
        "rewards": {"verifiers": [{"kind": "python", "function": "overlap_side:parity"}]},
        "rollout": {
            "groups_per_step": sizes["groups"], "group_size": sizes["size"], "max_new_tokens": sizes["tokens"],
            "max_staleness": job["staleness"],
        },
        "training": {"epochs": sizes["epochs"], "optimizer": {"learning_rate": 1e-6}},
        "checkpoint": {"every": 1_000_000, "in_background": False},
        "tracking": {"display": "off", "tensorboard": False},
        # The closing checkpoint belongs to no step; and the last steps, ahead of which nothing is left to be sampled,
        # are not measured either.
        "run": {"steps": job["skipped"] + job["steps"] + job["staleness"] + 1, "folder": folder},
        "hardware": {"device": "cpu", "threads": job["threads"]},
        "cluster": cluster,
    }  # fmt: skip
    return Config.model_validate(data)


async def steps(config: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Of the steps that are measured: seconds of the clock, tokens, and the means of what the run says of them."""
    from strop.loops.online import open_run

    if job["kind"] == "sleeping":

        async def find(prepared: Any, *, scalar: bool = False) -> Any:
            return Apart(prepared, job["seconds"])

        run.find_place = find
    told: list[dict[str, float]] = []
    started = 0.0
    async with open_run(config, fresh=True) as going:
        await going.begin()
        for step in range(job["skipped"] + job["steps"]):
            if step == job["skipped"]:
                started = time.perf_counter()
            groups = await going.collect()
            batch = await going.build_batch(groups)
            stats = await going.update(batch)
            going.step += 1
            await going.publish()
            await going.look(groups)
            metrics = going.record(groups, batch, stats)
            await going.evaluate_and_save_if_due()
            if step >= job["skipped"]:
                told.append(metrics)
        seconds = time.perf_counter() - started
    return account(told, seconds)


def account(told: list[dict[str, float]], seconds: float) -> dict[str, Any]:
    """What became of the seconds of these steps.

    The trainer's side of a step is what it waits for (`bubble/trainer`) and what it does; `unexplained` is the rest of
    the clock's seconds.
    """

    def mean(key: str) -> float:
        return statistics.fmean(metrics.get(key, 0.0) for metrics in told)

    step = seconds / len(told)
    parts = {part: mean(f"time/{part}") for part in PARTS}
    waited = mean("time/sampling") + mean("time/verifying")
    return {
        "seconds_of_a_step": step,
        "tokens_per_second": sum(metrics["tokens/sampled"] for metrics in told) / seconds,
        "seconds": {"waited for the window": waited, **parts, "unexplained": step - waited - sum(parts.values())},
        "bubble/trainer": mean("bubble/trainer"),
        "bubble/engine": mean("bubble/engine"),
        "staleness/mean": mean("staleness/mean"),
        "staleness/max": max(metrics["staleness/max"] for metrics in told),
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(steps(recipe(job, folder), job))


if __name__ == "__main__":
    # Under its own name: Ray's processes import this module, and what they send must be of the same classes.
    import overlap_side as own

    measure.tell(own.main(json.loads(sys.argv[1])))
