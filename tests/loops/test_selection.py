"""Best checkpoints and early stop: the rules by hand, and runs that follow them, stopped ones too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import HELD_OUT, recipe, steps_of, weights_of
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.config.loading import load_config
from strop.config.run import BestSettings, EarlyStopSettings
from strop.config.supervised import Method
from strop.errors import ConfigError, UserError
from strop.loops.online import open_run
from strop.loops.selection import OF_COMPLETIONS, metric_problems, ranking, scores_of, stop_reason
from strop.models.find import checkpoint_of, resolve_model
from strop.training.checkpoint import read_state


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


def seen(*accuracies: float, name: str = "accuracy") -> list[tuple[int, dict[str, float]]]:
    return [(10 * at, {name: accuracy}) for at, accuracy in enumerate(accuracies)]


# --- the rules -----------------------------------------------------------------------------------------------------


def test_the_ranking_puts_the_best_first_and_of_equal_ones_the_earlier() -> None:
    best = BestSettings(metric="eval/accuracy")
    assert ranking(seen(0.2, 0.5, math.nan, 0.5, 0.9), best) == [(40, 0.9), (10, 0.5), (30, 0.5), (0, 0.2)]
    less = best.model_copy(update={"mode": "min"})
    assert [step for step, _ in ranking(seen(0.2, 0.5, 0.1), less)] == [20, 0, 10]
    loss = BestSettings(metric="eval/loss")
    assert [step for step, _ in ranking(seen(0.2, 0.5, 0.1, name="loss"), loss)] == [20, 0, 10]
    assert ranking(seen(0.2), loss) == []


@pytest.mark.parametrize(
    ("scores", "patience", "min_delta", "stops"),
    [
        ((0.1, 0.2, 0.3), 1, 0.0, False),
        ((0.3, 0.2, 0.2), 2, 0.0, True),
        ((0.3, 0.2), 2, 0.0, False),
        ((0.3, 0.2, 0.4, 0.4), 2, 0.0, False),
        ((0.3, 0.3, 0.3), 2, 0.0, True),
        ((0.3, 0.34, 0.38), 2, 0.05, False),
        ((0.3, 0.34, 0.35), 2, 0.05, True),
        ((math.nan, 0.1, 0.2), 1, 0.0, True),
        ((0.1, math.nan, 0.2), 2, 0.0, False),
        ((), 1, 0.0, False),
    ],
)
def test_a_run_ends_when_too_many_evaluations_have_passed_without_a_new_best(
    scores: tuple[float, ...], patience: int, min_delta: float, stops: bool
) -> None:
    settings = EarlyStopSettings(metric="eval/accuracy", patience=patience, min_delta=min_delta)
    # It is asked after each evaluation, and the first answer counts.
    reasons = [stop_reason(seen(*scores[: at + 1]), settings) for at in range(len(scores))]
    assert any(reasons) == stops
    mirrored = [tuple(-score for score in scores[: at + 1]) for at in range(len(scores))]
    less = settings.model_copy(update={"mode": "min"})
    assert [bool(stop_reason(seen(*part), less)) for part in mirrored] == [bool(reason) for reason in reasons]


def test_the_reason_names_the_metric_and_the_best_step() -> None:
    settings = EarlyStopSettings(metric="eval/loss", patience=2, min_delta=0.1)
    reason = stop_reason(seen(2.0, 1.5, 1.45, 1.6, name="loss"), settings)
    assert reason == "eval/loss has not beaten its 1.5 of step 10 by more than 0.1 for 2 evaluations"


# --- what a recipe may ask for -------------------------------------------------------------------------------------

BEST = {"metric": "eval/accuracy"}
STOP = {"metric": "eval/accuracy", "patience": 2}


def refused(**changes: Any) -> list[UserError]:
    return list(metric_problems(load_config(None, data=recipe(**changes))))


@pytest.mark.parametrize(
    ("changes", "what", "mend"),
    [
        ({"checkpoint.best": BEST}, "`checkpoint.best` has no effect without held-out data", "data.eval"),
        (
            {"data.eval": HELD_OUT, "checkpoint.best": {"metric": "eval/acuracy"}},
            "'eval/acuracy', which no evaluation of this recipe gives",
            "did you mean eval/accuracy?",
        ),
        (
            {"data.eval": HELD_OUT, "checkpoint.best": {"metric": "accuracy"}},
            "which no evaluation",
            "did you mean eval/accuracy?",
        ),
        (
            {"data.eval": HELD_OUT, "checkpoint.best": {"metric": "eval/loss"}},
            "which no evaluation",
            "there are eval/accuracy, eval/reward, eval/completion_length",
        ),
        (
            {"data.eval": HELD_OUT, "checkpoint.best": {"metric": "eval/completion_length"}},
            "nobody knows whether more of eval/completion_length is better",
            "max or min",
        ),
        (
            {"data.eval": HELD_OUT, "evaluation.early_stop": STOP},
            "while only the start and the end are evaluated",
            "evaluation.every",
        ),
    ],
)
def test_metrics_that_no_run_gives_are_refused_before_it_begins(changes: dict[str, Any], what: str, mend: str) -> None:
    [problem] = refused(**changes)
    assert what in problem.what
    assert mend in problem.mend
    with pytest.raises(ConfigError, match=r"has no effect|gives|better"):
        strop.train(load_config(None, data=recipe(**changes)))
    assert not Path("runs").exists()


def test_early_stop_without_held_out_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`evaluation\.early_stop` has no effect without held-out prompts"):
        strop.train(load_config(None, data=recipe(**{"evaluation.early_stop": STOP})))


def examples(method: str) -> dict[str, Any]:
    rows = [
        {
            "prompt": f"{n}+",
            "answer": str(n),
            "chosen": "1",
            "rejected": "2",
            "completion": "1",
            "label": n % 2 == 0,
            "steps": ["1", "2"],
            "labels": [True, False],
        }
        for n in range(4)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": "rows.jsonl"}
    data = recipe(**{"data.train": source, "data.eval": source, "supervised": {"method": method, "batch_size": 2}})
    data["model"]["create"]["characters"] += "\n"
    del data["rewards"], data["rollout"]
    return data


@pytest.mark.parametrize("method", Method.__args__)  # type: ignore[attr-defined]
def test_every_score_that_can_be_named_is_given_and_no_other(method: str) -> None:
    data = examples(method)
    if method == "distillation":
        teacher = strop.train(load_config(None, ["run.steps=1", "run.name=teacher"], data=examples("sft")))
        data["supervised"]["teachers"] = [{"path": str(teacher.model)}]
    config = load_config(None, ["run.steps=1"], data=data)
    summary = strop.train(config)
    assert sorted(summary.after) == sorted(scores_of(config))


def test_so_it_is_in_reinforcement_learning() -> None:
    config = load_config(None, ["run.steps=1"], data=recipe(**{"data.eval": HELD_OUT}))
    assert tuple(strop.train(config).after) == scores_of(config) == OF_COMPLETIONS


# --- runs ----------------------------------------------------------------------------------------------------------


def scored(*scores: float, **changes: Any) -> dict[str, Any]:
    """A recipe whose evaluations give these rewards, one after the other, by the step that the run is at."""
    Path("told.py").write_text(
        "import json\n"
        f"SCORES = {list(scores)!r}\n"
        "def told(prompts, completions, **_):\n"
        "    done = len([line for line in open('runs/run/metrics.jsonl') if json.loads(line)['kind'] == 'train'])\n"
        "    return [SCORES[min(done, len(SCORES) - 1)]] * len(completions)\n"
    )
    return recipe(
        **{
            "data.eval": HELD_OUT,
            "evaluation.every": 1,
            "evaluation.verifiers": [{"kind": "python", "function": "told:told"}],
            "checkpoint": {"every": 100, "keep": 1, "best": {"metric": "eval/reward"}},
            "run": {"steps": len(scores) - 1, "name": "run"},
            **changes,
        }
    )


def train(data: dict[str, Any], *overrides: str) -> strop.loops.online.TrainingSummary:  # type: ignore[name-defined]
    return strop.train(load_config(None, overrides, data=data))


@pytest.fixture
def fresh_modules(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """`told.py` of this test, not that of another."""
    import sys

    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "told", raising=False)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.usefixtures("fresh_modules")
def test_the_best_checkpoints_stay_beside_the_newest() -> None:
    summary = train(scored(0.1, 0.7, 0.3, 0.9, 0.2, 0.0))
    assert checkpoints(summary.folder) == ["step-000003", "step-000005"]
    assert (summary.folder / "checkpoints" / "best").read_text() == "step-000003\n"
    assert summary.best == summary.folder / "checkpoints" / "step-000003" / "model"
    assert resolve_model("runs/run/checkpoints/best") == summary.best
    assert json.loads((summary.folder / "run.json").read_text())["best"] == {
        "metric": "eval/reward",
        "step": 3,
        "score": 0.9,
    }
    shown = CliRunner().invoke(app, ["runs", "show", "run"]).stdout
    assert "step 3, eval/reward 0.9" in shown


@pytest.mark.usefixtures("fresh_modules")
def test_as_many_as_asked_for_and_the_least_when_less_is_better() -> None:
    summary = train(scored(0.5, 0.7, 0.3, 0.9, 0.2), "checkpoint.best.keep=2", "checkpoint.best.mode=min")
    assert checkpoints(summary.folder) == ["step-000002", "step-000004"]
    assert (summary.folder / "checkpoints" / "best").read_text() == "step-000004\n"


@pytest.mark.usefixtures("fresh_modules")
def test_training_may_only_harm() -> None:
    summary = train(scored(0.9, 0.7, 0.3))
    assert checkpoints(summary.folder) == ["step-000000", "step-000002"]
    assert (summary.folder / "checkpoints" / "best").read_text() == "step-000000\n"


@pytest.mark.usefixtures("fresh_modules")
def test_another_metric_on_going_on_decides_by_all_evaluations() -> None:
    data = scored(0.5, 0.9, 0.1, 0.4)
    data["checkpoint"]["best"]["keep"] = 2
    run = train(data, "run.steps=2").folder
    assert (run / "checkpoints" / "best").read_text() == "step-000001\n"
    train(data, "checkpoint.best.mode=min")
    # Step 2 was the last of the first part, so its checkpoint is there.
    assert (run / "checkpoints" / "best").read_text() == "step-000002\n"
    data["checkpoint"] = {"every": 100}
    train(data)
    assert not (run / "checkpoints" / "best").exists()


STOPPING = {"evaluation.early_stop": {"metric": "eval/reward", "patience": 2, "min_delta": 0.05}}


@pytest.mark.usefixtures("fresh_modules")
def test_a_run_ends_early_says_why_and_can_go_on() -> None:
    data = scored(0.1, 0.5, 0.52, 0.4, 0.9, 0.9, **STOPPING)
    summary = train(data)
    assert summary.steps == 3
    assert summary.stopped == "eval/reward has not beaten its 0.5 of step 1 by more than 0.05 for 2 evaluations"
    manifest = json.loads((summary.folder / "run.json").read_text())
    assert (manifest["status"], manifest["stopped"]) == ("finished", summary.stopped)
    assert checkpoints(summary.folder) == ["step-000002", "step-000003"]
    # The same command again trains nothing, more patience goes on.
    assert train(data) == summary
    longer = train(data, "evaluation.early_stop.patience=4")
    assert (longer.steps, longer.stopped) == (5, "")
    assert json.loads((summary.folder / "run.json").read_text())["stopped"] == ""
    assert [step for kind, step, _ in steps_of(summary.folder) if kind == "train"] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("fresh_modules")
def test_the_command_says_which_checkpoint_is_best_and_why_it_ended() -> None:
    from strop.config.loading import resolved_yaml

    data = scored(0.1, 0.5, 0.4, 0.3, 0.9, **STOPPING)
    data["tracking"]["display"] = "plain"
    Path("recipe.yaml").write_text(resolved_yaml(load_config(None, data=data)))
    said = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert said.exit_code == 0, said.output
    assert "run: finished early, after step 3 of 4" in said.stdout
    assert "why               eval/reward has not beaten its 0.5 of step 1" in said.stdout
    assert "best              step 1, reward 0.500: runs/run/checkpoints/step-000001/model" in said.stdout
    again = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert "this run ended early, after step 3 of 4" in again.stdout
    shown = CliRunner().invoke(app, ["runs", "show", "runs/run"])
    assert "why       eval/reward has not beaten" in shown.stdout


def evaluated(**changes: Any) -> dict[str, Any]:
    return recipe(
        **{
            "data.eval": HELD_OUT,
            "evaluation.every": 2,
            "checkpoint": {"every": 3, "keep": 1, "best": {"metric": "eval/reward", "keep": 2}},
            "run.steps": 8,
            **changes,
        }
    )


async def test_a_run_that_died_anywhere_ranks_and_ends_as_one_that_did_not() -> None:
    """Real evaluations; the process is gone without a word after each of the steps in turn."""
    stop = {"evaluation.early_stop": {"metric": "eval/reward", "mode": "min", "patience": 2}}
    for name, changes in (("plain", {}), ("stopping", stop)):
        whole = train(evaluated(**changes), f"run.name={name}")
        assert bool(whole.stopped) == bool(changes)
        # Checkpoints are due after every third step and wherever an evaluation, after every second, is among the best.
        for last in range(1, min(whole.steps, 6)):
            data = evaluated(**changes, **{"run.name": f"{name}-{last}-parts"})
            with pytest.raises(ZeroDivisionError):
                await _until(load_config(None, data=data), last)
            parts = train(data)
            assert (parts.steps, parts.stopped) == (whole.steps, whole.stopped)
            assert checkpoints(parts.folder) == checkpoints(whole.folder)
            best = [(run.folder / "checkpoints" / "best").read_text() for run in (parts, whole)]
            assert best[0] == best[1]
            assert weights_of(parts.folder) == weights_of(whole.folder)
            assert steps_of(parts.folder) == steps_of(whole.folder)


async def _until(config: strop.Config, last: int) -> None:
    async with open_run(config) as run:
        await run.begin()
        while not run.done:
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step += 1
            await run.publish()
            await run.look(groups)
            run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
            if run.step == last:
                raise ZeroDivisionError


def test_it_works_of_examples_too() -> None:
    data = examples("sft")
    data["evaluation"] = {"every": 1, "early_stop": {"metric": "eval/loss", "patience": 1}}
    data["checkpoint"] = {"every": 100, "keep": 1, "best": {"metric": "eval/loss"}}
    data["training"]["optimizer"]["learning_rate"] = 0.5
    summary = train(data, "run.steps=50")
    losses = [line["eval/loss"] for kind, _, line in steps_of(summary.folder) if kind == "eval"]
    assert summary.steps == len(losses) - 1 < 50
    assert losses[-1] >= losses[-2] == min(losses)
    assert summary.best is not None
    assert summary.best.parent.name == f"step-{summary.steps - 1:06d}"


# --- verifiers of the evaluation -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_modules")
def test_held_out_prompts_have_verifiers_of_their_own() -> None:
    data = scored(0.25, 0.25, **{"evaluation.correct_at": 0.25, "rewards.correct_at": 5.0})
    summary = train(data)
    assert summary.after["reward"] == 0.25
    assert summary.after["accuracy"] == 1.0
    [line] = [line for kind, _, line in steps_of(summary.folder) if kind == "train"]
    assert line["accuracy"] == 0.0
    assert line["reward/mean"] != 0.25
    # `strop eval` asks the same verifiers, and nobody else: the judge of the training may be gone.
    manifest = summary.folder / "config.yaml"
    manifest.write_text(manifest.read_text().replace("tiny_rewards:spread", "gone:gone"))
    said = CliRunner().invoke(app, ["eval", "runs/run"])
    assert said.exit_code == 0, said.output
    assert "reward             0.2500" in said.stdout


def test_what_scores_are_compared_by_may_not_change_on_the_way() -> None:
    data = recipe(**{"data.eval": HELD_OUT, "run.name": "run"})
    train(data)
    with pytest.raises(UserError, match=r"evaluation\.verifiers"):
        train(data, "run.steps=3", "evaluation.verifiers=[{kind: exact}]")
    train(data, "run.steps=3", "evaluation.prompts=2")


def test_two_verifiers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two verifiers are called 'exact'"):
        load_config(None, ["evaluation.verifiers=[{kind: exact}, {kind: exact}]"], data=recipe())
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["evaluation.verifiers=[{kind: exact, wieght: 2}]"], data=recipe())
    assert "unknown key `evaluation.verifiers.0.wieght`" in caught.value.what
    assert "evaluation.verifiers.0.weight" in caught.value.mend


# --- choosing a checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_modules")
def test_commands_take_the_checkpoint_that_is_named() -> None:
    run = train(scored(0.1, 0.7, 0.3)).folder
    assert checkpoint_of("runs/run", "best") == "runs/run/checkpoints/best"
    folders = {which: resolve_model(checkpoint_of("runs/run", which)) for which in ("latest", "best", "1", "2")}
    assert [folder.parent.name for folder in folders.values()] == [
        "step-000002",
        "step-000001",
        "step-000001",
        "step-000002",
    ]
    assert read_state(folders["best"].parent)["step"] == 1
    exported = CliRunner().invoke(app, ["export", "runs/run", "--out", "out", "--checkpoint", "best"])
    assert exported.exit_code == 0, exported.output
    best = (run / "checkpoints" / "step-000001" / "model" / "model.safetensors").read_bytes()
    assert Path("out/model.safetensors").read_bytes() == best != weights_of(run)
    scores = CliRunner().invoke(app, ["eval", "runs/run", "--checkpoint", "1"])
    assert scores.exit_code == 0, scores.output
    said = CliRunner().invoke(app, ["sample", "runs/run", "--checkpoint", "best", "--prompt", "1+"])
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize(
    ("run", "which", "what", "mend"),
    [
        ("runs/recipe", "best", "keeps no best checkpoint", "checkpoint.best"),
        ("runs/recipe", "7", "has no checkpoint '7'", "there is latest, 0, 2"),
        ("runs/recipe", "bset", "has no checkpoint 'bset'", "there is latest, 0, 2"),
        ("elsewhere", "best", "is not a run with checkpoints", "--checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_there(run: str, which: str, what: str, mend: str) -> None:
    train(recipe(), "run.name=recipe")
    result = CliRunner().invoke(app, ["export", run, "--out", "out", "--checkpoint", which])
    assert result.exit_code == 2
    assert what in result.stderr
    assert mend in result.stderr
    if which == "best" and run != "elsewhere":
        with pytest.raises(UserError, match="keeps no best checkpoint"):
            resolve_model("runs/recipe/checkpoints/best")


def test_a_checkpoint_needs_a_run_to_choose_from() -> None:
    from strop.config.loading import resolved_yaml

    Path("recipe.yaml").write_text(resolved_yaml(load_config(None, data=recipe(**{"data.eval": HELD_OUT}))))
    result = CliRunner().invoke(app, ["eval", "recipe.yaml", "--checkpoint", "best"])
    assert result.exit_code == 2
    assert "--model RUN" in result.stderr


# --- models that change under a run --------------------------------------------------------------------------------


def test_a_run_whose_model_was_trained_further_is_refused_until_it_names_the_one_it_had() -> None:
    first = train(recipe(), "run.name=first", "checkpoint.keep=5")
    child = recipe(model={"path": "runs/first"}, **{"run.name": "child"})
    run = train(child).folder
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["parent"] == json.loads((first.folder / "run.json").read_text())["id"]
    assert manifest["inputs"]["model.path"]["checkpoint"] == "step-000002"
    train(recipe(), "run.name=first", "checkpoint.keep=5", "run.steps=3")
    with pytest.raises(UserError, match=r"is another one now \(model\.path: runs/first\)"):
        train(child, "run.steps=3")
    longer = train(child, "run.steps=3", "model.path=runs/first/checkpoints/step-000002")
    assert longer.steps == 3
    # And another model under another name is a changed recipe.
    with pytest.raises(UserError, match="the recipe has changed"):
        train(child, "run.steps=4", "model.path=runs/first/checkpoints/step-000003")
