"""One Ray cluster for all tests of this folder, and groups of toy workers in it."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from cluster_waiting import Start

from strop.cluster.group import WorkerGroup
from strop.cluster.placement import Ask, Placed, place
from strop.cluster.session import Session, open_session
from strop.cluster.supervision import Supervisor
from strop.config.cluster import SupervisionSettings

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS.parent / "loops"))


_OPEN: list[Session] = []


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Session]:
    """A cluster that counts four CPUs, the same for all files."""
    with pytest.MonkeyPatch.context() as patch:
        # The workers import `toys` from here.
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        patch.setenv("STROP_TEST_PASSED", "yes")
        if not _OPEN:
            _OPEN.append(open_session(None, cpus=4, store_mb=100))
        yield _OPEN[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last test of this folder: it is busy with itself, and would be beside all others."""
    if _OPEN and (nextitem is None or TESTS not in nextitem.path.parents):
        _OPEN.pop().close()


@pytest.fixture
def notices() -> list[str]:
    """What workers warned of."""
    return []


@pytest.fixture
async def start(ray_session: Any, tmp_path: Path, notices: list[str]) -> AsyncIterator[Start]:
    """`await start(2)`: a group of toys of role "trainer"; `together=False` for one of engines."""
    groups: list[tuple[WorkerGroup, Placed, Supervisor]] = []

    async def begin(
        count: int, role: str = "trainer", *, together: bool = True, make: bool = True, **limits: Any
    ) -> WorkerGroup:
        settings = SupervisionSettings(**{"heartbeat": 0.5, "timeout": 15.0, "wait": 60.0, **limits})
        placement = await place([Ask(role, count, "cpu", together=together)], wait=60)
        supervisor = Supervisor(settings, notices.append)
        placed = placement.roles[role]
        group = await WorkerGroup.start(placed, supervisor, run=tmp_path.name, logs=tmp_path / "logs", threads=0)
        groups.append((group, placed, supervisor))
        if make:
            await group.make("toys:make_toy", base=10)
        return group

    yield begin
    for group, placed, supervisor in groups:
        await group.close()
        supervisor.close()
        placed.release()
