"""What `driver_overhead.py` starts: a real run whose engine and trainer answer at once, timed verb by verb.

The engine returns completions that were prepared, the trainer log-probabilities that were; nothing else is replaced.
With `ray` both are hosted as they always are, and what they are asked and answer travels as it always does.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch

from strop.cluster.engine_host import EngineHost
from strop.loops import place, processes, rank_host, run
from strop.rollout.engine import EngineStats, SampleRequest, SampleResult, WeightUpdate

CHARACTERS = string.digits + string.ascii_letters + " ,.+-*/=()"
PROMPT = 32
PARTS = ("whole", "collect", "build_batch", "update", "publish", "look", "record", "evaluate_and_save")


class IdleEngine:
    """An engine whose completions are there before anybody asks for them."""

    def __init__(self, groups: int, size: int, tokens: int) -> None:
        draw = np.random.default_rng(0)
        self._groups, self._tokens, self._version = groups, tokens, 0
        self._versions = np.zeros(tokens, dtype=np.int32)
        kinds = len(CHARACTERS)
        self._prepared = [
            [
                (
                    draw.integers(kinds, size=tokens).astype(np.int32),
                    np.log(draw.uniform(0.01, 0.99, size=tokens)).astype(np.float32),
                )
                for _ in range(size)
            ]
            for _ in range(groups)
        ]

    def answer(self, request: SampleRequest) -> SampleResult:
        group, sample = request.stream[:2]
        tokens, logprobs = self._prepared[group % self._groups][sample]
        return SampleResult(tokens, logprobs, self._versions, "length")

    async def generate(self, request: SampleRequest) -> SampleResult:
        return self.answer(request)

    async def update_weights(self, update: WeightUpdate) -> int:
        self._version = update.version
        self._versions = np.full(self._tokens, self._version, dtype=np.int32)
        return self._version

    def take_stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass


class EngineAtOnce(IdleEngine):
    """The same of whole groups."""

    async def generate_all(self, requests: Sequence[SampleRequest], ended: Callable[[int, SampleResult], None]) -> None:
        for at, request in enumerate(requests):
            ended(at, self.answer(request))


class IdleTrainer:
    """A trainer that has computed everything before."""

    def __init__(self, optimizer: Any) -> None:
        self._values = torch.zeros(0)

    def logprobs(self, batch: Any, *, role: str) -> torch.Tensor:
        size = len(batch.input_ids)
        if len(self._values) != size:
            self._values = -torch.rand(size, generator=torch.Generator().manual_seed(0))
        return self._values

    def update(self, batch: Any, objective: Any) -> dict[str, float]:
        batch.extra["logprobs"] = self.logprobs(batch, role="policy")
        return {"loss": 0.0, "grad_norm": 0.0}

    def save(self, directory: Path) -> dict[str, Any]:
        return {}

    def export(self, tokenizer: Any, folder: Path) -> None:
        folder.mkdir(parents=True)

    def close(self) -> None:
        pass


class IdlePublisher:
    """Tells the engine which version it serves, and nothing else."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        yield

    async def publish(self, trainer: Any, *, version: int) -> dict[str, float]:
        await self._engine.update_weights(WeightUpdate(version))
        return {}


class IdleHere(place.Here):
    """`local`: both in this process."""

    def make_trainer(self, optimizer: Any, **sizes: Any) -> Any:
        return IdleTrainer(optimizer)

    def make_engine(self) -> Any:
        return engine_for(self._prepared.config)

    def make_publisher(self, engine: Any) -> Any:
        return IdlePublisher(engine)


class IdleRank(rank_host.RankHost):
    """`ray`: both in one actor, as a colocated engine is."""

    def __init__(self, task: Any, *, colocated: bool) -> None:
        super().__init__(task, colocated=colocated)
        engine = engine_for(task.config)
        self.engine = EngineHost(engine)
        self._publisher = IdlePublisher(engine)  # type: ignore[assignment]

    def make_trainer(self, optimizer: Any, total_updates: int, reinforcement: bool) -> None:
        self.trainer = IdleTrainer(optimizer)


