"""Pipelines: stage after stage, skipped when done, gone on with where they stopped, never kept when they are stale."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import recipe, steps_of, weights_of
from tiny_stages import PAIRS, pipeline
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.config.loading import load_config
from strop.config.pipeline_loading import load_pipeline
from strop.errors import ConfigError, RunFailure, UserError
from strop.loops.pipeline import PipelineSummary
from strop.loops.supervised_run import SupervisedRun
from strop.models.find import resolve_model
from strop.tracking.runs import list_runs


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


FOLDER = Path("runs/pipeline")


def train(data: dict[str, Any], *overrides: str, **options: Any) -> PipelineSummary:
    return strop.train(load_pipeline(None, overrides, data=data), **options)


def entries(folder: Path = FOLDER) -> dict[str, tuple[str, str | None]]:
    """Status and run of each stage, as the manifest has them."""
    return {
        stage["name"]: (stage["status"], stage["run"])
        for stage in json.loads((folder / "pipeline.json").read_text())["stages"]
    }


def everything() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


# --- in order ------------------------------------------------------------------------------------------------------


def test_stages_are_trained_in_order_each_as_an_ordinary_run() -> None:
    summary = train(pipeline())
    assert summary.folder == FOLDER
    assert list(summary.stages) == ["sft", "judge", "ppo"]
    assert entries() == {name: ("finished", name) for name in ("sft", "judge", "ppo")}
    assert summary.model == FOLDER / "ppo" / "checkpoints" / "step-000004" / "model"
    assert summary.stages["sft"].after["loss"] < summary.stages["sft"].before["loss"]
    manifests = {name: json.loads((FOLDER / name / "run.json").read_text()) for name in summary.stages}
    assert manifests["judge"]["parent"] == manifests["ppo"]["parent"] == manifests["sft"]["id"]
    made_by = {key: (model["run"], model["checkpoint"]) for key, model in manifests["ppo"]["inputs"].items()}
    assert made_by == {
        "model.path": (manifests["sft"]["id"], "step-000006"),
        "critic.path": (manifests["judge"]["id"], "step-000006"),
        "rewards.verifiers.0.path": (manifests["judge"]["id"], "step-000006"),
    }
    assert sorted(info.name for info in list_runs("runs")) == ["pipeline/judge", "pipeline/ppo", "pipeline/sft"]


def test_a_stage_is_the_run_that_its_recipe_would_be_alone() -> None:
    data = pipeline()
    stages = train(data).stages
    for name in ("sft", "judge", "ppo"):
        text = (FOLDER / name / "config.yaml").read_text()
        alone = strop.train(load_config(None, ["run.folder=alone"], data=yaml.safe_load(text)))
        assert weights_of(alone.folder) == weights_of(stages[name].folder)
        assert steps_of(alone.folder) == steps_of(stages[name].folder)


def test_what_is_done_is_skipped_with_a_line() -> None:
    data = pipeline(**{"defaults.tracking.display": "plain"})
    Path("pipeline.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    first = run("train", "pipeline.yaml")
    assert first.exit_code == 0, first.output
    assert "stage 2 of 3: judge" in first.stdout
    assert "pipeline: finished, 3 of 3 stages done" in first.stdout
    [row] = [line for line in first.stdout.splitlines() if line.startswith("  sft ")]
    assert "6/6 steps" in row
    assert " → " in row
    before = {path: content for path, content in everything().items() if not path.endswith("pipeline.json")}
    again = run("train", "pipeline.yaml")
    assert again.exit_code == 0, again.output
    skipped = [line for line in again.stdout.splitlines() if ": done, skipped" in line]
    assert [line.split(":")[0] for line in skipped] == ["stage sft", "stage judge", "stage ppo"]
    assert "training" not in again.stdout
    assert before == {path: content for path, content in everything().items() if not path.endswith("pipeline.json")}
    shown = run("runs", "show", "pipeline")
    assert shown.stdout.splitlines()[0] == "pipeline: finished, 3 of 3 stages done"
    assert "next    strop runs show runs/pipeline/ppo" in shown.stdout


def test_the_summary_of_what_is_skipped_is_that_of_its_run() -> None:
    assert train(pipeline()) == train(pipeline())


def test_more_steps_of_the_last_stage_go_on() -> None:
    whole = train(pipeline(), "stages.ppo.run.steps=6", "name=whole")
    train(pipeline())
    longer = train(pipeline(), "stages.ppo.run.steps=6")
    assert weights_of(longer.stages["ppo"].folder) == weights_of(whole.stages["ppo"].folder)
    assert entries()["ppo"] == ("finished", "ppo")


def test_fresh_is_a_new_pipeline() -> None:
    train(pipeline())
    assert train(pipeline(), fresh=True).folder == Path("runs/pipeline-2")
    # The newest is the one that goes on.
    assert train(pipeline()).folder == Path("runs/pipeline-2")


def test_the_best_checkpoint_of_a_stage_can_be_the_next_ones_beginning() -> None:
    data = pipeline(
        **{
            # The loss rises at this learning rate, so that the best is not the last.
            "stages.sft.training": {"optimizer": {"learning_rate": 1.0}},
            "stages.sft.checkpoint": {"keep": 1, "best": {"metric": "eval/loss"}},
            "stages.judge.model.path": "stage:sft@best",
        }
    )
    summary = train(data)
    best = summary.stages["sft"].best
    assert best is not None
    assert best != summary.stages["sft"].model
    inputs = json.loads((FOLDER / "judge" / "run.json").read_text())["inputs"]
    assert inputs["model.path"]["folder"] == str(best)
    assert train(data) == summary


# --- stops ---------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stop_at(stage, error)`: that stage raises the error instead of training; None lets all train again."""
    from strop.loops import pipeline as room

    real = room.train_run

    def prepare(stage: str | None, error: BaseException = KeyboardInterrupt()) -> None:
        def train_run(config: strop.Config, **options: Any) -> Any:
            if config.run.name == stage:
                raise error
            return real(config, **options)

        monkeypatch.setattr(room, "train_run", train_run)

    return prepare


