"""Runs whose environments are in workers: the same as in the driver, also when a worker is killed in the midst."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_runs import COMPARED, Attached, Driver, assert_same, cluster_to_attach_to

from strop.tracking.episodes import read_episodes

pytestmark = pytest.mark.slow

STEPS = 4
# What the environment says depends on the row and on all that was said before.
WORLDS = '''
import asyncio, os

from strop.environments.protocol import Done, Observation

class Sums:
    """Asks for a digit three times, and is worth how near they come to the answer."""

    async def reset(self, row):
        self.wanted = int(row["answer"])
        self.fatal = os.environ.get("STROP_TEST_FATAL") == str(row["prompt"])
        self.total = 0

    async def step(self, turn):
        await asyncio.sleep(float(os.environ.get("STROP_TEST_SECONDS", "0")))
        if self.fatal and turn.number == 1:
            os._exit(13)
        self.total += sum(int(one) for one in turn.text if one.isdigit())
        reward = -abs(self.wanted - self.total) / 30
        if turn.number == 2:
            return Done(reward=reward)
        return Observation([{"role": "user", "content": f"={self.total % 100}+"}], reward)

    async def close(self): ...


def digits(text: str) -> str:
    """Adds up digits."""
    return str(sum(int(one) for one in text))


def lengths(completions, **columns):
    return [len(text) / 10 for text in completions]


class Match:
    """One says a digit, the other is to say the next."""

    roles = ("leads", "follows")

    async def reset(self, row):
        from strop.environments.self_play import Move
        self.said = []
        return Move("leads", [{"role": "user", "content": row["prompt"]}])

    async def step(self, role, turn):
        from strop.environments.self_play import Move
        self.said.append(turn.text)
        if len(self.said) == 4:
            return Done()
        return Move(self.roles[len(self.said) % 2], [{"role": "user", "content": f"{turn.text}="}], 0.125)

    async def rewards(self):
        same = sum(a == b for a, b in zip(self.said[0], self.said[1]))
        return {"leads": -same / 4, "follows": same / 4}

    async def close(self): ...
'''
RECIPE: dict[str, Any] = {
    "model": {"create": {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 64}},
    "data": {
        "train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 16, "digits": 1}},
        "shuffle": False,
    },
    "environment": {"kind": "python", "factory": "sums_world:Sums", "max_turn_tokens": 3},
    "rewards": {"verifiers": [{"kind": "environment"}]},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 9},
    "training": {"optimizer": {"learning_rate": 1e-2}},
    "tracking": {"display": "off", "tensorboard": False},
    "checkpoint": {"every": 2},
    "run": {"steps": STEPS, "name": "killed"},
    "hardware": {"threads": 1, "device": "cpu"},
}
MATCH = {**RECIPE, "environment": {"kind": "self_play", "factory": "sums_world:Match", "max_turn_tokens": 3}}
# A call of the tool is `+12=`, which any policy writes now and then; its episodes branch.
TOOLS = {
    **RECIPE,
    "environment": {
        "kind": "tools", "tools": [{"kind": "function", "path": "sums_world:digits"}], "style": "tag", "opening": "+",
        "closing": "=", "malformed_penalty": 0.1, "max_turns": 3, "max_turn_tokens": 14,
    },
    "rollout": {**RECIPE["rollout"], "tree": {"at": [1]}, "max_new_tokens": 36},
    "rewards": {"verifiers": [{"kind": "environment"}, {"kind": "python", "function": "sums_world:lengths"}]},
    "algorithm": {"name": "grpo"},
}  # fmt: skip
WORKERS = {"kind": "ray", "environments": {"workers": 2}}


@pytest.fixture(scope="module")
def attached() -> Iterator[Attached]:
    with cluster_to_attach_to(4) as found:
        yield found


@pytest.fixture
def drive(tmp_path: Path, attached: Attached) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(recipe: dict[str, Any], cluster: dict[str, Any], **options: Any) -> Driver:
        folder = tmp_path / str(len(drivers))
        folder.mkdir()
        if cluster["kind"] == "ray":
            options["attached"] = attached
        drivers.append(Driver(folder, recipe, cluster, {"sums_world": WORLDS}, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder where everything is in one process."""
    driver = Driver(tmp_path_factory.mktemp("undisturbed"), RECIPE, {"kind": "local"}, {"sums_world": WORLDS})
    assert driver.wait() == 0, driver.output
    return driver.run


def sampled(run: Path) -> list[tuple[Any, ...]]:
    """All that was played, token by token, with rewards."""
    found = []
    for path in sorted((run / "episodes").glob("*.parquet")):
        for record in read_episodes(path):
            found.append((path.name, record.prompt_id, record.sample, record.tokens.tolist(), record.reward))
    assert found
    return found


