"""How many workers the environments of a run get, and the world whose environments are in them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from strop.cluster.environment_host import drives_itself
from strop.cluster.group import WorkerGroup
from strop.cluster.handle import WorkerHandle
from strop.cluster.remote_environments import RemoteEnvironments
from strop.cluster.supervision import Supervisor, WorkerLost, local_node
from strop.config import Config
from strop.config.adapted_environments import GymnasiumEnvironment, OpenEnvEnvironment
from strop.config.environment import PythonEnvironment, SelfPlayEnvironment
from strop.environments.protocol import EnvironmentFactory
from strop.errors import ConfigError, UserError
from strop.loops.environment_process import EnvironmentTask
from strop.rollout.world import World

MOST = 4
"""Workers that `auto` takes at most."""
KEY = "cluster.environments.workers"
COMPUTING = (PythonEnvironment, SelfPlayEnvironment, GymnasiumEnvironment)
"""Environments whose code computes in the process that they live in. Tools run elsewhere, or in threads."""
MAKE = "strop.loops.environment_process:make_environments"


def check_workers(config: Config, world: World | None) -> None:
    """See that the environments can be in so many workers.

    Raises:
        ConfigError: they cannot.
    """
    workers = config.cluster.environments.workers
    if world is None or workers == "auto" or workers == 0:
        return
    if world.factory.drives:
        raise ConfigError([drives_itself(f"environment.kind {world.settings.kind}")])  # type: ignore[attr-defined]
    settings = config.environment
    if isinstance(settings, OpenEnvEnvironment) and workers > settings.sessions:
        what = f"{workers} workers cannot share {settings.sessions} sessions of a server: some would never get one"
        raise ConfigError([UserError(what, where=KEY, mend="raise environment.sessions, or lower it")])


def choose_workers(config: Config, world: World | None, spare: float) -> tuple[int, tuple[str, ...]]:
    """(workers, lines that say why); (0, none) where nothing is played.

    Args:
        spare: CPUs of the cluster that are free and that neither ranks, nor engines, nor the driver take.
    """
    if world is None:
        return 0, ()
    asked = config.cluster.environments.workers
    if asked != "auto":
        return asked, () if asked else (f"environments are in the driver: {KEY}",)
    if world.factory.drives:
        return 0, ("environments are in the driver: they ask the policy themselves",)
    if not isinstance(config.environment, COMPUTING):
        return 0, ("environments are in the driver: they only wait for tools and servers",)
    if not local_node():
        return 0, ("environments are in the driver: it is on no node of the cluster, which may not have their code",)
    workers = max(0, min(MOST, int(spare)))
    if not workers:
        return 0, (f"environments are in the driver: the cluster has no CPU to spare for {KEY}",)
    return workers, (f"environments are in workers: their code computes, and {int(spare)} CPUs are to spare",)


class Elsewhere(EnvironmentFactory):
    """What is known here of environments that are made in workers.

    Args:
        known: the factory, as it was made to look at the recipe; it is never opened. home: where they live.
    """

    def __init__(self, known: EnvironmentFactory, home: RemoteEnvironments) -> None:
        self._known, self._home = known, home
        self.tools, self.instructions, self.stop = known.tools, known.instructions, known.stop
        self.forks, self.roles = known.forks, known.roles

    def make(self) -> Any:
        raise AssertionError("environments are made in workers")

    async def close(self) -> None:
        await self._home.end()
        await self._known.close()


async def environments_in(group: WorkerGroup, supervisor: Supervisor, prepared: Any) -> World:
    """The world of a prepared recipe with its environments in the workers of a group, which are made here.

    Raises:
        UserError: one of them cannot make them. WorkerLost: it ended over it.
    """
    world: World = prepared.world
    task = EnvironmentTask(
        prepared.config.environment,
        prepared.config.sandbox,
        getattr(prepared.facts.tokenizer, "chat_template", None),
        os.getcwd(),
        len(group.workers),
    )
    for worker in group.workers:
        await worker.make(MAKE, task=task, index=worker.rank)

    async def restart(index: int, loss: WorkerLost) -> WorkerHandle:
        async def remake(worker: WorkerHandle) -> None:
            await worker.make(MAKE, task=task, index=index)

        return await group.restart(index, remake, counted=False)

    home = RemoteEnvironments(group.workers, supervisor, limit=world.settings.step_timeout, restart=restart)
    return replace(world, factory=Elsewhere(world.factory, home), elsewhere=home)