def engine_for(config: Any) -> Any:
    rollout = config.rollout
    return EngineAtOnce(rollout.groups_per_step, rollout.group_size, rollout.max_new_tokens)


def make_rank(task: Any, colocated: bool) -> IdleRank:
    """For `WorkerGroup.make`."""
    return IdleRank(task, colocated=colocated)


async def find_idle_place(prepared: Any, *, scalar: bool = False) -> Any:
    """Stands in for `strop.loops.place.find_place`."""
    if prepared.config.cluster.kind == "ray":
        processes.HOST = Path(__file__).stem
        return await processes.Processes.start(prepared, scalar=scalar)
    return IdleHere(prepared, place.assembly.load_roles(prepared, scalar=scalar))


def problems(count: int) -> list[dict[str, str]]:
    """Prompts of equal length."""
    return [{"prompt": f"{number:>{PROMPT - 1}}=", "answer": str(number)} for number in range(count)]


def coin(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing."""
    return [float(text[0] < "V") for text in completions]


def recipe(job: dict[str, Any], folder: str) -> Any:
    """The job as a recipe; what it does not say is strop's default."""
    from strop.config import Config

    name = Path(__file__).stem
    return Config.model_validate(
        {
            "model": {
                "create": {
                    "characters": CHARACTERS, "hidden_size": 16, "layers": 1, "heads": 2,
                    "context": PROMPT + job["tokens"],
                }
            },
            "data": {"train": {"path": f"{name}:problems", "arguments": {"count": job["groups"]}}},
            "rewards": {"verifiers": [{"kind": "python", "function": f"{name}:coin"}]},
            "rollout": {
                "groups_per_step": job["groups"], "group_size": job["size"], "max_new_tokens": job["tokens"],
            },
            "checkpoint": {"every": 1_000_000, "in_background": False},
            "tracking": {"episodes_every": job["episodes_every"]},
            # One more than is done: the closing checkpoint belongs to no step.
            "run": {"steps": job["skipped"] + job["steps"] + 1, "folder": folder},
            "hardware": {"device": "cpu", "threads": job["threads"]},
            "cluster": {"kind": job["kind"]},
        }
    )  # fmt: skip


@asynccontextmanager
async def timed(seconds: dict[str, float], part: str) -> AsyncIterator[None]:
    started, busy = time.perf_counter(), time.process_time()
    yield
    seconds[part], seconds[f"cpu of {part}"] = time.perf_counter() - started, time.process_time() - busy


async def steps(config: Any, job: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each part of each step that is measured, and of this process's cores in it ("cpu of ..."), those of
    its threads included."""
    from strop.loops.online import open_run

    run.find_place = find_idle_place
    found: dict[str, list[float]] = {name: [] for part in PARTS for name in (part, f"cpu of {part}")}
    profile = cProfile.Profile()
    async with open_run(config, fresh=True) as going:
        await going.begin()
        for step in range(job["skipped"] + job["steps"]):
            measured = step >= job["skipped"]
            if measured and job["profile"]:
                profile.enable()
            seconds: dict[str, float] = {}
            async with timed(seconds, "whole"):
                async with timed(seconds, "collect"):
                    groups = await going.collect()
                async with timed(seconds, "build_batch"):
                    batch = await going.build_batch(groups)
                async with timed(seconds, "update"):
                    stats = await going.update(batch)
                going.step += 1
                async with timed(seconds, "publish"):
                    await going.publish()
                async with timed(seconds, "look"):
                    await going.look(groups)
                async with timed(seconds, "record"):
                    going.record(groups, batch, stats)
                async with timed(seconds, "evaluate_and_save"):
                    await going.evaluate_and_save_if_due()
            profile.disable()
            if measured:
                for name, values in found.items():
                    values.append(seconds[name])
    if job["profile"]:
        profile.dump_stats(job["profile"])
    return found


def main(job: dict[str, Any]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(steps(recipe(job, folder), job))


if __name__ == "__main__":
    # Under its own name: Ray's processes import this module, and what they send must be of the same classes.
    import driver_overhead_side as own

    measure.tell(own.main(json.loads(sys.argv[1])))