def answered(run: Path) -> int:
    """How many records hold something that was read after something was sampled."""
    masks = [record.loss_mask for path in (run / "episodes").glob("*.parquet") for record in read_episodes(path)]
    return sum(not mask[int(mask.argmax()) :].all() for mask in masks)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_the_same_with_and_without_workers(
    drive: Callable[..., Driver], undisturbed: Path, workers: int
) -> None:
    driver = drive(RECIPE, {"kind": "ray", "environments": {"workers": workers}})
    if workers:
        driver.until(lambda: len(driver.workers()) == 3)
        assert sorted(driver.workers()) == ["environment-0", "environment-1", "trainer-0"]
    assert driver.wait() == 0, driver.output
    assert sampled(driver.run) == sampled(undisturbed)
    assert_same(driver.run, undisturbed, steps=STEPS, metrics=(*COMPARED, "errors/share"))
    logs = sorted(path.name for path in (driver.run / "logs" / "001").iterdir())
    assert logs == ["environment-0.log", "environment-1.log", "trainer-0.log"] if workers else ["trainer-0.log"]


@pytest.mark.parametrize(
    ("recipe", "metrics"),
    [(MATCH, ("reward/role/leads", "reward/role/follows")), (TOOLS, ("reward/environment",))],
    ids=["matches", "tools and trees"],
)
def test_other_environments_too(drive: Callable[..., Driver], recipe: dict[str, Any], metrics: tuple[str, ...]) -> None:
    here, there = drive(recipe, {"kind": "local"}), drive(recipe, WORKERS)
    for driver in (here, there):
        assert driver.wait() == 0, driver.output
    assert "environment-1.log" in {path.name for path in (there.run / "logs" / "001").iterdir()}
    assert sampled(there.run) == sampled(here.run)
    assert answered(there.run) >= 5
    assert_same(there.run, here.run, steps=STEPS, metrics=(*COMPARED, *metrics))


def test_a_killed_environment_worker_changes_nothing(drive: Callable[..., Driver], undisturbed: Path) -> None:
    driver = drive(RECIPE, WORKERS, seconds=0.4)
    driver.until(lambda: driver.steps_done() >= 1)
    before = driver.workers()
    lost = before["environment-0"]
    os.kill(lost, signal.SIGKILL)
    after = driver.until(lambda: (found := driver.workers()).get("environment-0", lost) != lost and found)
    assert driver.wait() == 0, driver.output
    assert f"environment 0 is lost (process {lost} on " in driver.output
    assert "it was started again; begun again: " in driver.output
    # Nothing was set back: the run is one go.
    assert json.loads((driver.run / "run.json").read_text())["resumed"] == []
    assert sampled(driver.run) == sampled(undisturbed)
    assert_same(driver.run, undisturbed, steps=STEPS, metrics=(*COMPARED, "errors/share"))
    assert not [pid for pid in (*before.values(), *after.values()) if psutil.pid_exists(pid)]


def test_an_environment_that_ends_its_process_costs_its_own_episodes(
    drive: Callable[..., Driver], undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row of the second step: in the first none may fail.
    rows = list(read_episodes(undisturbed / "episodes" / "step-000002.parquet"))
    fatal = rows[0].prompt_id
    monkeypatch.setenv("STROP_TEST_FATAL", str(rows[0].row["prompt"]))
    recipe = {**RECIPE, "rewards": {**RECIPE["rewards"], "max_error_share": 0.5}}
    # Fewer than the deaths there are.
    driver = drive(recipe, {**WORKERS, "supervision": {"restarts": 1}}, seconds=0.05)
    assert driver.wait() == 0, driver.output
    assert driver.output.count("it was started again; begun again: ") >= 3
    played = read_episodes(driver.run / "episodes" / "step-000002.parquet")
    failed = [record for record in played if record.prompt_id == fatal]
    assert len(failed) == 4
    for record in failed:
        assert record.status == "environment_error"
        assert "the environment has ended its process 3 times, the last time alone in it" in record.detail
        assert record.reward != record.reward
    others = {(r.prompt_id, r.sample): r.tokens.tolist() for r in played if r.prompt_id != fatal}
    assert others == {(r.prompt_id, r.sample): r.tokens.tolist() for r in rows if r.prompt_id != fatal}
    lines = [json.loads(line)["metrics"] for line in (driver.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["errors/environment_error"] == 4
    assert len(lines) == STEPS
    assert json.loads((driver.run / "run.json").read_text())["resumed"] == []
