"""Where the trainer and the engines of a run are: in this process (here), or in many (`processes.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from strop.config.training import OptimizerSettings
from strop.loops import assembly
from strop.loops.critic import Critic, SharedCritic, make_critic
from strop.loops.engine_choices import served
from strop.loops.prepare import Prepared
from strop.loops.prepare_examples import PreparedExamples
from strop.loops.served_engines import WithServers, check_served
from strop.rollout.engine import Engine
from strop.rollout.world import World
from strop.tracking.load import Elsewhere

T = TypeVar("T")


class Publishes(Protocol):
    """What makes the engines serve new weights, and proves it."""

    def updating(self, version: int) -> AbstractAsyncContextManager[None]:
        """While the trainer's weights become those of a version."""
        ...

    async def publish(self, trainer: Any, *, version: int) -> dict[str, float]: ...


class Place(Protocol):
    """Makes the parts of a run where they are to be.

    roles: the model, or what is known of it here. world: what answers the policy's turns, None where nothing does.
    reasons: lines that say what was chosen and why. shares_weights: whether the engine samples with the trainer's own
    module, so that only one of them may be at work.
    """

    roles: assembly.Roles
    world: World | None
    reasons: tuple[str, ...]
    shares_weights: bool

    async def aside(self, work: Callable[[], T]) -> T:
        """What `work` returns, which asks the trainer and may take long."""
        ...

    def settle_in(self, run: Path) -> None:
        """The run has its folder now."""
        ...

    def make_trainer(self, optimizer: OptimizerSettings, *, total_updates: int, reinforcement: bool) -> Any: ...

    def make_supervised_trainer(self, *, scalar: bool, reference: bool) -> Any: ...

    def make_critic(self, trainer: Any) -> Critic | SharedCritic | None: ...

    def make_engine(self) -> Engine: ...

    def make_publisher(self, engine: Engine) -> Publishes: ...

    def save_reference(self, run: Path) -> None: ...

    def restore_reference(self, run: Path) -> None: ...

    def elsewhere(self, every: float) -> Elsewhere | None:
        """Whom the load of other machines is had from, asked so often; None where all is in this process."""
        ...

    async def close(self) -> None: ...


class Here:
    """This process: trainer and engine share one module, and a debugger works."""

    def __init__(self, prepared: Prepared | PreparedExamples, roles: assembly.Roles) -> None:
        self._prepared: Any = prepared
        self.roles = roles
        self.reasons: tuple[str, ...] = ()
        self.shares_weights = prepared.config.rollout.engine.kind == "local"
        self.world: World | None = getattr(prepared, "world", None)

    async def aside(self, work: Callable[[], T]) -> T:
        return work()

    def settle_in(self, run: Path) -> None:
        pass

    def make_trainer(self, optimizer: OptimizerSettings, *, total_updates: int, reinforcement: bool) -> Any:
        return assembly.make_trainer(
            self._prepared, self.roles, optimizer, total_updates=total_updates, reinforcement=reinforcement
        )

    def make_supervised_trainer(self, *, scalar: bool, reference: bool) -> Any:
        return assembly.make_supervised_trainer(self._prepared, self.roles, scalar=scalar, reference=reference)

    def make_critic(self, trainer: Any) -> Critic | SharedCritic | None:
        return make_critic(self._prepared, self.roles, trainer)

    def make_engine(self) -> Engine:
        return assembly.make_engine(self._prepared, self.roles)

    def make_publisher(self, engine: Engine) -> Publishes:
        return assembly.make_publisher(self.roles, engine)

    def save_reference(self, run: Path) -> None:
        assembly.save_reference(run, self.roles)

    def restore_reference(self, run: Path) -> None:
        assembly.restore_reference(run, self.roles)

    def elsewhere(self, every: float) -> Elsewhere | None:
        return None

    async def close(self) -> None:
        pass


async def find_place(prepared: Prepared | PreparedExamples, *, scalar: bool = False) -> Place:
    """Load the model where the recipe says.

    Raises:
        UserError: there is no room for what is asked. MissingExtra: Ray is not installed.
    """
    found: Here | Processes | WithServers
    if prepared.config.cluster.kind == "local":
        found = Here(prepared, assembly.load_roles(prepared, scalar=scalar))
    else:
        from strop.loops.processes import Processes

        found = await Processes.start(prepared, scalar=scalar)
    if served(prepared.config):
        try:
            said = await check_served(prepared.config, found.roles)
        except BaseException:
            await found.close()
            raise
        found = WithServers(found, prepared.config, said)
    return found


__all__ = ["Here", "Place", "find_place"]
