"""Verifiers with processes and servers behind them, in whole runs."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tiny_runs import HELD_OUT, command, environment, episodes_of, recipe, steps_of
from tiny_server import tiny_server

from strop.config.loading import load_config
from strop.errors import RunFailure
from strop.loops.evaluate import evaluate_model
from strop.loops.train import train

SECRET = "sk-0123456789-never-to-be-seen"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def workers_of(pid: int) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "strop.rewards.worker" in str(child.cmdline())
    ]


def test_math_in_a_run_and_its_components() -> None:
    """A gate, a verifier in workers, one for some rows, and evaluation; afterwards no process is left."""
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}=", "answer": n, "odd": n % 2 == 1}) + "\n" for n in range(10))
    )
    data = recipe(
        **{
            "data": {"train": {"path": "rows.jsonl"}, "eval": {"path": "rows.jsonl"}},
            "rewards.verifiers": [
                {"kind": "math", "weight": 2.0, "when": {"odd": True}},
                {"kind": "numeric", "when": {"odd": False}},
                {"kind": "regex", "name": "shape", "pattern": r"^\d", "gate": True, "weight": 0.25},
            ],
            "rollout.group_size": 16,
        }
    )
    before = psutil.Process().children(recursive=True)
    summary = train(load_config(None, data=data))
    assert psutil.Process().children(recursive=True) == before
    records = episodes_of(summary.folder)
    for record in records:
        shape = record.components["shape"]
        assert shape == float(record.completion_text[:1].isdecimal())
        if not shape:
            assert record.components == {"shape": 0.0}
            assert (record.reward, record.correct) == (0.0, False)
            continue
        name = "math" if record.row["odd"] else "numeric"
        assert record.components.keys() - {"math/answers"} == {"shape", name}
        assert record.reward == pytest.approx(record.components[name] * (2.0 if name == "math" else 1.0) + 0.25)
        assert record.correct == (record.components[name] == 1.0)
    assert {len(record.components) for record in records} == {1, 2, 3}
    metrics = steps_of(summary.folder)[1][2]
    asked = [r.components["math/answers"] for r in records if r.group < 4 and "math/answers" in r.components]
    assert metrics["reward/math/answers"] == pytest.approx(sum(asked) / len(asked))
    assert not math.isnan(summary.after["accuracy"])
    scores = evaluate_model(load_config(None, data=data), model=str(summary.folder))
    assert scores.errors == 0
    assert psutil.Process().children(recursive=True) == before


def test_an_evaluation_that_fails_leaves_no_worker() -> None:
    verifier = {"kind": "python", "function": "tiny_rewards:not_a_number", "isolate": "process"}
    data = recipe(**{"rewards.verifiers": [verifier], "data.eval": HELD_OUT})
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RunFailure, match="returned nan"):
        evaluate_model(load_config(None, data=data))
    with pytest.raises(RunFailure, match="returned nan"):
        train(load_config(None, data=data))
    assert psutil.Process().children(recursive=True) == before


def test_a_key_is_in_no_file_and_in_no_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setattr("strop.rewards.client.FIRST_PAUSE", 0.01)
    with tiny_server() as url:
        verifiers = [
            {"kind": "judge", "base_url": f"{url}/v1", "model": "m", "api_key_env": "JUDGE_KEY", "cache": "c.sqlite"},
            {"kind": "http", "url": f"{url}/score", "api_key_env": "JUDGE_KEY"},
        ]
        summary = train(load_config(None, data=recipe(**{"rewards.verifiers": verifiers, "tracking.display": "plain"})))
        verifiers[1]["url"] = f"{url}/once"
        verifiers[1]["retries"] = 0  # type: ignore[assignment]
        failing = recipe(**{"rewards.verifiers": verifiers, "rewards.retries": 0})
        with pytest.raises(RunFailure) as caught:
            train(load_config(None, data=failing), fresh=True)
    written = [path for path in Path().rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert "JUDGE_KEY" in (summary.folder / "config.yaml").read_text()
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err + str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_worker(end: signal.Signals, tmp_path: Path) -> None:
    """While a worker is at something that would take for ever."""
    (tmp_path / "stuck.py").write_text(
        "import pathlib\n"
        "def reward(completions, **_):\n"
        "    pathlib.Path('begun').touch()\n"
        "    return [float(10 ** (10 ** 10))]\n"
    )
    verifier: dict[str, Any] = {"kind": "python", "function": "stuck:reward", "isolate": "process"}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe(**{"rewards.verifiers": [verifier], "rewards.timeout": 600})))
    running = subprocess.Popen(
        command("train", "recipe.yaml"), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not Path("begun").exists():
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = workers_of(running.pid)
        assert workers
        running.send_signal(end)
        running.wait(60)
    finally:
        running.kill()
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
    assert len(gone) == len(workers)
