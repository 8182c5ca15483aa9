"""Runs that sample ahead: an engine apart from the trainer in one process, and what was trained: which prompts in which
steps, and how old their tokens were."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.loops.place import Here
from strop.tracking.episodes import EpisodeRecord, read_episodes
from strop.tracking.timeline import joined, read_timeline


def by_step(run: Path) -> dict[int, list[EpisodeRecord]]:
    return {
        int(path.stem[5:11]): list(read_episodes(path))
        for path in sorted((run / "episodes").glob("step-??????.parquet"))
    }


def trained(run: Path) -> list[tuple[int, int, str, int]]:
    """(step, group, prompt, completions) in order."""
    found = []
    for step, records in by_step(run).items():
        groups = {record.group: record.prompt_id for record in records}
        for group, prompt in sorted(groups.items()):
            samples = [record.sample for record in records if record.group == group]
            assert len(samples) == len(set(samples)), (step, group)
            found.append((step, group, prompt, len(samples)))
    return found


def ages(run: Path) -> list[int]:
    """How old each sampled token was when it was trained."""
    found: list[int] = []
    for step, records in by_step(run).items():
        for record in records:
            assert record.versions is not None
            found += (step - 1 - record.versions[record.loss_mask]).tolist()
    return found


def versions_of(run: Path) -> list[list[int]]:
    """Of each completion."""
    records = [record for records in by_step(run).values() for record in records]
    return [np.asarray(record.versions)[record.loss_mask].tolist() for record in records]


def clocked(run: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """From when until when something went on, by the clock on the wall, for each phase and lane of the timeline."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in read_timeline(run / "timeline.jsonl"):
        for span in line.spans:
            start = line.time + span.start
            found[span.phase, span.lane].append((start, start + span.seconds))
    return dict(found)


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Seconds that both have."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in joined(one) for c, d in joined(other))


def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainer compute in a thread, so that the event loop, and an engine on it, go on meanwhile."""

    async def aside(self: Here, work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

    monkeypatch.setattr(Here, "aside", aside)


def served_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine have weights of its own, so that evaluations go on beside training."""
    import copy

    from strop.loops import assembly, idle
    from strop.rollout.engine import WeightUpdate

    class Publisher(assembly.SharedPublisher):
        async def publish(self, trainer: Any, *, version: int) -> dict[str, float]:
            tensors = [(name, p.detach()) for name, p in trainer.model.named_parameters()]
            await self._engine.update_weights(WeightUpdate(version, tensors))
            return await super().publish(trainer, version=version)

    make = assembly.make_engine

    def apart(prepared: Any, roles: Any) -> Any:
        import dataclasses

        return make(prepared, dataclasses.replace(roles, model=copy.deepcopy(roles.model)))

    init = Here.__init__

    def elsewhere(self: Here, *given: Any) -> None:
        init(self, *given)
        self.shares_weights = False

    monkeypatch.setattr(Here, "__init__", elsewhere)
    # The recipe says that they are shared, which refuses `update_every`.
    monkeypatch.setattr(idle, "idle_ahead", lambda config: iter(()))
    monkeypatch.setattr(assembly, "make_engine", apart)
    monkeypatch.setattr(
        assembly,
        "make_publisher",
        lambda roles, engine: Publisher(engine, assembly.make_probe(roles.vocabulary, roles.dtype)),
    )
