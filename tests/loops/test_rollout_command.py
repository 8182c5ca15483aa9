"""`strop rollout`: what is in the file, that it is there whole or not at all, and going on after a stop."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import tiny_rewards
import yaml
from tiny_runs import command, environment, episodes_of, recipe
from typer.testing import CliRunner

from strop.cli import app
from strop.config.loading import load_config
from strop.errors import RunFailure, UserError
from strop.loops.rollout import rollout
from strop.loops.train import train
from strop.tracking.rollouts import COLUMNS


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    tiny_rewards.STATE.clear()
    return tmp_path


def config(**changes: Any) -> Any:
    return load_config(None, data=recipe(**changes))


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


# --- what is in the file -------------------------------------------------------------------------------------------


def test_the_rollouts_of_a_recipe_are_what_its_run_samples_first() -> None:
    settings = config(**{"rollout.temperature": 0.8})
    summary = train(settings)
    found = rollout(settings, "out.jsonl", prompts=4)
    assert (found.prompts, found.completions, found.errors, found.resumed) == (4, 16, 0, 0)
    first = [record for record in episodes_of(summary.folder) if record.group < 4]
    written = rows("out.jsonl")
    assert len(written) == len(first) == 16
    for row, record in zip(written, first, strict=True):
        assert [row["group"], row["sample"], row["prompt_id"]] == [record.group, record.sample, record.prompt_id]
        assert row["prompt_ids"] + row["completion_ids"] == record.tokens.tolist()
        assert record.sampler_logprobs is not None
        kept = record.sampler_logprobs[record.loss_mask]
        assert np.array_equal(np.asarray(row["logprobs"], dtype=np.float32), kept)
        assert (row["reward"], row["components"], row["status"]) == (record.reward, record.components, record.status)
        assert (row["completion"], row["correct"], row["temperature"]) == (record.completion_text, record.correct, 0.8)
        assert (row["prompt"], row["answer"]) == (record.row["prompt"], record.row["answer"])
        assert (row["model"], row["weight_version"]) == ("created", 0)
        assert len(row["model_fingerprint"]) == 16
    assert found.reward == pytest.approx(sum(row["reward"] for row in written) / 16)
    assert found.length == pytest.approx(sum(len(row["completion_ids"]) for row in written) / 16)


def test_parquet_and_json_lines_hold_the_same(place: Path) -> None:
    messages = [[{"role": "user", "content": str(n)}, {"role": "user", "content": "+"}] for n in range(3)]
    data = [{"prompt": prompt, "answer": n, "level": None if n else 0.5} for n, prompt in enumerate(messages)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    rewards = {"rewards.verifiers": [{"kind": "regex", "pattern": "1"}]}
    settings = config(model=chatty(place), **{"data.train": {"path": "rows.jsonl"}, **rewards})
    for name in ("out.jsonl", "out.parquet"):
        rollout(settings, name)
    lines, table = rows("out.jsonl"), parquet.read_table("out.parquet").to_pylist()
    assert len(lines) == len(table) == 12
    for line, row in zip(lines, table, strict=True):
        assert list(row) == [*COLUMNS, "level"] == list(line)
        row["components"] = dict(row["components"])
        assert row == line
    assert lines[0]["prompt"] in messages


def chatty(folder: Path) -> dict[str, Any]:
    """A model whose tokenizer has a chat template."""
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    model, tokenizer = create_model(NewModel(characters="0123456789+=u:", hidden_size=32, layers=1, heads=2), seed=0)
    tokenizer.chat_template = "{% for m in messages %}{{ 'u:' + m['content'] }}{% endfor %}"
    save_model(model, tokenizer, folder / "chatty")
    return {"path": "chatty"}


def test_columns_of_the_data_travel_and_none_is_lost() -> None:
    """A column with the name of one of the file's is kept under another."""
    data = {"prompt": "1+2=", "answer": "3", "reward": 9, "hint": [1, {"a": math.pi}], "group": "first"}
    Path("rows.jsonl").write_text(json.dumps(data) + "\n")
    rollout(config(**{"data.train": {"path": "rows.jsonl"}}), "out.jsonl", samples=2)
    [one, two] = rows("out.jsonl")
    assert (one["hint"], one["row_reward"], one["row_group"], one["group"]) == (data["hint"], 9, "first", 0)
    assert "row_prompt" not in one
    assert (one["sample"], two["sample"]) == (0, 1)


