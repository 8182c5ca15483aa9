"""`strop replay`: a step trained again without sampling comes out bit for bit, or it is said where not; and nothing in
the run's folder is touched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_rewards
from tiny_runs import HELD_OUT, recipe
from typer.testing import CliRunner

from strop.cli import app
from strop.config.loading import load_config
from strop.config.model import NewModel
from strop.errors import UserError
from strop.loops.replay import Replay, replay
from strop.loops.rollout import rollout
from strop.loops.train import train
from strop.models.create import create_model
from strop.models.save import save_model
from strop.tracking.episodes import beside, episodes_file, read_episodes, write_episodes

KEPT = {"checkpoint.every": 1, "checkpoint.keep": 10, "run.name": "r"}
RARE = [{"kind": "regex", "pattern": "^[0-4]"}]
WARMUP = {"steps": 3, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
RUN = Path("runs/r")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    tiny_rewards.STATE.clear()


def trained(**changes: Any) -> list[dict[str, float]]:
    """Train a run of three steps in which everything is kept; returns the metrics of its steps."""
    train(load_config(None, data=recipe(**{**KEPT, "run.steps": 3, **changes})), fresh=True)
    return metrics()


def metrics() -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


def everything(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def again(*steps: int) -> list[Replay]:
    before = everything(RUN)
    found = [replay(RUN, step) for step in steps]
    assert everything(RUN) == before
    return found


def command(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["replay", str(RUN), *arguments])
    assert "Traceback" not in result.output
    return result


# --- bit for bit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"training.mini_batches": 2, "training.epochs": 2, "algorithm.kl_coef": 0.1}, id="a reference"),
        pytest.param({"warmup": WARMUP, "algorithm.kl_coef": 0.1}, id="a reference that a warm-up made"),
        pytest.param(
            {"algorithm.name": "ppo", "critic": {"optimizer": {"learning_rate": 1e-2}, "warmup_steps": 1}},
            id="ppo with a critic",
        ),
        pytest.param({"algorithm.name": "remax"}, id="remax"),
        pytest.param({"model.lora": {"rank": 4, "dropout": 0.2}}, id="dropout"),
        pytest.param({"model.dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"algorithm.overlong.filter": True}, id="filtered"),
        pytest.param({"algorithm.correction": {"kind": "mask", "low": 0.9999999, "high": 1.0}}, id="masked"),
        pytest.param({"data.eval": HELD_OUT, "evaluation.every": 1}, id="evaluated"),
        pytest.param({"algorithm.without_spread": "drop", "rewards.verifiers": RARE}, id="dropped groups"),
    ],
)
def test_every_step_comes_out_again(changes: dict[str, Any]) -> None:
    lines = trained(**changes)
    for step, found in enumerate(again(1, 2, 3), start=1):
        assert list(found.differences) == []
        assert found.weights.startswith(f"step-{step:06d}, ")
        assert found.now["loss" if "loss" in found.now else "critic/loss"] == found.before.get(
            "loss", found.before.get("critic/loss")
        )
        assert found.now["reward/mean"] == lines[step - 1]["reward/mean"]
        assert len(found.now) > 25


def test_so_does_dynamic_sampling_with_the_groups_that_it_replaced() -> None:
    lines = trained(**{"algorithm.name": "dapo", "rewards.verifiers": RARE, "algorithm.max_refills": 2})
    assert any(line["groups/refills"] == 2 for line in lines), "the test needs groups that were replaced twice"
    for step, found in enumerate(again(1, 2, 3), start=1):
        assert list(found.differences) == []
        for name in ("groups/discarded", "groups/refills", "groups/sampled", "reward/mean", "completion/length_mean"):
            assert found.now[name] == lines[step - 1][name]
    # What was replaced is in a file of its own, and the step's own file is what it was.
    step = next(at for at, line in enumerate(lines, start=1) if line["groups/discarded"])
    path = episodes_file(RUN / "episodes", step)
    assert len(read_episodes(path)) == 16
    others = read_episodes(beside(path))
    assert len(others) == 4 * lines[step - 1]["groups/discarded"]
    for at in range(0, len(others), 4):
        assert len({record.reward for record in others[at : at + 4]}) == 1


def test_so_do_episodes_of_several_streams() -> None:
    """The chat template leaves out what the policy said before, so that its turns have no tokens in common."""
    settings = NewModel(characters="0123456789+=u:", hidden_size=32, layers=1, heads=2, context=512)
    model, tokenizer = create_model(settings, seed=4)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'u:' + m['content'] }}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'].split('+')[-1] }}{% endif %}{% endfor %}"
    )
    save_model(model, tokenizer, Path("forgetful"))
    trained(
        model={"path": "forgetful"},
        environment={"kind": "python", "factory": "tiny_worlds:Asks"},
        rewards={"verifiers": RARE},
        **{"data.render": "chat", "rollout.max_new_tokens": 12},
    )
    for step, found in enumerate(again(1, 2, 3), start=1):
        assert list(found.differences) == []
        records = read_episodes(episodes_file(RUN / "episodes", step))
        places: dict[tuple[int, int], list[int]] = {}
        for record in records:
            places.setdefault((record.group, record.sample), []).append(record.stream)
        assert len(places) == 16
        assert all(streams == list(range(len(streams))) for streams in places.values())
        assert len(records) > 16, "the test needs episodes that forked"


def test_baselines_are_kept_beside_the_groups() -> None:
    trained(**{"algorithm.name": "remax"})
    others = read_episodes(beside(episodes_file(RUN / "episodes", 1)))
    assert [(record.group, record.sample) for record in others] == [(number, -1) for number in range(4)]


def test_what_was_left_out_is_left_out_again() -> None:
    rewards = {"verifiers": [{"kind": "python", "function": "tiny_rewards:fails_later"}], "retries": 0}
    trained(rewards=rewards)
    [found] = again(2)
    assert list(found.differences) == []
    assert found.now["errors/share"] == 1 / 16
    assert found.sequences == 15


def test_an_offline_run_reads_its_groups_again() -> None:
    rollout(load_config(None, data=recipe()), "out.jsonl", prompts=10)
    data = recipe(
        **{**KEPT, "data": {"train": {"path": "out.jsonl"}}, "offline": {"logprobs": "compute"}, "run.steps": 4}
    )
    del data["rewards"], data["rollout"]["group_size"]
    train(load_config(None, data=data), fresh=True)
    assert [list(found.differences) for found in again(1, 2, 4)] == [[], [], []]


def test_a_step_that_a_resumed_run_did() -> None:
    trained(**{"run.steps": 2})
    train(load_config(None, data=recipe(**{**KEPT, "run.steps": 4})))
    assert [list(found.differences) for found in again(2, 3, 4)] == [[], [], []]


def test_without_the_checkpoint_behind_it_the_numbers_are_compared() -> None:
    trained()
    shutil.rmtree(RUN / "checkpoints" / "step-000003")
    (RUN / "checkpoints" / "latest").write_text("step-000002\n")
    [found] = again(3)
    assert found.equal
    assert found.weights == "not compared: there is no step-000003"


# --- what is printed -----------------------------------------------------------------------------------------------


def test_the_command_shows_the_numbers_and_says_bit_equal() -> None:
    [first, *_] = trained()
    result = command("--step", "1")
    assert result.exit_code == 0
    assert "step 1 of runs/r, trained again on 16 sequences" in result.stdout
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert lines["reward/mean"][0] == lines["reward/mean"][1]
    assert lines["grad_norm"][0] == lines["grad_norm"][1] == f"{first['grad_norm']:.3f}"
    assert lines["parameters"][0] == "step-000001,"
    assert result.stdout.splitlines()[-1] == "bit-equal"


def tamper_with_a_reward() -> None:
    path = episodes_file(RUN / "episodes", 2)
    records = read_episodes(path)
    records[3] = replace(records[3], reward=records[3].reward + 1.0)
    write_episodes(path, records)


def tamper_with_a_token() -> None:
    path = episodes_file(RUN / "episodes", 2)
    records = read_episodes(path)
    tokens = records[0].tokens.copy()
    tokens[-1] = 5 if tokens[-1] != 5 else 6
    records[0] = replace(records[0], tokens=tokens)
    write_episodes(path, records)


def tamper_with_a_metric() -> None:
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 2:
            line["metrics"]["grad_norm"] += 1e-9
    (RUN / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def tamper_with_a_weight() -> None:
    from safetensors.torch import load_file, save_file

    path = RUN / "checkpoints" / "step-000002" / "state" / "trainable.safetensors"
    weights = load_file(path)
    name = sorted(weights)[0]
    weights[name].view(-1)[0] += 1e-6
    save_file(weights, path)


@pytest.mark.parametrize(
    ("tamper", "first"),
    [
        (tamper_with_a_reward, "differs first in advantages: group 4, sample "),
        (tamper_with_a_token, "differs first in trainer_logprobs: group 4, sample 0, token "),
        (tamper_with_a_metric, "differs first in metric grad_norm: "),
        (tamper_with_a_weight, "differs first in trainable.safetensors: "),
    ],
)
def test_what_differs_is_said_and_the_exit_code_is_1(tamper: Callable[[], None], first: str) -> None:
    trained()
    tamper()
    before = everything(RUN)
    result = command("--step", "2")
    assert everything(RUN) == before
    assert result.exit_code == 1
    assert first in result.stdout
    assert not result.stdout.endswith("bit-equal\n")


# --- what cannot be ------------------------------------------------------------------------------------------------


def test_a_step_without_its_checkpoint_names_those_that_can_be() -> None:
    trained(**{"checkpoint.every": 2, "run.steps": 5})
    result = command("--step", "2")
    assert result.exit_code == 2
    assert "step 2 cannot be replayed: the checkpoint before it, checkpoints/step-000001 was not kept" in result.stderr
    assert "steps that can be: 1, 3, 5." in result.stderr
    assert "checkpoint.every=1 tracking.episodes_every=1" in result.stderr
    assert all(found.equal for found in again(1, 3, 5))


def test_a_step_without_its_episodes() -> None:
    trained(**{"tracking.episodes_every": 2})
    with pytest.raises(UserError, match=r"its completions, episodes/step-000003\.parquet was not kept") as caught:
        replay(RUN, 3)
    assert "steps that can be: 2." in caught.value.mend


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"algorithm.name": "dapo", "rewards.verifiers": RARE}, "the groups that dynamic"),
        ({"algorithm.name": "remax"}, "its baselines were not kept"),
    ],
)  # fmt: skip
def test_a_step_of_an_older_version_that_kept_less(changes: dict[str, Any], what: str) -> None:
    trained(**changes)
    shutil.rmtree(RUN / "episodes" / "beside")
    with pytest.raises(UserError, match=what):
        replay(RUN, 1)


def test_a_step_that_was_never_trained_and_a_folder_that_is_no_run() -> None:
    trained()
    with pytest.raises(UserError, match="has not trained step 9; it has steps 1 to 3"):
        replay(RUN, 9)
    with pytest.raises(UserError, match="there is no run in this folder"):
        replay("runs", 1)


def test_a_run_of_many_processes_is_not_replayed_in_one() -> None:
    trained(**{"run.steps": 1})
    path = RUN / "config.yaml"
    text = path.read_text()
    assert "cluster:\n  kind: local" in text
    path.write_text(text.replace("cluster:\n  kind: local", "cluster:\n  kind: ray"))
    with pytest.raises(UserError, match="trained by several processes"):
        replay(RUN, 1)


def test_learning_from_examples_has_nothing_to_replay() -> None:
    data = recipe(**{**KEPT, "supervised": {"method": "sft", "batch_size": 4}})
    del data["rewards"], data["rollout"]
    train(load_config(None, data=data), fresh=True)
    with pytest.raises(UserError, match="this run learns from examples"):
        replay(RUN, 1)


def test_a_resumed_run_drops_what_it_kept_beside_later_steps() -> None:
    trained(**{"algorithm.name": "remax"})
    shutil.rmtree(RUN / "checkpoints" / "step-000003")
    (RUN / "checkpoints" / "latest").write_text("step-000001\n")
    train(load_config(None, data=recipe(**{**KEPT, "algorithm.name": "remax", "run.steps": 2})))
    assert sorted(path.name for path in (RUN / "episodes" / "beside").iterdir()) == [
        "step-000001.parquet", "step-000002.parquet"
    ]  # fmt: skip