def test_a_stop_and_a_failure_say_where_they_happened(stop_at: Any) -> None:
    stop_at("judge")
    with pytest.raises(KeyboardInterrupt):
        train(pipeline())
    assert entries()["judge"][0] == "interrupted"
    assert json.loads((FOLDER / "pipeline.json").read_text())["status"] == "interrupted"
    stop_at("ppo", RunFailure("the disk is full", where="here", mend="make room"))
    with pytest.raises(RunFailure, match="stage ppo: the disk is full") as caught:
        train(pipeline())
    assert caught.value.mend == "make room"
    manifest = json.loads((FOLDER / "pipeline.json").read_text())
    assert (manifest["status"], manifest["error"]) == ("failed", "stage ppo: the disk is full")
    assert entries()["judge"] == ("finished", "judge")
    stop_at(None)
    assert train(pipeline()).stages["ppo"].steps == 4
    assert json.loads((FOLDER / "pipeline.json").read_text())["status"] == "finished"


def test_a_stage_that_is_asked_to_leave_ends_the_pipeline_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(pipeline(**{"name": "whole"}))
    update = SupervisedRun.update

    async def asked(self: SupervisedRun, *given: Any) -> Any:
        if self.config.run.name == "judge" and self.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return await update(self, *given)

    monkeypatch.setattr(SupervisedRun, "update", asked)
    left = train(pipeline())
    assert list(left.stages) == ["sft", "judge"]
    assert left.stages["judge"].steps == 3
    assert {stage: status for stage, (status, _) in entries().items()} == {
        "sft": "finished",
        "judge": "interrupted",
        "ppo": "waiting",
    }
    assert json.loads((FOLDER / "pipeline.json").read_text())["status"] == "interrupted"
    monkeypatch.setattr(SupervisedRun, "update", update)
    found = train(pipeline())
    assert list(found.stages) == ["sft", "judge", "ppo"]
    assert weights_of(found.stages["ppo"].folder) == weights_of(whole.stages["ppo"].folder)


