"""What runs in the processes of a run: a rank of the trainer, and an engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.cluster.engine_host import EngineHost
from strop.config import Config
from strop.config.cluster import PublishingSettings
from strop.config.training import OptimizerSettings
from strop.loops import assembly
from strop.loops.critic import Critic, make_critic
from strop.loops.randomness import random_state, restore_random, settle
from strop.planning.flops import ModelWork
from strop.planning.hardware import Hardware, choose_hardware
from strop.publishing.receiver import Receiver
from strop.publishing.shared import SharedPublisher
from strop.publishing.sides import EngineSide, TrainerSide
from strop.publishing.transports.broadcast import BroadcastSender, BroadcastTaker, join_group
from strop.publishing.transports.delta import DeltaSender, DeltaTaker
from strop.publishing.transports.disk import DiskSender, DiskTaker
from strop.publishing.transports.ipc import IpcSender, IpcTaker
from strop.tracking.atomic import sync_file
from strop.training.parallel.choose import choose_ranks, join
from strop.training.parallel.ranks import Alone


@dataclass
class Task:
    """What of a prepared recipe a process needs: `assembly.Chosen`, and for a critic the algorithm."""

    config: Config
    longest: int
    needs_reference: bool
    scalar: bool
    algorithm: Any = None
    hardware: Hardware = None  # type: ignore[assignment]

    def settle(self) -> None:
        """Look at this process's hardware, and settle threads and seeds."""
        chosen = choose_hardware(self.config)
        self.hardware = replace(chosen, threads=torch.get_num_threads())
        settle(self)


@dataclass(frozen=True)
class Facts:
    """What the driver needs to know of a model that is elsewhere; see `assembly.Roles` and `Loaded`."""

    name: str
    fingerprint: str
    vocabulary: int
    parameters: str
    dtype: str
    device: str
    card: str
    work: ModelWork | None
    sizes: Any
    reasons: tuple[str, ...]


