"""The trainer's ranks, the engines and the environments' workers of a run as Ray actors."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.group import WorkerGroup
from strop.cluster.handle import WorkerHandle
from strop.cluster.placement import Device, Placement, asks, place
from strop.cluster.remote_engine import RemoteEngine
from strop.cluster.router import EngineRouter
from strop.cluster.session import Session, open_session
from strop.cluster.supervision import Supervisor, WorkerLost, local_node, show_on_stderr
from strop.config import Config
from strop.config.cluster import ClusterSettings
from strop.config.training import OptimizerSettings
from strop.loops import assembly
from strop.loops.critic import Critic, SharedCritic
from strop.loops.engine_choices import served
from strop.loops.environment_workers import check_workers, choose_workers, environments_in
from strop.loops.prepare import Prepared
from strop.loops.prepare_examples import PreparedExamples
from strop.loops.rank_host import Facts, Task
from strop.loops.remote_publisher import RemotePublisher
from strop.loops.remote_trainer import Asked, RemoteCritic, RemoteTrainer
from strop.loops.spread import device_of, engines_apart, settled
from strop.models.load import Loaded
from strop.rollout.engine import Engine
from strop.rollout.together import cancel
from strop.rollout.world import World
from strop.tracking.load import Elsewhere
from strop.training.parallel.choose import check_ranks

T = TypeVar("T")
HOST = "strop.loops.rank_host"
PROBE = "strop.tracking.load_probe:LoadProbe"


class RemoteRoles(assembly.Roles):
    """What is known here of a model that is in other processes."""

    def __init__(self, loaded: Loaded, facts: Facts) -> None:
        super().__init__(loaded, None, facts.sizes)
        self._facts = facts
        self.work = facts.work

    @property
    def vocabulary(self) -> int:
        return self._facts.vocabulary

    @property
    def parameters(self) -> str:
        return self._facts.parameters

    @property
    def dtype(self) -> str:
        return self._facts.dtype

    @property
    def card(self) -> str:
        return self._facts.card


class Processes:
    """Where everything is that computes. `start` makes it.

    engines: the group of the engines; None where the engine is with the first trainer rank, or there is none.
    environments: that of the environments' workers; None where environments are here, or there are none.
    """

    def __init__(
        self, prepared: Any, config: Config, session: Session, supervisor: Supervisor, placement: Placement, logs: Path
    ) -> None:
        self._prepared, self._config = prepared, config
        self._session, self._supervisor, self._placement = session, supervisor, placement
        self._logs = logs
        self._settings: ClusterSettings = config.cluster
        self._loop = asyncio.get_running_loop()
        self._run = logs
        self._device: Device = "cpu"
        self.reasons: tuple[str, ...] = ()
        self.trainers: WorkerGroup
        self.engines: WorkerGroup | None = None
        self.environments: WorkerGroup | None = None
        self.world: World | None = getattr(prepared, "world", None)
        self.roles: assembly.Roles
        self.shares_weights = False
        self._publisher: RemotePublisher | None = None
        self._starts: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def start(cls, prepared: Prepared | PreparedExamples, *, scalar: bool) -> Processes:
        """Find room, start the processes and load the model in each.

        Raises:
            UserError: there is no room, or something does not go together. MissingExtra: Ray is not installed.
            WorkerLost, StropError: a process did not come up.
        """
        config = prepared.config
        settings = config.cluster
        check_ranks(config)
        world: World | None = getattr(prepared, "world", None)
        check_workers(config, world)
        asked = settings.environments.workers if world is not None else 0
        count = settings.trainer.ranks + engines_apart(config)
        session = open_session(settings.address, cpus=count + (0 if asked == "auto" else asked))
        supervisor = Supervisor(settings.supervision)
        logs = Path(tempfile.mkdtemp(prefix=".starting-", dir=_made(Path(config.run.folder))))
        device, why = device_of(config, prepared.hardware.device.type, session.gpus())
        config, apart = settled(config, device, session.gpus())
        engines = engines_apart(config)
        count = settings.trainer.ranks + engines
        together = engines == 0 and config.supervised is None and not served(config)
        # One is the driver's.
        environments, where = choose_workers(config, world, session.free_cpus() - count - 1)
        wanted = asks(
            ranks=settings.trainer.ranks,
            engines=max(1, engines),
            colocated=engines == 0,
            device=device,
            environments=environments,
            tensor=config.rollout.engine.tensor,
        )
        placement = Placement({}, [])
        self = None
        try:
            placement = await place(wanted, wait=settings.supervision.wait)
            self = cls(prepared, config, session, supervisor, placement, logs)
            self._device, self.reasons = device, (*why, *apart, *where)
            await self._start(scalar=scalar, together=together, engines=engines)
        except BaseException:
            if self is None:
                await asyncio.to_thread(_end, supervisor, placement, session, logs)
            else:
                await self.close()
            raise
        return self

    async def aside(self, work: Callable[[], T]) -> T:
        """In a thread, so that the event loop can wait for the processes."""
        return await asyncio.to_thread(work)

    def settle_in(self, run: Path) -> None:
        """Move the logs to the run's folder."""
        target = run / "logs"
        target.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in target.iterdir())
        self._run = run
        moved = target / f"{number:03d}"
        os.replace(self._logs, moved)
        self._logs = moved
        for group in self._groups():
            group.move_logs(moved)

    def make_trainer(self, optimizer: OptimizerSettings, *, total_updates: int, reinforcement: bool) -> RemoteTrainer:
        self._ask("make_trainer", optimizer, total_updates, reinforcement)
        return RemoteTrainer(self._ask, optimizer)

    def make_supervised_trainer(self, *, scalar: bool, reference: bool) -> RemoteTrainer:
        self._ask("make_supervised_trainer", scalar, reference)
        return RemoteTrainer(self._ask, self._config.training.optimizer)

    def make_critic(self, trainer: Any) -> Critic | SharedCritic | None:
        algorithm = self._prepared.algorithm
        if not getattr(algorithm, "needs_critic", False):
            return None
        if self._config.critic.shared:
            return SharedCritic(self._prepared, trainer)
        return RemoteCritic(self._ask, algorithm)

    def make_engine(self) -> Engine:
        if self.engines is None:
            return RemoteEngine(self.trainers.workers[0], "engine")
        each = [RemoteEngine(worker, "engine") for worker in self.engines.workers]
        return EngineRouter(each, restart=self._restart, reload=self._reload)

    def make_publisher(self, engine: Engine) -> RemotePublisher:
        probe = assembly.make_probe(self.roles.vocabulary, self.roles.dtype)
        self._publisher = RemotePublisher(self, probe, wait=self._settings.supervision.wait)
        return self._publisher

    def save_reference(self, run: Path) -> None:
        self._ask("save_reference", run.absolute())

    def restore_reference(self, run: Path) -> None:
        self._ask("restore_reference", run.absolute())

    def elsewhere(self, every: float) -> Elsewhere:
        self._supervisor.loads.begin(every, PROBE, local_node())
        return self._supervisor.loads

    async def connect(self) -> None:
        """Make both halves of the transport in all processes. The run has its folder by then."""
        assert self.engines is not None
        transport, _ = self._transport()
        first, workers = self.trainers.workers[0], self.engines.workers
        meeting = await first.plain("address")
        size, settings = 1 + len(workers), self._settings.publishing
        folder = Path(settings.folder).absolute() if settings.folder else (self._run / "weights").absolute()
        await asyncio.gather(
            self.trainers.call("connect", settings, transport, meeting, size, folder),
            *(worker.call("connect", settings, transport, meeting, size) for worker in workers),
        )

    async def close(self) -> None:
        """End all processes, and the cluster if it was started here."""
        await cancel(list(self._starts.values()))
        for group in self._groups():
            await group.close()
        await asyncio.to_thread(_end, self._supervisor, self._placement, self._session, self._logs)

    # What the parts stand on.

    async def _start(self, *, scalar: bool, together: bool, engines: int) -> None:
        config = self._config
        name = config.run.name or config.model.path or "run"
        threads = None if config.hardware.threads == "auto" else config.hardware.threads
        start = partial(
            WorkerGroup.start, supervisor=self._supervisor, run=Path(name).name, logs=self._logs, threads=threads
        )
        self.trainers = await start(self._placement.roles["trainer"])
        task = Task(
            config,
            self._prepared.longest,
            getattr(self._prepared, "needs_reference", False),
            scalar,
            getattr(self._prepared, "algorithm", None),
        )
        making = [self.trainers.make(f"{HOST}:make_rank", task=task, colocated=together)]
        if engines:
            self.engines = await start(self._placement.roles["engine"])
            making += [
                worker.make(f"{HOST}:make_engine_process", task=replace(task, algorithm=None), index=index)
                for index, worker in enumerate(self.engines.workers)
            ]
        self._engine_task = replace(task, algorithm=None)
        if "environment" in self._placement.roles:
            # Threads of torch, which they do not load, are none of their business.
            self.environments = await start(self._placement.roles["environment"], threads=0)
            making.append(self._make_environments(self.environments))
        await asyncio.gather(*making)
        self._ask = Asked(self.trainers, self._loop)
        facts: Facts = await self.trainers.call("facts")
        known = self._prepared.facts
        loaded = Loaded(
            model=None,  # type: ignore[arg-type]
            tokenizer=known.tokenizer,
            eos_ids=known.eos_ids,
            pad_id=known.pad_id,
            context=known.context,
            name=facts.name,
            fingerprint=facts.fingerprint,
        )
        self.roles = RemoteRoles(loaded, facts)
        self.shares_weights = together and config.rollout.engine.kind == "local"
        where = [] if self.engines is None else ["weights move by " + ": ".join(self._transport())]
        if together:
            where = ["the engine samples with the trainer's own weights"]
        self.reasons = (*self._session.reasons, *self.reasons, *self._placement.reasons, *facts.reasons, *where)

    async def _make_environments(self, group: WorkerGroup) -> None:
        self.world = await environments_in(group, self._supervisor, self._prepared)

    def _groups(self) -> list[WorkerGroup]:
        return [*self._computing(), *([] if self.environments is None else [self.environments])]

    def _computing(self) -> list[WorkerGroup]:
        """Those that hold the model."""
        return [group for group in (getattr(self, "trainers", None), self.engines) if group is not None]

    def loss(self) -> WorkerLost | None:
        """The process with the model that was lost first; None while all are there."""
        found = [worker.lost for group in self._computing() for worker in group.workers if worker.lost is not None]
        return min(found, key=lambda loss: loss.at, default=None)

    def _transport(self) -> tuple[str, str]:
        assert self.engines is not None
        asked = self._settings.publishing.transport
        if asked != "auto":
            return asked, "cluster.publishing.transport"
        nodes = {worker.node for group in self._computing() for worker in group.workers}
        if self._device == "cuda":
            return "broadcast", "each process has a GPU of its own"
        if len(nodes) == 1:
            return "ipc", "all processes are on one machine"
        return "broadcast", f"the processes are on {len(nodes)} machines"

    async def engines_in_place(self) -> list[WorkerHandle]:
        """The processes of all engines; those that are lost are started again, also where nobody has noticed so far.

        Raises:
            WorkerLost: one is lost, and none may take its place.
        """
        assert self.engines is not None
        wait = self._settings.supervision.wait
        asked = (worker.health("describe", wait) for worker in self.engines.workers if worker.lost is None)
        await asyncio.gather(*asked, return_exceptions=True)
        return list(await asyncio.gather(*(self._in_place(index) for index in range(len(self.engines.workers)))))

    async def _in_place(self, index: int) -> WorkerHandle:
        """The process of an engine, which is started again where it is lost: once, whoever asks."""
        assert self.engines is not None
        while index in self._starts or self.engines.workers[index].lost is not None:
            if index not in self._starts:
                self._starts[index] = self._loop.create_task(self._start_again(index))
            # Whoever gives up waiting does so alone.
            await asyncio.shield(self._starts[index])
        return self.engines.workers[index]

    async def _start_again(self, index: int) -> None:
        assert self.engines is not None

        async def remake(worker: WorkerHandle) -> None:
            await worker.make(f"{HOST}:make_engine_process", task=self._engine_task, index=index)

        try:
            loss = self.engines.workers[index].lost
            await self.engines.restart(index, remake)
            what = "" if loss is None else loss.what
            show_on_stderr(f"{what}\n  it was started again, and gets the weights anew")
        finally:
            del self._starts[index]

    async def _restart(self, index: int, loss: WorkerLost) -> Engine:
        return RemoteEngine(await self._in_place(index), "engine")

    async def _reload(self, index: int, engine: Engine) -> None:
        assert self._publisher is not None
        assert isinstance(engine, RemoteEngine)
        await self._publisher.give(engine.worker)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _end(supervisor: Supervisor, placement: Placement, session: Session, logs: Path) -> None:
    supervisor.close()
    placement.release()
    session.close()
    if logs.name.startswith(".starting-"):
        shutil.rmtree(logs, ignore_errors=True)