def test_a_real_failure_of_a_stage_is_the_pipelines() -> None:
    data = pipeline(**{"stages.ppo.rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:not_a_number"}]})
    with pytest.raises(RunFailure, match=r"stage ppo: .*not_a_number"):
        train(data)
    assert entries() == {"sft": ("finished", "sft"), "judge": ("finished", "judge"), "ppo": ("failed", "ppo")}


# --- stages that have changed --------------------------------------------------------------------------------------


def test_a_changed_stage_is_refused_or_trained_anew_with_all_that_use_it() -> None:
    first = train(pipeline())
    kept = weights_of(first.stages["sft"].folder)
    before = everything()
    with pytest.raises(UserError, match=r"stage judge: the recipe has changed .*batch_size: 8 -> 4") as caught:
        train(pipeline(), "stages.judge.supervised.batch_size=4")
    assert "--retrain judge" in caught.value.mend
    assert everything() == before
    again = train(pipeline(), "stages.judge.supervised.batch_size=4", retrain=["judge"])
    assert entries() == {"sft": ("finished", "sft"), "judge": ("finished", "judge-2"), "ppo": ("finished", "ppo-2")}
    assert weights_of(again.stages["sft"].folder) == kept
    assert weights_of(again.stages["ppo"].folder) != weights_of(first.stages["ppo"].folder)
    stages = json.loads((FOLDER / "pipeline.json").read_text())["stages"]
    assert [stage["replaced"] for stage in stages] == [[], ["judge"], ["ppo"]]
    # From here on the new recipe is the one that is done.
    assert train(pipeline(), "stages.judge.supervised.batch_size=4") == again


def test_training_anew_that_was_stopped_goes_on_without_being_asked_again(stop_at: Any) -> None:
    train(pipeline())
    stop_at("judge")
    with pytest.raises(KeyboardInterrupt):
        train(pipeline(), "stages.sft.supervised.batch_size=4", retrain=["sft"])
    assert entries() == {
        "sft": ("finished", "sft-2"),
        "judge": ("interrupted", "judge-2"),
        "ppo": ("waiting", None),
    }
    stop_at(None)
    train(pipeline(), "stages.sft.supervised.batch_size=4")
    assert entries() == {name: ("finished", f"{name}-2") for name in ("sft", "judge", "ppo")}


def test_a_stage_is_not_kept_when_what_it_began_with_is_to_be_trained_further() -> None:
    train(pipeline())
    before = everything()
    with pytest.raises(UserError, match=r"stage judge: it was trained from what stage sft had made, .* further"):
        train(pipeline(), "stages.sft.run.steps=8")
    assert everything() == before
    longer = train(pipeline(), "stages.sft.run.steps=8", retrain=["judge"])
    assert longer.stages["sft"].steps == 8
    assert entries() == {"sft": ("finished", "sft"), "judge": ("finished", "judge-2"), "ppo": ("finished", "ppo-2")}


def test_nor_when_it_was_trained_further_behind_the_pipelines_back() -> None:
    train(pipeline())
    strop.train(load_config(FOLDER / "judge" / "config.yaml", ["run.steps=8"]))
    with pytest.raises(UserError, match=r"stage ppo: a model .* is another one now") as caught:
        train(pipeline())
    assert "rewards.verifiers.0.path" in caught.value.what
    assert "--retrain ppo" in caught.value.mend


def test_a_moved_pipeline_is_the_same_pipeline(place: Path) -> None:
    train(pipeline())
    Path("runs").rename("elsewhere")
    train(pipeline(), f"defaults.run.folder={place / 'elsewhere'}", "stages.ppo.run.steps=5")
    assert entries(Path("elsewhere/pipeline"))["ppo"] == ("finished", "ppo")