def test_of_a_run_a_checkpoint_can_be_named() -> None:
    summary = train(config(**{"checkpoint.every": 1, "checkpoint.keep": 3, "run.name": "r"}))
    assert summary.steps == 2
    for step in (0, 2):
        run("rollout", "runs/r", "--out", f"{step}.jsonl", "--checkpoint", str(step), "--prompts", "2")
    run("rollout", "runs/r", "--out", "latest.jsonl", "--prompts", "2")
    assert rows("latest.jsonl") == rows("2.jsonl")
    assert {row["weight_version"] for row in rows("2.jsonl")} == {2}
    before, after = rows("0.jsonl"), rows("2.jsonl")
    assert before[0]["model_fingerprint"] != after[0]["model_fingerprint"]
    assert [row["completion_ids"] for row in before] != [row["completion_ids"] for row in after]
    # Those of step 0 are what the run itself sampled.
    sampled = [record.completion_text for record in episodes_of(Path("runs/r")) if record.group < 2]
    assert [row["completion"] for row in before] == sampled


def test_of_a_run_whose_data_has_no_answers() -> None:
    """Its own recipe has every default written out, the name of the answer column too."""
    Path("rows.jsonl").write_text('{"prompt": "1+2="}\n' * 4)
    train(config(**{"data.train": {"path": "rows.jsonl"}, "run.name": "r"}))
    run("rollout", "runs/r", "--out", "out.jsonl")
    assert {row["answer"] for row in rows("out.jsonl")} == {None}
    assert run("replay", "runs/r", "--step", "1").exit_code == 0


def test_for_remax_the_most_likely_completion_is_there_too() -> None:
    found = rollout(config(**{"algorithm.name": "remax", "rollout.group_size": 2}), "out.jsonl", prompts=3)
    written = rows("out.jsonl")
    assert [row["sample"] for row in written] == [0, 1, -1] * 3
    assert [row["temperature"] for row in written] == [1.0, 1.0, 0.0] * 3
    assert all(row["reward"] is not None for row in written)
    assert found.completions == 6


def test_without_verifiers_nothing_is_scored() -> None:
    data = recipe(**{"data.train.arguments": {"count": 5, "digits": 1}, "supervised": {"method": "sft"}})
    del data["rewards"]
    found = rollout(load_config(None, data=data), "out.jsonl")
    assert (found.prompts, found.completions) == (5, 20)
    assert math.isnan(found.reward)
    assert math.isnan(found.accuracy)
    assert {(row["reward"], row["correct"], row["status"]) for row in rows("out.jsonl")} <= {
        (None, None, "stop"), (None, None, "length")
    }  # fmt: skip


def test_what_could_not_be_verified_has_its_status_and_no_reward() -> None:
    rewards = {
        "verifiers": [{"kind": "python", "function": "tiny_rewards:fails_later"}], "retries": 0, "max_error_share": 0.1
    }  # fmt: skip
    found = rollout(config(rewards=rewards), "out.jsonl", prompts=8)
    assert found.errors == 1
    [failed] = [row for row in rows("out.jsonl") if row["status"] == "verifier_error"]
    assert failed["reward"] is None
    assert "returned nan" in failed["detail"]


def test_more_prompts_than_rows_go_on_in_the_next_epoch() -> None:
    rollout(config(**{"data.train.arguments.count": 3, "rollout.group_size": 2}), "out.jsonl", prompts=5)
    written = rows("out.jsonl")
    assert sorted({row["prompt_id"] for row in written[:6]}) == ["row-000000", "row-000001", "row-000002"]
    assert [row["group"] for row in written] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


# --- whole or not at all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what", "mend"),
    [
        (["--out", "there.jsonl"], "there.jsonl exists already", "--force"),
        (["--out", "out.csv"], "neither JSON lines nor Parquet", ".jsonl or .parquet"),
        (["--out", "no/out.jsonl"], "there is no folder no", "mkdir -p no"),
        (["--out", "folder.jsonl"], "folder.jsonl is a folder", "name a file in it"),
        (["--out", "out.jsonl", "--checkpoint", "1"], "--checkpoint is a step of a run", "model.path"),
        (["--out", "out.jsonl", "model.path=nowhere", "model.create=null"], "there is no model folder", "check the"),
        (["--out", "out.jsonl", "offline={}", "rewards=null"], "trains on completions", "model.path"),
        (["--out", "out.jsonl", "data.train.path=gone.jsonl"], "there is no such file", "Did you mean"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    place: Path, arguments: list[str], what: str, mend: str
) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe()))
    Path("there.jsonl").write_text("mine\n")
    Path("folder.jsonl").mkdir()
    before = sorted(place.rglob("*"))
    result = run("rollout", "recipe.yaml", *arguments, code=2)
    assert what in result.stderr
    assert mend in result.stderr
    assert sorted(place.rglob("*")) == before
    assert Path("there.jsonl").read_text() == "mine\n"


