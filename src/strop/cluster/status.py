"""What is in a Ray cluster: nodes, their resources, and strop's processes with their last signs of life."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.cluster.session import NAMESPACE, import_ray

PATIENCE = 5.0
"""Seconds that a process has to say what it is."""


@dataclass(frozen=True)
class NodeStatus:
    """A node: resources by name, in all."""

    id: str
    host: str
    address: str
    alive: bool
    resources: dict[str, float]


@dataclass(frozen=True)
class ActorStatus:
    """A process of strop. beat: seconds since it was last asked for a sign of life. Without an answer: None and 0."""

    run: str
    role: str
    rank: int
    host: str | None = None
    node: str | None = None
    pid: int = 0
    beat: float | None = None


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster. free: resources that nobody holds, in all."""

    nodes: list[NodeStatus]
    free: dict[str, float]
    actors: list[ActorStatus]


def cluster_status() -> ClusterStatus:
    """Ask the cluster that this process is connected to."""
    ray = import_ray()
    nodes = [
        NodeStatus(
            node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], node["Alive"], node["Resources"]
        )
        for node in ray.nodes()
    ]
    return ClusterStatus(nodes, ray.available_resources(), _actors(ray))


def _actors(ray: Any) -> list[ActorStatus]:
    asked: dict[Any, tuple[str, str, int]] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        run, _, rest = entry["name"].partition("/")
        role, _, number = rest.partition("/")[0].rpartition("-")
        if entry["namespace"] != NAMESPACE or not number.isdigit():
            continue
        try:
            actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
        except ValueError:  # it ended between the two questions
            continue
        asked[actor.describe.options(concurrency_group="health").remote()] = (run, role, int(number))
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE) if asked else ([], [])
    found = []
    for reference, (run, role, rank) in asked.items():
        status = ActorStatus(run, role, rank)
        if reference in ready:
            try:
                about = ray.get(reference)
            except ray.exceptions.RayError:
                continue
            beat = max(0.0, time.time() - about["beat"])
            status = ActorStatus(run, role, rank, about["host"], about["node"], about["pid"], beat)
        found.append(status)
    return sorted(found, key=lambda status: (status.run, status.role, status.rank))


def shown(status: ClusterStatus) -> list[str]:
    """The lines that `strop cluster status` prints."""
    rows = [("node", "host", "address", "CPUs", "GPUs", "memory", "")]
    for node in status.nodes:
        amounts = node.resources
        memory = f"{amounts.get('memory', 0.0) / 2**30:.1f} GiB"
        state = "" if node.alive else "gone"
        cpus, gpus = (f"{amounts.get(name, 0.0):g}" for name in ("CPU", "GPU"))
        rows.append((node.id[:8], node.host, node.address, cpus, gpus, memory, state))
    lines = _table(rows)
    lines += [f"free: {status.free.get('CPU', 0.0):g} CPUs, {status.free.get('GPU', 0.0):g} GPUs", ""]
    if not status.actors:
        return [*lines, "no processes of strop"]
    rows = [("run", "process", "host", "node", "pid", "last heartbeat", "")]
    for actor in status.actors:
        if actor.beat is None:
            rows.append((actor.run, f"{actor.role} {actor.rank}", "", "", "", "no answer", ""))
            continue
        beat = f"{actor.beat:.1f} s ago"
        where = (actor.host or "", (actor.node or "")[:8], str(actor.pid))
        rows.append((actor.run, f"{actor.role} {actor.rank}", *where, beat, ""))
    return lines + _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