class RankHost:
    """One rank of the trainer; where it is colocated, with the engine.

    The driver asks all ranks alike and takes the first one's answer.
    """

    def __init__(self, task: Task, *, colocated: bool) -> None:
        self.task = task
        task.settle()
        device = task.hardware.device
        join(device)
        self.rank = int(os.environ.get("RANK", "0"))
        self.roles = assembly.load_roles(task, scalar=task.scalar)
        self._ranks, self._why = self._choose()
        self.trainer: Any = None
        self.critic: Critic | None = None
        self._side: TrainerSide | None = None
        self._held: dict[str, Callable[[Path], Any]] = {}
        self._divided = False
        self.engine: EngineHost | None = None
        self._publisher: SharedPublisher | None = None
        if colocated and self.rank == 0:
            engine = assembly.make_engine(task, self.roles)
            self.engine = EngineHost(engine)
            self._publisher = assembly.make_publisher(self.roles, engine)

    def facts(self) -> Facts:
        return facts_of(self.task, self.roles, self._why)

    # The trainer.

    def make_trainer(self, optimizer: OptimizerSettings, total_updates: int, reinforcement: bool) -> None:
        self._undivide()
        self.trainer = assembly.make_trainer(
            self.task,
            self.roles,
            optimizer,
            total_updates=total_updates,
            reinforcement=reinforcement,
            ranks=self._ranks,
        )
        self._divided = self._ranks.divided

    def make_supervised_trainer(self, scalar: bool, reference: bool) -> None:
        self.trainer = assembly.make_supervised_trainer(
            self.task, self.roles, scalar=scalar, reference=reference, ranks=self._ranks
        )

    def logprobs(self, batch: TokenBatch, role: str) -> Tensor:
        return self.trainer.logprobs(batch, role=role)

    def logprobs_and_values(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        return self.trainer.logprobs_and_values(batch)

    def update(self, batch: TokenBatch, objective: Any) -> tuple[dict[str, float], Tensor, Tensor | None]:
        """(metrics, `batch.extra["logprobs"]`, `batch.old_logprobs`) after an update."""
        stats = self.trainer.update(batch, objective)
        return stats, batch.extra["logprobs"], batch.old_logprobs

    def evaluate(self, batch: TokenBatch, objective: Any) -> dict[str, float]:
        return self.trainer.evaluate(batch, objective)

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return self.trainer.score(token_lists)

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return self.trainer.rounding(token_lists)

    def save(self, folder: Path) -> dict[str, Any]:
        state = self.trainer.save(folder)
        path = folder / f"random-{self.rank}-of-{self._ranks.world}.json"
        path.write_text(json.dumps(random_state()), encoding="utf-8")
        return state

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        self.trainer.load(folder, state)
        path = folder / f"random-{self.rank}-of-{self._ranks.world}.json"
        if path.exists():
            restore_random(json.loads(path.read_text(encoding="utf-8")))

    def export(self, folder: Path) -> None:
        self.trainer.export(self.roles.tokenizer, folder)

    def hold(self) -> None:
        """Keep copies of what `export` and `save` would write now, for `write_held`."""
        held, random = self.trainer.hold(self.roles.tokenizer), json.dumps(random_state())

        def save(folder: Path) -> dict[str, Any]:
            path = folder / f"random-{self.rank}-of-{self._ranks.world}.json"
            path.write_text(random, encoding="utf-8")
            sync_file(path)
            return held.save(folder)

        self._held = {"model": held.export, "state": save}

    def held_bytes(self) -> tuple[int, int]:
        needed, free = self.trainer.held_bytes()
        return needed + (0 if self.critic is None else self.critic.held_bytes()[0]), free

    async def write_held(self, what: str, folder: Path) -> Any:
        """Write what this rank holds, while the thread of the other calls may compute; it is not held any more then."""
        return await asyncio.to_thread(self._held.pop(what), folder)

    def offload(self) -> int:
        """Bytes of this rank's trainer and critic."""
        return self.trainer.offload() + (0 if self.critic is None else self.critic.offload())

    def reload(self) -> int:
        return self.trainer.reload() + (0 if self.critic is None else self.critic.reload())

    def close_trainer(self) -> None:
        self.trainer.close()

    def save_reference(self, run: Path) -> None:
        weights = dict(self.trainer.trained_weights()) if self._divided else dict(self.roles.model.named_parameters())
        if self.rank == 0:
            assembly.write_reference(run, weights)

    def restore_reference(self, run: Path) -> None:
        assembly.restore_reference(run, self.roles)

    # The critic, where it has a backbone of its own.

    def make_critic(self) -> None:
        whole = self.roles
        if self._divided:
            whole = self._whole_roles()
        own, _ = self._choose()
        made = make_critic(self.task, whole, self.trainer, ranks=own)  # type: ignore[arg-type]
        assert isinstance(made, Critic)
        self.critic = made

    def values(self, batch: TokenBatch) -> Tensor:
        assert self.critic is not None
        return self.critic.values(batch)

    def update_critic(self, batch: TokenBatch) -> dict[str, float]:
        assert self.critic is not None
        return self.critic.update(batch)

    def save_critic(self, folder: Path) -> dict[str, Any]:
        assert self.critic is not None
        return self.critic.trainer.save(folder)

    def hold_critic(self) -> None:
        assert self.critic is not None
        self._held["critic"] = self.critic.trainer.hold_state()

    def load_critic(self, folder: Path, state: dict[str, Any]) -> None:
        assert self.critic is not None
        self.critic.load(folder, state)

    # Publication.

    async def publish(self, version: int) -> dict[str, float]:
        """Make the engine in this process serve the trainer's weights; nothing where there is none."""
        return {} if self._publisher is None else await self._publisher.publish(self.trainer, version=version)

    def connect(
        self, settings: PublishingSettings, transport: str, meeting: tuple[str, int], size: int, folder: Path
    ) -> None:
        """Make the sending half of a transport. meeting: where a group of `size` processes meets."""
        if self._side is not None:
            self._side.close()
        half: Any = None
        device = self.task.hardware.device
        bucket, wait = settings.bucket_mb << 20, self.task.config.cluster.supervision.wait
        if self.rank == 0:
            if transport == "broadcast":
                group = _join(meeting, 0, size, device, wait)
                half = BroadcastSender(group, bucket_bytes=bucket, device=device)
            elif transport == "ipc":
                half = IpcSender(bucket_bytes=bucket, device=device, timeout=wait)
            elif transport == "disk":
                half = DiskSender(folder)
            else:
                half = DeltaSender()
        self._side = TrainerSide(lambda: self.trainer.trained_weights(), half, self)

    @property
    def side(self) -> TrainerSide:
        assert self._side is not None
        return self._side

    def _choose(self) -> tuple[Alone, str]:
        hardware = self.task.hardware
        return choose_ranks(
            self.task.config.cluster.trainer,
            self.roles.model,
            device=hardware.device,
            dtype=hardware.dtype,
            memory=hardware.memory,
        )

    def _undivide(self) -> None:
        """Have the whole model again, where an earlier trainer has divided it."""
        if not self._divided:
            return
        self.roles = self._whole_roles()
        self._ranks, self._why = self._choose()
        self._divided = False

    def _whole_roles(self) -> assembly.Roles:
        weights = dict(self.trainer.trained_weights())
        roles = assembly.load_roles(self.task, scalar=self.task.scalar)
        with torch.no_grad():
            for name, parameter in roles.model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        return roles


class EngineProcess:
    """An engine with a model of its own, and the taking half of a transport."""

    def __init__(self, task: Task, *, index: int) -> None:
        self.task = task
        task.settle()
        self.roles = assembly.load_roles(task)
        engine = assembly.make_engine(task, self.roles)
        self.engine = EngineHost(engine, f"engine {index}")
        self._engine = engine
        self._index = index
        # Frozen weights are those of the model's files, here as there.
        self._receiver = Receiver({name: p for name, p in self.roles.model.named_parameters() if p.requires_grad})
        self._side: EngineSide | None = None

    def facts(self) -> Facts:
        return facts_of(self.task, self.roles, "")

    def connect(self, settings: PublishingSettings, transport: str, meeting: tuple[str, int], size: int) -> None:
        """Make the taking half of a transport."""
        if self._side is not None:
            self._side.close()
        half: Any
        device = self.task.hardware.device
        wait = self.task.config.cluster.supervision.wait
        if transport == "broadcast":
            group = _join(meeting, self._index + 1, size, device, wait)
            half = BroadcastTaker(group, bucket_bytes=settings.bucket_mb << 20, device=device)
        elif transport == "ipc":
            half = IpcTaker(timeout=wait)
        else:
            half = DiskTaker() if transport == "disk" else DeltaTaker()
        self._side = EngineSide(self._engine, self._receiver, half)

    @property
    def side(self) -> EngineSide:
        assert self._side is not None
        return self._side


def make_rank(task: Task, colocated: bool) -> RankHost:
    """For `WorkerGroup.make`."""
    return RankHost(task, colocated=colocated)


def make_engine_process(task: Task, index: int) -> EngineProcess:
    """For `WorkerHandle.make`."""
    return EngineProcess(task, index=index)


def facts_of(task: Task, roles: assembly.Roles, why: str) -> Facts:
    return Facts(
        name=roles.loaded.name,
        fingerprint=roles.loaded.fingerprint,
        vocabulary=0 if task.scalar else roles.vocabulary,
        parameters=roles.parameters,
        dtype=roles.dtype,
        device=task.hardware.reasons[0],
        card=roles.card,
        work=roles.work,
        sizes=roles.sizes,
        reasons=(why,) if why else (),
    )


def _join(meeting: tuple[str, int], rank: int, size: int, device: torch.device, wait: float) -> Any:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return join_group(*meeting, rank=rank, size=size, backend=backend, timeout=wait, device=device)
