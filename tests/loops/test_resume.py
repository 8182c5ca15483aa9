"""The same command again: going on, refusing to, starting over; and what can be done with a run that is there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import HELD_OUT, command, environment, recipe, steps_of, weights_of
from typer.testing import CliRunner

from strop.cli import app
from strop.config.loading import load_config

WARMUP = {"steps": 60, "batch_size": 8, "optimizer": {"learning_rate": 2e-2, "schedule": "constant", "warmup_steps": 0}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**changes: Any) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe(**changes)))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def train(*arguments: str, code: int = 0) -> Any:
    result = run("train", "recipe.yaml", *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


# --- going on ------------------------------------------------------------------------------------------------------


def test_a_changed_recipe_is_refused_with_the_differences() -> None:
    write()
    train()
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    result = train("training.optimizer.learning_rate=0.5", "rollout.group_size=8", code=2)
    assert "training.optimizer.learning_rate: 0.01 -> 0.5" in result.stderr
    assert "rollout.group_size: 4 -> 8" in result.stderr
    assert "--fresh" in result.stderr
    assert before == {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


def test_what_computes_nothing_may_change() -> None:
    write()
    train()
    train("run.steps=3", "checkpoint.keep=5", "tracking.episodes_every=0", "tracking.display=plain")
    assert [step for _, step, _ in steps_of(Path("runs/recipe"))] == [1, 2, 3]


def test_fresh_starts_another_run_beside_it() -> None:
    write()
    train()
    train("--fresh")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["recipe", "recipe-2"]
    assert weights_of(Path("runs/recipe")) == weights_of(Path("runs/recipe-2"))
    # The newest run is the one that goes on.
    train("run.steps=3")
    assert [len(steps_of(Path("runs") / name)) for name in ("recipe", "recipe-2")] == [2, 3]


def test_more_steps_are_those_that_a_longer_run_would_have_had() -> None:
    write(**{"data.eval": HELD_OUT, "warmup": {"steps": 3, "batch_size": 4}})
    train("run.name=whole", "run.steps=5")
    train("run.name=parts", "run.steps=2")
    train("run.name=parts", "run.steps=5")
    whole, parts = Path("runs/whole"), Path("runs/parts")
    assert weights_of(whole) == weights_of(parts)
    # The shorter run has scored its end as well.
    scored = [line for line in steps_of(parts) if line[:2] != ("eval", 2)]
    assert scored == steps_of(whole)


def test_more_steps_under_a_falling_learning_rate_are_refused() -> None:
    write(**{"training.optimizer.schedule": "linear"})
    train()
    result = train("run.steps=4", code=2)
    assert "run.steps (the learning rate follows it): 2 -> 4" in result.stderr


def test_other_data_under_the_same_name_is_refused() -> None:
    row = {"prompt": "1+2=", "answer": "3"}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    write(**{"data.train": {"path": "rows.jsonl"}})
    train()
    Path("rows.jsonl").write_text((json.dumps({**row, "answer": "4"}) + "\n") * 3)
    result = train("run.steps=3", code=2)
    assert "the data has changed since the checkpoint" in result.stderr
    assert "--fresh" in result.stderr


def test_a_finished_run_says_so_and_stays_as_it_is() -> None:
    write()
    train()
    before = weights_of(Path("runs/recipe")), steps_of(Path("runs/recipe"))
    result = train("tracking.display=plain")
    assert "all 2 steps of this run are done" in result.stdout
    assert "run.steps" in result.stdout
    assert (weights_of(Path("runs/recipe")), steps_of(Path("runs/recipe"))) == before
    assert json.loads(Path("runs/recipe/run.json").read_text())["status"] == "finished"


# --- two at once, and stopping -------------------------------------------------------------------------------------

HOLDER = """
import sys
from strop.tracking.run_directory import RunDirectory
with RunDirectory.open("runs/recipe"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_run_that_another_process_trains_is_refused(place: Path) -> None:
    write()
    train()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        result = train("run.steps=4", code=2)
        assert f"the run is being trained by process {holder.pid}" in result.stderr
        assert "--fresh" in result.stderr
    finally:
        holder.communicate("\n")
    assert len(steps_of(Path("runs/recipe"))) == 2
    train("run.steps=4")


@pytest.mark.parametrize(
    ("stop", "started"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),
    ],
)
def test_a_stopped_run_says_how_to_go_on(place: Path, stop: signal.Signals, started: Any) -> None:
    """A script's background process (`strop train ... &`) starts with SIGINT ignored, and must still end on SIGTERM."""
    write(**{"run.steps": 100000, "checkpoint.every": 2})
    # A handler is set back to the default in a new process, and only "ignored" is handed down.
    before = signal.signal(signal.SIGINT, started)
    try:
        process = subprocess.Popen(
            command("train", "recipe.yaml"),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    metrics = Path("runs/recipe/metrics.jsonl")
    give_up = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.01)
    process.send_signal(stop)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said == "stopped; the same command goes on from the last checkpoint\n"
    assert json.loads(Path("runs/recipe/run.json").read_text())["status"] == "interrupted"


# --- what can be done with a run -----------------------------------------------------------------------------------


def says_seven() -> None:
    """Train a model that a warm-up has taught to answer 7."""
    Path("rows.jsonl").write_text('{"prompt": "1=", "answer": "7"}\n' * 3)
    source = {"path": "rows.jsonl"}
    write(**{
        "data.train": source,
        "data.eval": source,
        "warmup": WARMUP,
        "rewards.verifiers": [{"kind": "exact"}],
        "training.optimizer.learning_rate": 1e-4,
    })  # fmt: skip
    train()


def test_eval_and_sample_use_the_trained_model() -> None:
    says_seven()
    scored = run("eval", "runs/recipe")
    assert scored.exit_code == 0, scored.output
    assert "accuracy           100.0%" in scored.stdout
    assert "completions        3" in scored.stdout
    # The recipe's own model is the one before its warm-up.
    assert "accuracy           0.0%" in run("eval", "recipe.yaml").stdout
    assert "accuracy           100.0%" in run("eval", "recipe.yaml", "--model", "runs/recipe", "--prompts", "1").stdout

    said = run("sample", "runs/recipe", "--prompt", "1=", "--temperature", "0")
    assert said.exit_code == 0, said.output
    assert said.stdout == "7\n"
    assert run("sample", "runs/recipe", "--temperature", "0").exit_code == 0


def test_eval_of_a_recipe_without_held_out_prompts_says_what_to_add() -> None:
    write()
    result = run("eval", "recipe.yaml")
    assert result.exit_code == 2
    assert "data.eval" in result.stderr


async def test_in_a_notebook_whose_event_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """This test is a coroutine, so a loop is running as in a notebook's cell."""
    import strop
    from strop.errors import UserError
    from strop.loops.evaluate import evaluate_model
    from strop.loops.sample import chat

    config = load_config(None, data=recipe(**{"data.eval": HELD_OUT}))
    summary = strop.train(config)
    assert summary.steps == 2
    assert weights_of(summary.folder) == (summary.model / "model.safetensors").read_bytes()
    assert summary.after.keys() >= {"accuracy", "reward"}
    scores = evaluate_model(config, model=str(summary.folder))
    assert scores.reward == summary.after["reward"]
    chat(str(summary.folder), prompt="1+2=", max_new_tokens=3)
    assert capsys.readouterr().out.endswith("\n")
    # Errors come out of the thread as they are.
    with pytest.raises(UserError, match="the recipe has changed"):
        strop.train(load_config(None, data=recipe(**{"data.eval": HELD_OUT, "run.seed": 5})))
