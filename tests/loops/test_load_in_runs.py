"""Runs that look at their machine: the file of the run has it, whatever becomes of the run."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import recipe

from strop.config.loading import load_config
from strop.errors import ConfigError, StropError
from strop.loops.train import train


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(**changes: Any) -> Path:
    return train(load_config(None, data=recipe(**changes))).folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "load.jsonl").read_text().splitlines()]


def looking() -> bool:
    return any(thread.name == "load" for thread in threading.enumerate())


def test_a_run_looks_at_its_machine_until_it_ends() -> None:
    run = ran(**{"tracking.load_every": 0.1, "run.steps": 3})
    found = lines(run)
    assert {line["node"] for line in found} == {socket.gethostname()}
    steps = [line["step"] for line in found]
    assert steps == sorted(steps)
    assert steps[-1] == 4
    # torch is in memory, and something was computed.
    assert all(line["run_memory_gib"] > 0.1 for line in found)
    assert max(line["run_cpu_percent"] for line in found) > 0
    assert not looking()


def test_lines_stay_when_a_run_goes_on() -> None:
    before = lines(ran(**{"run.name": "one"}))
    after = lines(ran(**{"run.name": "one", "run.steps": 3}))
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1


def test_a_run_that_learns_from_examples_looks_too() -> None:
    changes = {"supervised": {"method": "sft", "batch_size": 4}, "rewards": None, "rollout": {}}
    assert len(lines(ran(**changes))) == 1


def test_a_run_that_fails_has_the_line_of_its_end() -> None:
    with pytest.raises(StropError):
        ran(**{"rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:one_short"}]})
    [run] = Path("runs").iterdir()
    assert len(lines(run)) == 1
    assert not looking()


def test_at_zero_nobody_looks() -> None:
    assert not (ran(**{"tracking.load_every": 0.0}) / "load.jsonl").exists()


def test_looking_all_the_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"load_every \(0.01\) is less than 0.1"):
        load_config(None, data=recipe(**{"tracking.load_every": 0.01}))
