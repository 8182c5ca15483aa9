"""Where the processes of a role go: placement groups, and a plain word where the cluster is too small."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strop.cluster.session import import_ray
from strop.errors import RunFailure, UserError

Device = Literal["cpu", "cuda"]
MOST_BESIDE_A_GPU = 8
"""CPU threads of a process that computes on a GPU. If each took all cores, as torch does by itself, processes would
wait for each other's threads: two ranks that way were slower than one (`benchmarks/ranks.py`)."""


@dataclass(frozen=True)
class Ask:
    """What a role needs: `count` processes of `gpus` GPUs each, or of `cpus` CPUs each. key: what asks for them."""

    role: str
    count: int
    device: Device
    cpus: int = 1
    gpus: int = 1
    key: str = ""
    threads: int | None = None
    """CPU threads of each process; None for a share of the cluster's CPUs."""
    together: bool = True
    """On one node where that can be: processes that talk to each other all the time."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one process, as Ray names them."""
        return {"GPU": float(self.gpus), "CPU": 1.0} if self.device == "cuda" else {"CPU": float(self.cpus)}


@dataclass(frozen=True)
class Placed:
    """Resources that are held for a role. threads: CPU threads for each of its processes."""

    ask: Ask
    group: Any
    strategy: str
    threads: int

    def release(self) -> None:
        """Give the resources back; processes that are still in them end."""
        import ray.util

        ray.util.remove_placement_group(self.group)


@dataclass(frozen=True)
class Placement:
    """Where everything goes. reasons: lines that say what was chosen and why."""

    roles: dict[str, Placed]
    reasons: list[str]

    def release(self) -> None:
        """Give all resources back."""
        for placed in self.roles.values():
            placed.release()


def asks(
    *, ranks: int, engines: int, colocated: bool, device: Device, environments: int = 0, tensor: int = 1
) -> list[Ask]:
    """What a run needs. A colocated engine lives in the process of the first trainer rank and needs nothing;
    environments need no GPU. tensor: GPUs of an engine."""
    found = [Ask("trainer", ranks, device, key="cluster.trainer.ranks")]
    if not colocated:
        found.append(Ask("engine", engines, device, gpus=tensor, key="cluster.engines.count", together=False))
    if environments:
        found.append(
            Ask("environment", environments, "cpu", key="cluster.environments.workers", threads=1, together=False)
        )
    return found


async def place(wanted: Sequence[Ask], *, wait: float) -> Placement:
    """Hold resources for all roles.

    Args:
        wait: seconds to wait for what other jobs hold.

    Raises:
        UserError: the cluster has too little, whoever holds it. RunFailure: it did not become free in time.
    """
    ray = import_ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_enough(wanted, [node["Resources"] for node in nodes])
    # What some processes take is not there for the others.
    left_over = int(_total(nodes, "CPU")) - sum(ask.count * ask.threads for ask in wanted if ask.threads is not None)
    threads = max(1, left_over // max(1, sum(ask.count for ask in wanted if ask.threads is None)))
    placement, deadline = Placement({}, []), asyncio.get_running_loop().time() + wait
    try:
        for ask in wanted:
            strategy, why = choose_strategy(ask, [node["Resources"] for node in nodes])
            group = ray.util.placement_group([ask.bundle] * ask.count, strategy=strategy)
            share = min(threads, MOST_BESIDE_A_GPU) if ask.device == "cuda" else threads
            placed = Placed(ask, group, strategy, share if ask.threads is None else ask.threads)
            placement.roles[ask.role] = placed
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            if not await asyncio.to_thread(group.wait, left):
                raise _not_free(ask, wait, ray.available_resources())
            placement.reasons.append(f"{_processes(ask)}, {strategy}: {why}")
    except BaseException:
        placement.release()
        raise
    return placement


def choose_strategy(ask: Ask, nodes: Sequence[dict[str, float]]) -> tuple[str, str]:
    """(strategy, why): on one node if one of them has room for all processes of the role."""
    fits = any(_room(ask, node) >= ask.count for node in nodes)
    if not fits:
        return "PACK", f"no node has room for all {ask.count}, so they go to as few as can be"
    if ask.together:
        return "STRICT_PACK", "they fit one node, where they talk fastest"
    return "PACK", "as near to each other as there is room"


def check_enough(wanted: Sequence[Ask], nodes: Sequence[dict[str, float]]) -> None:
    """Refuse what the cluster could not hold even if it were idle.

    Raises:
        UserError: with what is there and what is needed.
    """
    free = [dict(node) for node in nodes]
    for ask in wanted:
        left = ask.count
        for node in sorted(free, key=lambda node: -_room(ask, node)):
            taken = min(left, _room(ask, node))
            left -= taken
            for name, amount in ask.bundle.items():
                node[name] = node.get(name, 0.0) - taken * amount
        if left:
            need = " and ".join(f"{a.count} for {a.role} ({_resources(a.bundle)} each)" for a in wanted)
            what = "GPU" if ask.device == "cuda" else "CPU"
            raise UserError(
                f"the cluster has no room for {left} of {ask.count} processes of {ask.role}: needed are {need}; "
                f"{_there(nodes)}",
                where=ask.key,
                mend=f"ask for fewer processes, or add nodes with {what}s",
            )


def _room(ask: Ask, node: dict[str, float]) -> int:
    """How many processes of a role a node could hold."""
    return max(0, int(min(node.get(name, 0.0) // amount for name, amount in ask.bundle.items())))


def _not_free(ask: Ask, wait: float, available: dict[str, float]) -> RunFailure:
    shown = {name: available.get(name, 0.0) for name in ask.bundle}
    return RunFailure(
        f"no room for {_processes(ask)} became free within {wait:g} s: "
        f"each needs {_resources(ask.bundle)}, and free in the whole cluster are {_resources(shown)}",
        where=ask.key,
        mend="wait until other jobs have ended (`strop cluster status` shows those of strop), or ask for less",
    )


def _there(nodes: Sequence[dict[str, float]]) -> str:
    each = [_resources({name: node.get(name, 0.0) for name in ("GPU", "CPU")}) for node in nodes]
    return f"there {'is 1 node' if len(each) == 1 else f'are {len(each)} nodes'} with " + "; ".join(each)


def _processes(ask: Ask) -> str:
    return f"{ask.count} {'process' if ask.count == 1 else 'processes'} of {ask.role}"


def _resources(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _total(nodes: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(node["Resources"].get(name, 0.0) for node in nodes))
