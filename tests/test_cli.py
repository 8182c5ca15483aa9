"""The command line: what it calls, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.config import Config
from strop.config.loading import load_config
from strop.errors import RunFailure, UserError

RECIPE = """\
model: {path: m}
data: {train: {path: d.jsonl}}
rewards: {verifiers: [{kind: exact}]}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **attributes: Any) -> None:
    """Put a module in place of one whose work is tested elsewhere."""
    made = ModuleType(module)
    for name, value in attributes.items():
        setattr(made, name, value)
    monkeypatch.setitem(sys.modules, module, made)


# --- training ------------------------------------------------------------------------------------------------------


def test_train_hands_over_recipe_overrides_and_flags(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Config, dict[str, Any]]] = []
    stand_in(monkeypatch, "strop.loops.train", train=lambda config, **rest: calls.append((config, rest)))
    assert run("train", recipe, "run.steps=3", "--fresh", "run.seed=4").exit_code == 0
    [(config, rest)] = calls
    assert (config.run.steps, config.run.seed) == (3, 4)
    assert rest == {"fresh": True, "recipe": str(recipe), "retrain": [], "profile": None}


@pytest.mark.parametrize(
    ("words", "expected", "steps"),
    [
        (["--profile"], "default", 40),
        (["--profile", "7"], 7, 40),
        (["--profile=7"], 7, 40),
        (["--profile", "run.steps=9"], "default", 9),
        (["--profile", "7", "run.steps=9"], 7, 9),
        (["--profile", "--fresh"], "default", 40),
    ],
)
def test_a_step_behind_profile_may_be_left_out(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: Any, steps: int
) -> None:
    calls: list[tuple[Config, dict[str, Any]]] = []
    stand_in(monkeypatch, "strop.loops.train", train=lambda config, **rest: calls.append((config, rest)))
    assert run("train", recipe, "run.steps=40", *words).exit_code == 0
    if "run.steps=9" not in words:
        assert run("train", *words, recipe, "run.steps=40").exit_code == 0
    assert {rest["profile"] for _, rest in calls} == {expected}
    assert {config.run.steps for config, _ in calls} == {steps}


@pytest.mark.parametrize("step", ["soon", "2.5", "-1", "+3", "٣"])
def test_what_is_no_step_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    stand_in(monkeypatch, "strop.loops.train", train=lambda *_, **__: pytest.fail("trained"))
    result = run("train", recipe, "--profile", step)
    assert result.exit_code == 2
    assert f"{step!r} is not the number of a step" in result.stderr
    assert f"where: --profile {step}" in result.stderr
    assert "mend:" in result.stderr


def test_train_refuses_a_bad_recipe_before_anything_is_imported(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "strop.loops.train", train=lambda *_, **__: pytest.fail("trained"))
    result = run("train", recipe, "run.stpes=3", "rollout.top_p=0.9")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "2 problems:" in result.stderr
    assert "mend:  did you mean `run.steps`?" in result.stderr
    assert "`rollout.temperature` only" in result.stderr
    assert sorted(path.name for path in recipe.parent.iterdir()) == ["r.yaml"]


def fails(error: BaseException) -> Any:
    def train(*_: Any, **__: Any) -> None:
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("no such column", where="d.jsonl", mend="rename it"), 2, "no such column\n  where: d.jsonl\n"),
        (RunFailure("the disk is full", mend="make room"), 1, "the disk is full\n  mend:  make room\n"),
        (ZeroDivisionError("division by zero"), 1, "strop failed: ZeroDivisionError: division by zero\n  mend:"),
        (OSError("gone"), 1, "strop failed: OSError: gone\n"),
        (KeyboardInterrupt(), 130, "stopped; the same command goes on from the last checkpoint\n"),
    ],
)  # fmt: skip
def test_every_error_becomes_a_block_and_an_exit_code(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    stand_in(monkeypatch, "strop.loops.train", train=fails(error))
    result = run("train", recipe)
    assert result.exit_code == code
    assert result.stderr.startswith(text)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["--debug", "train", "r.yaml"], ["train", "r.yaml", "--debug"]])
