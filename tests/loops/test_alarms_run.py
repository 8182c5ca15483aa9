"""Alarms in real runs: a tiny policy finds the hole in its reward, and the run says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import episodes_of, recipe, steps_of, weights_of
from typer.testing import CliRunner

from strop.cli import app
from strop.loops.watch import is_drawn

# A policy that says anything at first; what pleases its reward is ones.
ONES: dict[str, Any] = {
    "rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:ones"}],
    "rollout": {"groups_per_step": 4, "group_size": 8, "max_new_tokens": 16},
    "training.optimizer.learning_rate": 2e-2,
    "run.steps": 14,
    "checkpoint.every": 4,
    "alarms": {"baseline_steps": 2, "length": None, "sameness": None, "jump": None},
}
# Calls a completion right that has one of five digits; the second opinion knows of the nought only.
FOOLED: dict[str, Any] = {
    "rewards.verifiers": [{"kind": "regex", "pattern": "[0-4]"}],
    "run.steps": 8,
    "rollout.group_size": 16,
    "alarms": {"second_opinion": {"verifiers": [{"kind": "regex", "pattern": "0"}], "share": 0.5}},
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["train", "recipe.yaml", *arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def write(**changes: Any) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe(**changes)))


def alarms_of(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["alarms"]
    return found


def test_a_hack_that_a_policy_learns_is_told_everywhere() -> None:
    write(**ONES)
    said = train("tracking.display=plain").stdout
    run = Path("runs/recipe")
    [alarm] = [one for one in alarms_of(run) if one["name"] == "repetition"]
    line = f"repetition at step {alarm['step']}: {alarm['what']}"
    file = f"episodes/step-{alarm['step']:06d}.parquet"
    assert f"alarm: {line} ({file}, group {alarm['group']}, sample {alarm['sample']})" in said
    # Again in the closing words.
    assert f"alarms            {line}" in said

    metrics = {step: line for kind, step, line in steps_of(run) if kind == "train"}
    assert metrics[alarm["step"]]["alarms/repetition"] == alarm["value"]
    assert metrics[alarm["step"]]["alarms/repetition_limit"] == alarm["limit"]
    assert [metrics[step]["alarms/raised"] for step in (alarm["step"] - 1, alarm["step"])] == [0.0, 1.0]

    shown = CliRunner().invoke(app, ["runs", "show", str(run)]).stdout
    assert f"step {alarm['step']}  repetition: {alarm['what']}" in shown
    assert f"see group {alarm['group']}, sample {alarm['sample']} in {run / file}" in shown
    # What is pointed at is there, and shows it.
    [example] = [one for one in episodes_of(run) if (one.group, one.sample) == (alarm["group"], alarm["sample"])]
    assert example.group // 4 == alarm["step"] - 1
    assert "1111" in example.completion_text


def test_alarms_change_nothing_of_the_training() -> None:
    write(**ONES)
    train("run.name=with")
    train("run.name=without", "alarms={action: off}")
    assert weights_of(Path("runs/with")) == weights_of(Path("runs/without"))
    assert alarms_of(Path("runs/with"))
    assert alarms_of(Path("runs/without")) == []
    assert not any(name.startswith("alarms/") for _, _, line in steps_of(Path("runs/without")) for name in line)


def test_a_run_that_goes_on_raises_the_alarms_of_one_that_was_not_stopped() -> None:
    write(**ONES)
    train("run.name=whole")
    [alarm] = alarms_of(Path("runs/whole"))
    for steps in (alarm["step"] - 2, alarm["step"], 14):
        said = train("run.name=parts", f"run.steps={steps}", "tracking.display=plain").stdout
    assert "(so far 1)" in said
    assert alarms_of(Path("runs/parts")) == alarms_of(Path("runs/whole"))
    assert steps_of(Path("runs/parts")) == steps_of(Path("runs/whole"))


def test_alarms_of_steps_that_are_trained_again_are_forgotten() -> None:
    write(**ONES)
    train()
    run = Path("runs/recipe")
    before = alarms_of(run)
    assert before[0]["step"] > 4
    # As if it had been killed behind the alarm, with a checkpoint from before it.
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(manifest | {"status": "running", "ended": None}))
    (run / "checkpoints" / "latest").write_text("step-000012\n")
    train()
    assert alarms_of(run) == before


def test_an_alarm_stops_the_run_where_that_was_asked_for() -> None:
    write(**ONES)
    failed = train("alarms.action=stop", code=1)
    run = Path("runs/recipe")
    [alarm] = alarms_of(run)
    assert alarm["what"] in failed.stderr
    assert f"alarms.repetition, step {alarm['step']}" in failed.stderr
    assert "alarms.action=warn" in failed.stderr
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["status"] == "failed"
    # The step that raised it is there to be looked at, and no checkpoint of it.
    assert max(step for _, step, _ in steps_of(run)) == alarm["step"]
    assert (run / f"episodes/step-{alarm['step']:06d}.parquet").exists()
    assert (run / "checkpoints/latest").read_text().strip() < f"step-{alarm['step']:06d}"
    # The same again stops at the same step; to warn goes on to the end.
    assert alarm["what"] in train("alarms.action=stop", code=1).stderr
    train("alarms.action=warn")
    train("run.name=whole")
    assert weights_of(run) == weights_of(Path("runs/whole"))
    assert alarms_of(run) == alarms_of(Path("runs/whole"))


# --- a second opinion ----------------------------------------------------------------------------------------------


def test_a_verifier_that_is_fooled_is_found_out() -> None:
    write(**FOOLED)
    train()
    run = Path("runs/recipe")
    [alarm] = [one for one in alarms_of(run) if one["name"] == "second_opinion"]
    [example] = [one for one in episodes_of(run) if (one.group, one.sample) == (alarm["group"], alarm["sample"])]
    assert example.correct
    assert "0" not in example.completion_text
    for line in (line for kind, _, line in steps_of(run) if kind == "train"):
        assert 0 <= line["alarms/disagreement_at_least"] <= line["alarms/disagreement"] <= 1
    # "of 47 completions that count as correct …": half of those that there were.
    asked = int(alarm["what"].split()[1])
    right = sum(bool(one.correct) for one in episodes_of(run) if one.group // 4 < alarm["step"])
    assert 0.3 * right < asked < 0.7 * right


def test_with_the_same_verifier_there_is_nothing_to_disagree_about() -> None:
    write(**FOOLED)
    train("alarms.second_opinion.verifiers=[{kind: regex, pattern: '[0-4]'}]")
    assert [one for one in alarms_of(Path("runs/recipe")) if one["name"] == "second_opinion"] == []
    assert {line["alarms/disagreement"] for kind, _, line in steps_of(Path("runs/recipe")) if kind == "train"} == {0.0}


def test_a_second_opinion_that_fails_ends_the_run_in_its_first_step() -> None:
    write(**FOOLED)
    failed = train("alarms.second_opinion.verifiers=[{kind: python, function: tiny_rewards:not_a_number}]", code=1)
    assert "alarms.second_opinion.verifiers, python" in failed.stderr


def test_a_second_opinion_is_checked_before_anything_is_loaded() -> None:
    write(**FOOLED)
    failed = train("alarms.second_opinion.verifiers=[{kind: python, function: nowhere:nothing}]", code=2)
    assert "alarms.second_opinion.verifiers.0" in failed.stderr
    failed = train("alarms.second_opinion.verifiers=[{kind: exact, when: {level: 3}}]", code=2)
    assert "alarms.second_opinion.verifiers.0.when" in failed.stderr
    failed = train("alarms.second_opinion.verifiers=[{kind: environment}]", code=2)
    assert "environment" in failed.stderr
    assert not Path("runs").exists()


def test_a_sample_has_the_share_that_was_asked_for_and_depends_on_its_key_alone() -> None:
    drawn = [is_drawn(0.2, 0, step, place) for step in range(100) for place in range(100)]
    assert 1850 < sum(drawn) < 2150
    assert drawn == [is_drawn(0.2, 0, step, place) for step in range(100) for place in range(100)]
    assert drawn != [is_drawn(0.2, 1, step, place) for step in range(100) for place in range(100)]
    assert all(is_drawn(1.0, n) for n in range(100))
