"""Processes of a run that are killed: the run goes on by itself, or with the same command, as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_runs import Attached, Driver, assert_same, cluster_to_attach_to

pytestmark = pytest.mark.slow

STEPS = 8
RECIPE: dict[str, Any] = {
    "model": {"create": {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}},
    "data": {"train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 60, "digits": 1}}},
    "rewards": {"verifiers": [{"kind": "python", "function": "slow_rewards:last_digit"}]},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 4},
    "training": {"optimizer": {"learning_rate": 1e-2}},
    "tracking": {"display": "off", "tensorboard": False},
    "checkpoint": {"every": 2},
    "run": {"steps": STEPS, "name": "killed"},
    "hardware": {"threads": 1, "device": "cpu"},
}
# A step takes some seconds, so that what is killed is killed in the midst of one.
REWARDS = """
import os, time

def last_digit(completions, **columns):
    time.sleep(float(os.environ.get("STROP_TEST_SECONDS", "0")))
    return [float(text[-1]) if text and text[-1].isdigit() else 0.0 for text in completions]
"""
TOGETHER = {"kind": "ray"}
TWO_RANKS = {"kind": "ray", "trainer": {"ranks": 2, "backend": "fsdp"}}
TWO_ENGINES = {"kind": "ray", "engines": {"count": 2}}


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(cluster: dict[str, Any], **options: Any) -> Driver:
        drivers.append(Driver(tmp_path, RECIPE, cluster, {"slow_rewards": REWARDS}, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.stop()


@pytest.fixture(scope="module")
def attached() -> Iterator[Attached]:
    """For runs whose driver stays; the others start clusters of their own."""
    with cluster_to_attach_to(4) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder where nobody was killed: in one process, for where it is computed changes nothing."""
    folder = tmp_path_factory.mktemp("undisturbed")
    driver = Driver(folder, RECIPE, {"kind": "local"}, {"slow_rewards": REWARDS})
    assert driver.wait() == 0, driver.output
    return driver.run


def test_a_killed_rank_sets_the_run_back_to_its_checkpoint(
    drive: Callable[..., Driver], attached: Attached, undisturbed: Path
) -> None:
    driver = drive(TWO_RANKS, attached=attached, seconds=0.3)
    driver.until(lambda: driver.steps_done() >= 3)
    pid = driver.workers()["trainer-1"]
    os.kill(pid, signal.SIGKILL)
    assert driver.wait() == 0, driver.output
    assert f"trainer 1 is lost (process {pid} on " in driver.output
    assert "going on from the last checkpoint; 2 more such losses are mended" in driver.output
    assert json.loads((driver.run / "run.json").read_text())["status"] == "finished"
    assert_same(driver.run, undisturbed, steps=STEPS)


def test_a_killed_engine_is_replaced_and_the_run_goes_on(
    drive: Callable[..., Driver], attached: Attached, undisturbed: Path
) -> None:
    driver = drive(TWO_ENGINES, attached=attached, seconds=0.3)
    driver.until(lambda: driver.steps_done() >= 2)
    before = driver.workers()
    os.kill(before["engine-1"], signal.SIGKILL)
    after = driver.until(lambda: (found := driver.workers()).get("engine-1", 0) != before["engine-1"] and found)
    assert driver.wait() == 0, driver.output
    assert {name: pid for name, pid in after.items() if name != "engine-1"} == {
        name: pid for name, pid in before.items() if name != "engine-1"
    }
    assert f"engine 1 is lost (process {before['engine-1']} on " in driver.output
    assert "it was started again, and gets the weights anew" in driver.output
    # Nothing was set back: the run is one go.
    assert json.loads((driver.run / "run.json").read_text())["resumed"] == []
    assert_same(driver.run, undisturbed, steps=STEPS)


def test_nobody_outlives_the_driver_and_the_same_command_goes_on(
    drive: Callable[..., Driver], undisturbed: Path
) -> None:
    driver = drive(TWO_RANKS, seconds=0.3)
    driver.until(lambda: driver.steps_done() >= 3)
    workers = driver.workers()
    assert sorted(workers) == ["engine-0", "trainer-0", "trainer-1"]
    driver.process.kill()
    driver.process.wait()
    give_up = time.monotonic() + 10.0
    while left := [name for name, pid in workers.items() if psutil.pid_exists(pid)]:
        assert time.monotonic() < give_up, left
        time.sleep(0.05)
    again = drive(TWO_RANKS)
    assert again.wait() == 0, again.output
    assert len(json.loads((driver.run / "run.json").read_text())["resumed"]) == 1
    assert_same(driver.run, undisturbed, steps=STEPS)


def test_a_run_that_is_asked_to_leave_saves_and_ends(drive: Callable[..., Driver], undisturbed: Path) -> None:
    driver = drive(TOGETHER, seconds=0.3)
    driver.until(lambda: driver.steps_done() >= 3)
    driver.process.send_signal(signal.SIGUSR1)
    assert driver.wait() == 0, driver.output
    manifest = json.loads((driver.run / "run.json").read_text())
    assert (manifest["status"], manifest["stopped"]) == ("interrupted", "it was asked to leave")
    done = driver.steps_done()
    assert 3 <= done < STEPS
    assert (driver.run / "checkpoints" / "latest").read_text().strip() == f"step-{done:06d}"
    assert not driver.workers()
    again = drive(TOGETHER)
    assert again.wait() == 0, again.output
    assert_same(driver.run, undisturbed, steps=STEPS)
