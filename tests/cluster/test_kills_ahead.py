"""Promise 5 on a cluster, ahead of training: whatever process is killed, each prompt is trained once, in its step, and
no token is older than the bound.

One run here loses one process of each kind. The full matrix, every kind three times a run at moments of a seed, and
runs that are asked to leave, is `pytest -m soak tests/cluster/test_kills_ahead.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead_runs import ages, by_step, trained, versions_of
from killed_runs import Driver

pytestmark = pytest.mark.slow

BOUND = 2
STEPS = 14
ROWS = 48
"""Four a step: the last two steps are of the second epoch."""
# Every turn takes a while, so that what is killed is killed in the midst of a step.
WORLDS = '''
import asyncio, os

from strop.environments.protocol import Done, Observation

class Sums:
    """Asks for a digit three times, and is worth how near they come to the answer."""

    async def reset(self, row):
        self.wanted, self.total = int(row["answer"]), 0

    async def step(self, turn):
        await asyncio.sleep(float(os.environ.get("STROP_TEST_SECONDS", "0")))
        self.total += sum(int(one) for one in turn.text if one.isdigit())
        reward = -abs(self.wanted - self.total) / 30
        if turn.number == 2:
            return Done(reward=reward)
        return Observation([{"role": "user", "content": f"={self.total % 100}+"}], reward)

    async def close(self): ...
'''
DATA = {"train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": ROWS, "digits": 1}}}
RECIPE: dict[str, Any] = {
    "model": {"create": {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 96}},
    "data": DATA,
    "environment": {"kind": "python", "factory": "sums_world:Sums", "max_turn_tokens": 8},
    "rewards": {"verifiers": [{"kind": "environment"}]},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 24, "max_staleness": BOUND},
    "training": {"optimizer": {"learning_rate": 1e-2}},
    "tracking": {"display": "off", "tensorboard": False},
    "checkpoint": {"every": 2},
    "run": {"steps": STEPS, "name": "killed"},
    "hardware": {"threads": 1, "device": "cpu"},
}
CLUSTER: dict[str, Any] = {
    "kind": "ray",
    "engines": {"count": 2},
    "environments": {"workers": 1},
    # A process that ends is found at once; one that gets no share of a busy machine is not to count as lost.
    "supervision": {"restarts": 12, "timeout": 120.0},
}
SECONDS = 0.3


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[], Driver]]:
    drivers: list[Driver] = []

    def start() -> Driver:
        drivers.append(Driver(tmp_path, RECIPE, CLUSTER, {"sums_world": WORLDS}, seconds=SECONDS))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.stop()


@pytest.fixture(scope="module")
def order() -> list[tuple[int, int, str, int]]:
    """What is to be trained, by the data's order alone."""
    from strop.config.loading import load_config
    from strop.data.order import Cursor
    from strop.data.rows import row_id
    from strop.data.sources import open_source

    config = load_config(None, data={**RECIPE, "environment": None, "rewards": {"verifiers": [{"kind": "exact"}]}})
    cursor = Cursor(open_source(config.data.train), seed=config.run.seed, shuffle=config.data.shuffle)
    rows = [row_id(cursor.next()[1]) for _ in range(4 * STEPS)]
    assert len(set(rows)) == ROWS
    return [(1 + group // 4, group, row, 4) for group, row in enumerate(rows)]


def come_to(driver: Driver, step: int) -> None:
    driver.until(lambda: driver.steps_done() >= step)


def kill(driver: Driver, victim: str, step: int, chance: random.Random) -> str:
    """Kill a process at some moment after a step; returns what the output must say of it."""
    come_to(driver, step)
    time.sleep(chance.random() * 4 * SECONDS)
    pid = driver.until(lambda: driver.workers().get(victim))
    assert driver.steps_done() < STEPS, "the run was over before it could be killed"
    os.kill(pid, signal.SIGKILL)
    return f"{victim.replace('-', ' ')} is lost (process {pid} on "


def again(drive: Callable[[], Driver], driver: Driver, step: int, chance: random.Random) -> Driver:
    """Kill the driver at some moment after a step, and give the same command again."""
    come_to(driver, step)
    time.sleep(chance.random() * 4 * SECONDS)
    assert driver.process.poll() is None, driver.output
    driver.process.kill()
    driver.process.wait()
    return drive()


def whole(driver: Driver, order: list[tuple[int, int, str, int]], told: list[str]) -> None:
    assert driver.wait() == 0, driver.output
    for line in told:
        assert line in driver.output
    lines = [json.loads(line) for line in (driver.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # In order of admission, which is that of the data: nothing lost, and nothing twice.
    assert trained(driver.run) == order
    found = ages(driver.run)
    assert min(found) >= 0
    assert max(found) <= BOUND
    # It was ahead, and completions went on with new weights.
    assert max(found) >= 1
    assert any(len(set(versions)) > 1 for versions in versions_of(driver.run))
    # A loss is nobody's failed episode.
    assert {record.status for records in by_step(driver.run).values() for record in records} <= {"stop", "length"}
    assert json.loads((driver.run / "run.json").read_text())["status"] == "finished"


def test_one_process_of_each_kind_is_killed(drive: Callable[[], Driver], order: list[Any]) -> None:
    chance = random.Random(5)
    driver = drive()
    told = [
        kill(driver, "engine-1", 2, chance),
        kill(driver, "environment-0", 4, chance),
        kill(driver, "trainer-0", 7, chance),
    ]
    driver = again(drive, driver, 10, chance)
    whole(driver, order, told)
    # Set back by the loss of the trainer, and by that of the driver.
    assert len(json.loads((driver.run / "run.json").read_text())["resumed"]) == 2


@pytest.mark.soak
def test_who_is_asked_to_leave_or_interrupted_leaves_nobody_behind(
    drive: Callable[[], Driver], order: list[Any]
) -> None:
    for step, number, code in [(2, signal.SIGUSR1, 0), (6, signal.SIGINT, 130)]:
        driver = drive()
        come_to(driver, step)
        driver.process.send_signal(number)
        assert driver.wait() == code, driver.output
        assert json.loads((driver.run / "run.json").read_text())["status"] == "interrupted"
        assert not driver.workers()
        if number == signal.SIGUSR1:
            latest = (driver.run / "checkpoints" / "latest").read_text().strip()
            assert latest == f"step-{driver.steps_done():06d}"
            assert (driver.run / "checkpoints" / latest / "state" / "under-way.safetensors").exists()
    assert "Traceback" not in driver.output
    whole(drive(), order, [])


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("victim", ["engine-0", "engine-1", "environment-0", "trainer-0"])
def test_a_process_is_killed_three_times(drive: Callable[[], Driver], order: list[Any], victim: str, seed: int) -> None:
    chance = random.Random(f"{victim} {seed}")
    driver = drive()
    told = [kill(driver, victim, step, chance) for step in (2, 6, 10)]
    assert len(set(told)) == 3
    whole(driver, order, told)
    resumed = json.loads((driver.run / "run.json").read_text())["resumed"]
    if victim.startswith("environment"):
        assert resumed == []
    elif victim.startswith("trainer"):
        assert len(resumed) == 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_the_driver_is_killed_three_times(drive: Callable[[], Driver], order: list[Any], seed: int) -> None:
    chance = random.Random(seed)
    driver = drive()
    for step in (2, 6, 10):
        driver = again(drive, driver, step, chance)
    whole(driver, order, [])
    assert len(json.loads((driver.run / "run.json").read_text())["resumed"]) == 3