@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError("x"), 1), (UserError("mine"), 2)])
def test_debug_shows_the_traceback(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: Exception, code: int
) -> None:
    stand_in(monkeypatch, "strop.loops.train", train=fails(error))
    result = run(*arguments)
    assert result.exit_code == code
    assert "Traceback" in result.stderr
    assert "--debug" not in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train"], "RECIPE"),
        (["train", "r.yaml", "--frsh"], "--frsh"),
        (["trian"], "trian"),
        (["eval", "r.yaml", "--prompts", "0"], "--prompts"),
        (["sample", "m", "--temperature", "-1"], "--temperature"),
        (["export", "m"], "--out"),
        (["export", "m", "--out", "b", "--dtype", "int8"], "--dtype"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "strop failed" not in result.stderr


# --- the other commands --------------------------------------------------------------------------------------------


def test_eval_prints_the_scores(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def evaluate_model(config: Config, **rest: Any) -> Any:
        calls.append((config.evaluation.samples, rest))
        return SimpleNamespace(accuracy=0.875, reward=0.5, episodes=40, length=12.25)

    stand_in(monkeypatch, "strop.loops.evaluate", evaluate_model=evaluate_model)
    result = run("eval", recipe, "--model", "there", "--prompts", "10", "evaluation.samples=4")
    assert result.exit_code == 0
    assert calls == [(4, {"model": "there", "prompts": 10})]
    for text in ("87.5%", "0.5000", "12.2 tokens", "40"):
        assert text in result.stdout


def test_eval_of_a_run_uses_its_own_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = SimpleNamespace(accuracy=1.0, reward=1.0, episodes=1, length=1.0, errors=2)
    calls = []
    stand_in(monkeypatch, "strop.loops.evaluate", evaluate_model=lambda _, **rest: calls.append(rest) or scores)
    folder = recipe.parent / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(RECIPE)
    result = run("eval", folder)
    assert result.exit_code == 0
    assert calls == [{"model": str(folder), "prompts": None}]
    assert "not verified       2" in result.stdout


def test_eval_of_a_model_folder_asks_for_a_recipe(tmp_path: Path) -> None:
    result = run("eval", tmp_path)
    assert result.exit_code == 2
    assert "strop eval RECIPE --model" in result.stderr


def test_sample_hands_everything_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    stand_in(monkeypatch, "strop.loops.sample", chat=lambda model, **rest: calls.append((model, rest)))
    assert run("sample", "m", "-p", "hello", "--temperature", "0", "--max-new-tokens", "5").exit_code == 0
    assert calls == [("m", {"prompt": "hello", "temperature": 0.0, "max_new_tokens": 5, "system": None})]


def test_export_hands_everything_over_and_prints_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def export_model(*arguments: Any, **rest: Any) -> Path:
        calls.append((arguments, rest))
        return Path("/there/out")

    stand_in(monkeypatch, "strop.models.export", export_model=export_model)
    result = run("export", "runs/a", "--out", "out", "--adapter", "--dtype", "bfloat16")
    assert (result.exit_code, result.stdout) == (0, "/there/out\n")
    assert run("export", "m", "--out", "b").exit_code == 0
    assert calls == [
        (("runs/a", Path("out")), {"adapter": True, "dtype": "bfloat16"}),
        (("m", Path("b")), {"adapter": False, "dtype": None}),
    ]


def test_rollout_hands_everything_over(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    found = SimpleNamespace(completions=12, prompts=3, path="o.jsonl", accuracy=0.5, reward=0.25, length=4.0, errors=1)

    def rollout(config: Config, out: Path, **rest: Any) -> Any:
        calls.append((config.run.seed, out, rest))
        return found

    stand_in(monkeypatch, "strop.loops.rollout", rollout=rollout)
    result = run("rollout", recipe, "--out", "o.jsonl", "--prompts", "3", "--samples", "4", "--force", "run.seed=2")
    assert result.exit_code == 0
    for text in ("12 completions of 3 prompts written to o.jsonl", "50.0%", "0.2500", "4.0 tokens", "not verified"):
        assert text in result.stdout
    folder = recipe.parent / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(RECIPE)
    found.accuracy = found.reward = float("nan")
    found.errors = 0
    result = run("rollout", folder, "--out", "o.parquet", "--checkpoint", "7")
    assert result.exit_code == 0
    assert not any(text in result.stdout for text in ("accuracy", "reward", "not verified"))
    given = {"run": None, "checkpoint": None, "prompts": 3, "samples": 4, "force": True}
    assert calls == [
        (2, Path("o.jsonl"), given),
        (0, Path("o.parquet"), {"run": folder, "checkpoint": 7, "prompts": None, "samples": None, "force": False}),
    ]


@pytest.mark.parametrize("equal", [True, False])
def test_replay_exits_with_1_if_anything_differs(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    found = SimpleNamespace(equal=equal)
    stand_in(
        monkeypatch,
        "strop.loops.replay",
        replay=lambda *given: calls.append(given) or found,
        shown=lambda of: "the table" if of is found else "",
    )
    result = run("replay", "runs/a", "--step", "3")
    assert (result.exit_code, result.stdout) == (0 if equal else 1, "the table\n")
    assert calls == [(Path("runs/a"), 3)]
    assert run("replay", "runs/a", "--step", "0").exit_code == 2
    assert run("replay", "runs/a").exit_code == 2


def test_models_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        SimpleNamespace(name="small", description="a small one", size="0.5 GB", path=None),
        SimpleNamespace(name="here", description="another", size="1 GB", path=Path("/models/here")),
    ]
    stand_in(monkeypatch, "strop.models.fetch", available=lambda: entries, fetch=lambda name: Path("/models") / name)
    listed = run("models", "list").stdout
    assert "strop models fetch small" in listed
    assert "/models/here" in listed
    assert run("models", "fetch", "here").stdout == "/models/here\n"


def test_runs_show_finds_a_run_by_its_name(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    stand_in(monkeypatch, "strop.tracking.runs", show_run=lambda path: shown.append(path) or "text of the run")
    (recipe.parent / "here").mkdir()
    assert run("runs", "show", "a").stdout == "text of the run\n"
    run("runs", "show", "here")
    run("runs", "show", "elsewhere/b")
    assert shown == [Path("runs/a"), Path("here"), Path("elsewhere/b")]


def test_config_show_prints_a_recipe_and_the_choices_that_result(recipe: Path) -> None:
    result = run("config", "show", recipe, "algorithm.name=rloo", "run.name=off")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["run"]["name"] == "off"
    (recipe.parent / "again.yaml").write_text(result.stdout)
    assert load_config("again.yaml") == load_config(recipe, ["algorithm.name=rloo", "run.name=off"])
    assert "baseline: leave_one_out" in result.stdout.splitlines()[-1]


def test_config_explain_and_schema() -> None:
    assert "Peak learning rate." in run("config", "explain", "training.optimizer.learning_rate").stdout
    assert "rollout" in run("config", "explain").stdout
    wrong = run("config", "explain", "training.lerning_rate")
    assert wrong.exit_code == 2
    assert "learning_rate" in wrong.stderr
    assert "rollout" in json.loads(run("config", "schema").stdout)["properties"]


def test_every_command_has_help_with_examples() -> None:
    main = run("--help")
    assert main.exit_code == 0
    assert "strop train recipes/quickstart.yaml" in main.stdout
    for command in (
        ["train"],
        ["eval"],
        ["sample"],
        ["export"],
        ["rollout"],
        ["replay"],
        ["models", "fetch"],
        ["runs", "show"],
        ["config", "show"],
    ):
        text = run(*command, "--help").stdout
        assert f"strop {' '.join(command)} " in text.split("xample", 1)[1]


def test_version() -> None:
    assert run("--version").stdout == f"strop {strop.__version__}\n"


# --- the package and the real process ------------------------------------------------------------------------------


def test_lazy_attributes() -> None:
    assert strop.Config is Config
    assert strop.load_config is load_config
    assert set(strop.__all__) <= set(dir(strop))
    with pytest.raises(AttributeError, match="nothing_here"):
        strop.nothing_here  # noqa: B018


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    source = str(Path(strop.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.run(
        [sys.executable, "-m", "strop", *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_a_real_process_answers_with_text_and_exit_codes(recipe: Path) -> None:
    help_page = process("--help", cwd=recipe.parent)
    assert help_page.returncode == 0
    assert help_page.stdout.startswith("Usage: strop ")
    wrong = process("config", "show", "r.yaml", "run.stpes=3", cwd=recipe.parent)
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr == (
        "unknown key `run.stpes`, given 3: `run` has no `stpes`\n"
        "  where: command line: run.stpes=3\n"
        "  mend:  did you mean `run.steps`?\n"
    )


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Half a second for `--help` is only possible without these."""
    code = (
        "import sys; sys.argv = ['strop', '--help']\n"
        "from strop.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'pydantic', 'yaml', 'rich')\n"
        "print('HEAVY', [name for name in heavy if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(strop.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