def test_of_a_run_without_that_checkpoint_or_of_no_run() -> None:
    train(config(**{"run.name": "r"}))
    result = run("rollout", "runs/r", "--out", "out.jsonl", "--checkpoint", "1", code=2)
    assert "no checkpoint of step 1" in result.stderr
    assert "it has those of steps 0, 2" in result.stderr
    result = run("rollout", "runs", "--out", "out.jsonl", code=2)
    assert "is not the folder of a run" in result.stderr
    assert "strop rollout RECIPE model.path=runs" in result.stderr


def test_force_replaces_a_file() -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe()))
    Path("out.jsonl").write_text("mine\n")
    result = run("rollout", "recipe.yaml", "--out", "out.jsonl", "--force", "--prompts", "2", "--samples", "1")
    assert "2 completions of 2 prompts written to out.jsonl" in result.stdout
    assert len(rows("out.jsonl")) == 2


def flawed(**changes: Any) -> Any:
    """Verifiers that fail in the second window stop the rollout there."""
    rewards = {"verifiers": [{"kind": "python", "function": "tiny_rewards:fails_later"}], "retries": 0}
    return config(rewards=rewards, **{"rewards.max_error_share": 0.0, **changes})


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_what_failed_goes_on_where_it_was(place: Path, name: str) -> None:
    with pytest.raises(RunFailure, match="max_error_share"):
        rollout(flawed(), name, prompts=10)
    assert [path.name for path in place.iterdir()] == [f".{name}.partial"]
    partial = place / f".{name}.partial"
    assert len(partial.read_text().splitlines()) == 1 + 16
    # A process that was killed in the middle of a group leaves half of it, and half a line.
    with partial.open("a") as file:
        file.write(json.dumps({"group": 4, "sample": 0}) + '\n{"group": 4, "sam')
    found = rollout(flawed(), name, prompts=10)
    assert (found.resumed, found.completions) == (4, 40)
    assert [path.name for path in place.iterdir()] == [name]
    rollout(flawed(), f"whole-{name}", prompts=10)
    assert (place / name).read_bytes() == (place / f"whole-{name}").read_bytes()


def test_what_fails_before_the_first_group_leaves_nothing(place: Path) -> None:
    broken = config(rewards={"verifiers": [{"kind": "python", "function": "tiny_rewards:not_a_number"}]})
    with pytest.raises(RunFailure, match="in the first step of a run none may fail"):
        rollout(broken, "out.jsonl", prompts=10)
    assert list(place.iterdir()) == []


def test_other_rollouts_do_not_go_on_with_it(place: Path) -> None:
    with pytest.raises(RunFailure):
        rollout(flawed(), "out.jsonl", prompts=10)
    found = rollout(flawed(**{"run.seed": 1}), "out.jsonl", prompts=10)
    assert (found.resumed, found.completions) == (0, 40)
    rollout(flawed(**{"run.seed": 1}), "again.jsonl", prompts=10)
    assert Path("out.jsonl").read_bytes() == Path("again.jsonl").read_bytes()


def test_two_at_once_are_refused() -> None:
    from strop.tracking.rollouts import RolloutFile

    held = RolloutFile(Path("out.jsonl"), key="k", per_group=1)
    with pytest.raises(UserError, match="another process writes this file"):
        rollout(config(), "out.jsonl")
    held.close()


def test_killed_and_given_again(place: Path) -> None:
    data = recipe(**{"rewards.verifiers.0.function": "tiny_rewards:unhurried", "rollout.group_size": 2})
    Path("recipe.yaml").write_text(yaml.safe_dump(data))
    arguments = ["rollout", "recipe.yaml", "--out", "out.jsonl", "--prompts", "24"]
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    partial, give_up = place / ".out.jsonl.partial", time.monotonic() + 120
    while not partial.exists() or partial.read_bytes().count(b"\n") < 1 + 16:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not Path("out.jsonl").exists()
    found = rollout(load_config("recipe.yaml"), "out.jsonl", prompts=24)
    assert found.resumed >= 8
    rollout(load_config("recipe.yaml"), "whole.jsonl", prompts=24)
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