@pytest.mark.parametrize(
    ("options", "what", "mend"),
    [
        ({"retrain": ["jugde"]}, "there is no stage 'jugde'", "did you mean judge?"),
        ({"retrain": ["judge"]}, "`--retrain` has no effect", "leave it out"),
        ({"retrain": ["judge"], "fresh": True}, "`--retrain` has no effect", "leave it out"),
    ],
)
def test_what_cannot_be_trained_anew(options: dict[str, Any], what: str, mend: str) -> None:
    with pytest.raises(UserError) as caught:
        train(pipeline(), **options)
    assert what in caught.value.what
    assert mend in caught.value.mend
    assert not Path("runs").exists()


def test_a_recipe_that_is_no_pipeline_has_no_stages() -> None:
    with pytest.raises(UserError, match="is not a pipeline"):
        strop.train(load_config(None, data=recipe()), retrain=["sft"])  # type: ignore[call-overload]
    with pytest.raises(UserError, match="names a stage of a pipeline, and this recipe is not one"):
        strop.train(load_config(None, data=recipe(model={"path": "stage:sft"})))
    assert not Path("runs").exists()


# --- looking at everything first -----------------------------------------------------------------------------------

OTHER = {"create": {"characters": "x0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}}


@pytest.mark.parametrize(
    ("changes", "stage", "what", "where"),
    [
        ({"stages.ppo.data.train": {"path": "gone.jsonl"}}, "ppo", "no such file", "gone.jsonl"),
        ({"stages.judge.supervised.columns": {"chosen": "better"}}, "judge", "no column 'better'", ""),
        # What follows can only be known of the model that the first stage is going to make.
        ({"stages.ppo.rollout.max_new_tokens": 32}, "ppo", "leave no room for a prompt in a context of 32", "rollout"),
        ({"stages.judge.supervised.max_tokens": 33}, "judge", "the model's context of 32", "supervised"),
        ({"stages.judge.model": OTHER}, "ppo", "the critic and the policy have different tokenizers", "stage:judge"),
        (
            {"stages.judge": {"model": OTHER, "data": {"train": PAIRS}, "supervised": {"batch_size": 4}},
             "stages.ppo.critic": None, "stages.ppo.algorithm": {"name": "opd", "teacher": "stage:judge"},
             "stages.ppo.rewards": {"verifiers": [{"kind": "exact"}]}},
            "ppo", "the teacher has another tokenizer than the policy", "algorithm.teacher = stage:judge",
        ),
        ({"stages.ppo.algorithm": {"name": "grpo"}, "stages.ppo.critic": None}, "ppo", "a group of one", "group_size"),
        ({"stages.ppo.training": {"optimizer": {"offload": True}}}, "ppo", "`training.optimizer.offload` has no", ""),
    ],
)  # fmt: skip
def test_a_mistake_in_a_late_stage_is_found_before_the_first_begins(
    changes: dict[str, Any], stage: str, what: str, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(pipeline(**changes))
    [problem] = caught.value.problems
    assert problem.what.startswith(f"stage {stage}: ")
    assert what in problem.what
    assert where in problem.where
    assert "strop-stages" not in problem.block()
    assert not Path("runs").exists()


def test_mistakes_of_all_stages_come_at_once() -> None:
    changes = {f"stages.{name}.data.train": {"path": f"{name}.jsonl"} for name in ("sft", "judge", "ppo")}
    with pytest.raises(ConfigError) as caught:
        train(pipeline(**changes))
    assert [problem.what.split(":")[0] for problem in caught.value.problems] == [
        "stage sft",
        "stage judge",
        "stage ppo",
    ]


def test_what_is_done_is_not_looked_at_again(stop_at: Any) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = pipeline(**{"stages.sft.data": {"train": {"path": "rows.jsonl"}}, "stages.sft.evaluation": None})
    stop_at("judge")
    with pytest.raises(KeyboardInterrupt):
        train(data)
    stop_at(None)
    Path("rows.jsonl").unlink()
    assert train(data).stages["sft"].steps == 6


# --- other commands ------------------------------------------------------------------------------------------------


def test_commands_take_a_pipelines_folder_for_its_last_stage(stop_at: Any) -> None:
    stop_at("ppo")
    with pytest.raises(KeyboardInterrupt):
        train(pipeline())
    early = run("export", str(FOLDER), "--out", "out")
    assert early.exit_code == 2
    assert "has not come to its last stage, ppo" in early.stderr
    assert "runs/pipeline/judge" in early.stderr
    stop_at(None)
    model = train(pipeline()).model
    assert resolve_model(str(FOLDER)) == model
    # What only training asked is not needed any more.
    (FOLDER / "judge").rename("gone")
    scored = run("eval", str(FOLDER))
    assert scored.exit_code == 0, scored.output
    assert "completions        6" in scored.stdout
    said = run("sample", str(FOLDER), "--checkpoint", "2", "--prompt", "1+")
    assert said.exit_code == 0, said.output
    exported = run("export", str(FOLDER), "--out", "out")
    assert exported.exit_code == 0, exported.output


def test_commands_that_want_one_recipe_say_how_to_name_a_stage() -> None:
    Path("mine.yaml").write_text(yaml.safe_dump(pipeline(), sort_keys=False))
    scored = run("eval", "mine.yaml")
    assert scored.exit_code == 2
    assert "this is a pipeline of several recipes (sft, judge, ppo)" in scored.stderr
    assert "runs/mine/ppo" in scored.stderr


def test_a_pipeline_is_shown_with_every_default_and_what_its_choices_come_to() -> None:
    Path("mine.yaml").write_text(yaml.safe_dump(pipeline(), sort_keys=False))
    shown = run("config", "show", "mine.yaml", "stages.sft.run.steps=3")
    assert shown.exit_code == 0, shown.output
    Path("again.yaml").write_text(shown.stdout)
    assert load_pipeline("again.yaml") == load_pipeline("mine.yaml", ["stages.sft.run.steps=3"])
    *_, sft, judge, ppo = shown.stdout.splitlines()
    assert sft.startswith("# stage sft: the objective that results: method: sft")
    assert judge.startswith("# stage judge: the objective that results: method: reward_model")
    assert ppo.startswith("# stage ppo: the algorithm that results: ")


def test_the_name_is_that_of_the_file_unless_it_says_otherwise() -> None:
    Path("mine.yaml").write_text(yaml.safe_dump(pipeline(), sort_keys=False))
    for overrides, folder in (([], "runs/mine"), (["name=other"], "runs/other")):
        done = run("train", "mine.yaml", *overrides, "stages.sft.run.steps=1", "defaults.run.folder=runs")
        assert done.exit_code == 0, done.output
        assert done.stdout == ""
        assert Path(folder, "pipeline.json").is_file()


TINY = Path(__file__).parents[2] / "recipes" / "pipeline-tiny.yaml"
SMALL = [
    "defaults.tracking.display=off",
    "defaults.tracking.tensorboard=false",
    "defaults.hardware.threads=1",
    "stages.sft.model.create.hidden_size=32",
    "stages.sft.supervised.batch_size=8",
    "stages.judge.supervised.batch_size=8",
    "stages.ppo.rollout.groups_per_step=8",
    "stages.ppo.evaluation.prompts=4",
    "stages.sft.run.steps=3",
    "stages.judge.run.steps=3",
    "stages.ppo.run.steps=2",
]


def test_the_recipe_of_three_stages_runs_from_one_command() -> None:
    done = run("train", str(TINY), *SMALL)
    assert done.exit_code == 0, done.output
    folder = Path("runs/pipeline-tiny")
    assert {name: status for name, (status, _) in entries(folder).items()} == {
        "sft": "finished",
        "judge": "finished",
        "ppo": "finished",
    }
    judge, truth = (
        [line for kind, _, line in steps_of(folder / "ppo") if kind == wanted] for wanted in ("train", "eval")
    )
    # The judge pays for training, and the exact verifier, which gives 0 or 1, scores the held-out sums.
    assert judge[0]["reward/reward_model"] == judge[0]["reward/mean"] not in (0.0, 1.0)
    assert all(line["eval/reward"] == line["eval/accuracy"] for line in truth)
