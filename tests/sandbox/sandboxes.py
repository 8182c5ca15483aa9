"""Fixtures: a pool of sandboxes with limits that tests reach quickly, and what a machine without bubblewrap does."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator

import pytest

from strop.config.sandbox import LimitSettings, SandboxSettings
from strop.errors import UserError
from strop.sandbox.build import make_sandbox
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, RunResult

MAY_LACK_BUBBLEWRAP = "STROP_TESTS_WITHOUT_BUBBLEWRAP"
"""Set to 1 on a machine where bubblewrap cannot be had: its tests are then skipped instead of failing."""

TIGHT = LimitSettings(
    cpu_seconds=2, wall_seconds=3, total_seconds=20, memory_mib=256, disk_mib=16, processes=16, output_kib=64
)


# Of a module: two folders have such a fixture, and while one pool is counted the other must be gone.
@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of bubblewrap sandboxes, with limits that tests reach quickly."""
    if sys.platform != "linux":
        pytest.skip("bubblewrap is for Linux")
    if shutil.which("bwrap") is None and os.environ.get(MAY_LACK_BUBBLEWRAP) == "1":
        pytest.skip(f"bubblewrap is not installed, and {MAY_LACK_BUBBLEWRAP} is 1")
    try:
        made = make_sandbox(SandboxSettings(backend="bubblewrap", limits=TIGHT, workers=2))
    except UserError as error:
        pytest.fail(f"{error}\n(set {MAY_LACK_BUBBLEWRAP}=1 to skip these tests where bubblewrap cannot be had)")
    assert isinstance(made, Pool)
    yield made
    made.close()


@pytest.fixture
def run(pool: Pool) -> Callable[..., RunResult]:
    """Runs a Python program on one input."""

    def once(source: str, given: str = "", **changes: object) -> RunResult:
        limits = LimitSettings.model_validate(TIGHT.model_dump() | changes)
        [result] = pool.submit(Job("script", source, inputs=(given,), limits=limits)).result(60).runs
        return result

    return once
