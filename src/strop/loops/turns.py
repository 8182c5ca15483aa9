"""Trainer and engine on one device, in turn: each gives its memory back while the other one works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from strop.loops.base_run import GIB
from strop.loops.place import Place
from strop.rollout.engine import Engine
from strop.rollout.journal import Journal


class Turns:
    """Whose turn it is.

        collect -> the engine sleeps -> the state comes back, update -> the state goes away -> the engine wakes, publish

    Where sampling goes on while the trainer computes, the engine only rests if it computes with the trainer's own
    module; and where each completion is to be of one version, those under way are waited for before weights change.

    Args:
        journal: the engine, as those see it who play episodes.
        engine_sleeps: let the engine sleep while the trainer computes (`rollout.engine.sleep`).
        trainer_offloads: keep the trainer's state in the CPU's memory while the engine samples (`training.offload`).
        ahead: sampling goes on beyond the step's window. shares_weights: see `Place`. in_flight: completions go on with
            new weights. note: is told what was done, from when until when, by `time.perf_counter()`.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        place: Place,
        *,
        engine_sleeps: bool,
        trainer_offloads: bool,
        ahead: bool = False,
        in_flight: bool = True,
        note: Callable[[str, float, float], None] = lambda phase, started, ended: None,
    ) -> None:
        self._engine, self._journal, self._place = engine, journal, place
        self._engine_sleeps, self._trainer_offloads = engine_sleeps, trainer_offloads
        self._rests = ahead and place.shares_weights
        self._one_version = ahead and not in_flight
        self._resting = False
        self._told = note
        self.asleep = False
        """Whether the engine sleeps. A publication has to come before it is asked for anything."""

    async def engine_done(self) -> dict[str, float]:
        """The trainer is next: the engine sleeps, or rests. Returns what that took, for the metrics."""
        if self._rests and not self._resting:
            if self._one_version:
                await self._journal.hold()
            await self._engine.pause()
            self._journal.rest()
            self._resting = True
        if not self._engine_sleeps or self.asleep:
            return {}
        before, started = _free(), time.perf_counter()
        await self._engine.sleep()
        self.asleep = True
        found = {"time/sleep": self._note("sleep", started)}
        return found if before is None else found | {"memory/engine_slept_gib": ((_free() or 0) - before) / GIB}

    async def publication_next(self) -> None:
        """New weights are about to be published."""
        if self._one_version:
            await self._journal.hold()

    async def published(self) -> None:
        """The engine serves the trainer's weights: it goes on with what it was asked for."""
        if self._resting:
            await self._engine.resume()
            self._resting = False
        self._journal.go_on()

    async def trainer_done(self, *trainers: Any) -> dict[str, float]:
        """The engine is next, and a publication before that: the trainers' state goes away, and the engine takes its
        memory, or that part which it does not take in the publication."""
        found: dict[str, float] = {}
        if self._trainer_offloads:
            started = time.perf_counter()
            moved = await self._place.aside(lambda: sum(trainer.offload() for trainer in trainers))
            found["time/offload"] = self._note("offload", started)
            found["memory/trainer_offloaded_gib"] = moved / GIB
        if self.asleep:
            started = time.perf_counter()
            await self._engine.wake()
            self.asleep = False
            found["time/wake"] = self._note("wake", started)
        return found

    def update_next(self, *trainers: Any) -> dict[str, float]:
        """The trainers' state comes back."""
        if not self._trainer_offloads:
            return {}
        started = time.perf_counter()
        for trainer in trainers:
            trainer.reload()
        return {"time/reload": self._note("reload", started)}

    def _note(self, phase: str, started: float) -> float:
        """Tell of something that has ended now; returns its seconds."""
        ended = time.perf_counter()
        self._told(phase, started, ended)
        return ended - started


def _free() -> int | None:
    """Bytes of this process's GPU that new tensors could have; None where it has not used one."""
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
