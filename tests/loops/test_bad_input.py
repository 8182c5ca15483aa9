"""Bad input through the command line: what is wrong, where, how to mend it, the right exit code, and nothing written.

Most of it runs in this process; a few commands are real processes, to see that it is the same there.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import HELD_OUT, command, environment, recipe
from typer.testing import CliRunner

from strop.cli import app
from strop.config.model import NewModel

GOOD = '{"prompt": "1+2=", "answer": "3"}\n'


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(GOOD * 3)
    return tmp_path


def write(**changes: Any) -> None:
    data = recipe(**{"rewards.verifiers": [{"kind": "exact"}], "data.train": {"path": "good.jsonl"}, **changes})
    Path("recipe.yaml").write_text(yaml.safe_dump(data))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def everything(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in files}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has no chat template."""
    from strop.models.create import create_model
    from strop.models.save import save_model

    folder = tmp_path_factory.mktemp("models") / "small"
    made, tokenizer = create_model(
        NewModel(characters="0123456789+=", hidden_size=32, layers=1, heads=2, context=32), seed=0
    )
    save_model(made, tokenizer, folder)
    return folder


# --- refused before anything is written ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A mistake: what is changed in a good recipe or beside it, and what must be said about it."""

    what: str
    where: str
    mend: str
    changes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


def data(path: str) -> dict[str, Any]:
    return {"data.train": {"path": path}}


BAD = {
    "data that is missing": Bad("no such file", "goood.jsonl", "good.jsonl", data("goood.jsonl")),
    "held-out data that is missing": Bad(
        "no such file", "gone.jsonl", "Did you mean", {"data.eval": {"path": "gone.jsonl"}}
    ),
    "an empty file": Bad("empty", "empty.jsonl", "", data("empty.jsonl"), {"empty.jsonl": ""}),
    "JSON broken at a line": Bad(
        "JSON", "broken.jsonl:3", "", data("broken.jsonl"), {"broken.jsonl": GOOD * 2 + '{"prompt": "1"\n' + GOOD}
    ),
    "a missing column": Bad(
        "no column 'prompt'", "other.jsonl", "columns.prompt", data("other.jsonl"),
        {"other.jsonl": '{"promt": "1+2=", "answer": "3"}\n'},
    ),
    "a prompt longer than the context": Bad(
        "41 tokens, and at most 28 fit", "long.jsonl:2", "overlong_prompts", data("long.jsonl"),
        {"long.jsonl": GOOD + json.dumps({"prompt": "1" * 40 + "=", "answer": "3"}) + "\n"},
    ),
    "an unknown key": Bad(
        "unknown key `rollout.temprature`", "recipe.yaml, line", "did you mean `rollout.temperature`?",
        {"rollout.temprature": 1.0},
    ),
    "an unknown key on the command line": Bad(
        "unknown key `run.stpes`", "command line: run.stpes=3", "did you mean `run.steps`?", overrides=("run.stpes=3",)
    ),
    "a wrong type": Bad(
        "whole number", "command line: run.steps=many", "explain run.steps", overrides=("run.steps=many",)
    ),
    "a group of one": Bad("group of one", "rollout.group_size = 1", "2 or more", {"rollout.group_size": 1}),
    "a temperature below 0": Bad(
        "`rollout.temperature` must be a number above 0", "recipe.yaml, line", "", {"rollout.temperature": -1}
    ),
    "a model folder without weights": Bad(
        "has no weights", "bare", "model.safetensors", {"model": {"path": "bare"}}
    ),
    "a model folder that is not there": Bad(
        "no model folder 'smal'", "smal", "did you mean 'small'?", {"model": {"path": "smal"}}
    ),
    "messages and no chat template": Bad(
        "need a chat template, and the tokenizer has none", "small", "data.render",
        {"model": {"path": "small"}, **data("chat.jsonl")},
        {"chat.jsonl": '{"prompt": [{"role": "user", "content": "1+2="}], "answer": "3"}\n'},
    ),
    "a reward whose module is missing": Bad(
        "module 'my_rewards'", "rewards.verifiers.0.function", "my_rewards.py",
        {"rewards.verifiers": [{"kind": "python", "function": "my_rewards:score"}]},
    ),
    "a reward whose function is missing": Bad(
        "no function 'spred'", "rewards.verifiers.0.function", "'spread'",
        {"rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:spred"}]},
    ),
    "completions longer than the context": Bad(
        "leave no room", "rollout.max_new_tokens", "below 32", {"rollout.max_new_tokens": 32}
    ),
    "evaluated completions longer than the context": Bad(
        "leave no room", "evaluation.max_new_tokens", "below 32",
        {"data.eval": HELD_OUT, "evaluation.max_new_tokens": 32},
    ),
    "held-out prompts too long for the evaluation": Bad(
        "4 tokens, and at most 2 fit", "problems", "", {"data.eval": HELD_OUT, "evaluation.max_new_tokens": 30}
    ),
    "characters that a new model lacks": Bad(
        "characters", "odd.jsonl:1", "model.create.characters", data("odd.jsonl"),
        {"odd.jsonl": '{"prompt": "one", "answer": "1"}\n'},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named_and_nothing_is_written(name: str, place: Path, model: Path) -> None:
    bad = BAD[name]
    for file, text in bad.files.items():
        Path(file).write_text(text)
    if "model" in bad.changes:
        shutil.copytree(model, "small")
        shutil.copytree(model, "bare")
        Path("bare/model.safetensors").unlink()
    write(**bad.changes)
    before = everything(place)
    result = run("train", "recipe.yaml", *bad.overrides)
    assert result.exit_code == 2, result.output
    what, *rest = result.stderr.split("\n  where: ")
    where, _, mend = "\n  where: ".join(rest).partition("\n  mend:  ")
    assert bad.what in what
    assert bad.where in where
    assert mend.strip()
    assert bad.mend in mend
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert everything(place) == before


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        ("recip.yaml", None, "there is no recipe recip.yaml"),
        ("recipe.yaml", "", "recipe.yaml is empty"),
        ("recipe.yaml", "model: {path: m\ndata: 1", "line 2"),
    ],
)
def test_a_recipe_that_cannot_be_read(place: Path, file: str, text: str | None, what: str) -> None:
    write()
    if text is not None:
        Path(file).write_text(text)
    before = everything(place)
    result = run("train", file)
    assert result.exit_code == 2
    assert what in result.stderr
    assert "  where: " in result.stderr
    assert "  mend:  " in result.stderr
    assert everything(place) == before


@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        (["rollout.temprature=1"], 2, "did you mean `rollout.temperature`?"),
        (["data.train.path=gone.jsonl"], 2, "there is no such file"),
        (["rewards.verifiers.0={kind: python, function: 'tiny_rewards:not_a_number'}"], 1, "returned nan"),
    ],
)
def test_a_real_process_says_the_same(place: Path, overrides: list[str], code: int, text: str) -> None:
    write()
    started = time.perf_counter()
    done = subprocess.run(
        command("train", "recipe.yaml", *overrides), cwd=place, env=environment(), capture_output=True, text=True
    )
    print(f"{overrides[0].split('=')[0]}: answered after {time.perf_counter() - started:.1f} s")
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "  mend:  " in done.stderr
    assert "Traceback" not in done.stderr
    assert (place / "runs").exists() == (code == 1)


def test_data_that_is_missing_is_found_before_torch_is_imported(place: Path) -> None:
    write(**data("gone.jsonl"))
    code = (
        "import sys; sys.argv = ['strop', 'train', 'recipe.yaml']\n"
        "from strop.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, env=environment(), capture_output=True, text=True)
    assert "there is no such file" in done.stderr
    assert done.stdout == "[]\n"


# --- failures while running ----------------------------------------------------------------------------------------


def loads(checkpoint: Path) -> bool:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    return True


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("one_short", "returned 3 numbers for 4 completions; expected a list of 4 numbers"),
        ("not_a_number", "tiny_rewards:not_a_number returned nan"),
    ],
)
def test_a_reward_that_is_wrong_is_named_at_the_first_step(function: str, text: str) -> None:
    write(**{"rewards.verifiers": [{"kind": "python", "function": f"tiny_rewards:{function}"}]})
    result = run("train", "recipe.yaml")
    assert result.exit_code == 1
    assert text in result.stderr
    assert f"tiny_rewards:{function}" in result.stderr
    assert "  mend:  " in result.stderr
    assert "Traceback" not in result.output
    checkpoints = Path("runs/recipe/checkpoints")
    assert (checkpoints / "latest").read_text() == "step-000000\n"
    assert loads(checkpoints / "step-000000")


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before() -> None:
    write(**{"run.steps": 1})
    assert run("train", "recipe.yaml").exit_code == 0
    with no_file_larger_than(48 * 1024):  # Weights are larger, lines of metrics are not.
        result = run("train", "recipe.yaml", "run.steps=2")
    _left_intact(result, Path("runs/recipe"), "step-000001")
    assert run("train", "recipe.yaml", "run.steps=2").exit_code == 0
    assert (Path("runs/recipe/checkpoints") / "latest").read_text() == "step-000002\n"


@pytest.fixture
def small_disk(place: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(KILOBYTES)`: a file system of that size, where the tests may mount one."""
    folder = place / "disk"
    folder.mkdir()
    mounted = False

    def make(kilobytes: int) -> Path:
        nonlocal mounted
        tool = shutil.which("mount")
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        if tool is None or subprocess.run([tool, *options], capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted = True
        return folder

    yield make
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_while_saving(small_disk: Callable[[int], Path]) -> None:
    write(**{"run.steps": 1, "run.folder": "elsewhere"})
    assert run("train", "recipe.yaml").exit_code == 0
    whole = sum(path.stat().st_size for path in Path("elsewhere/recipe/checkpoints/step-000001").rglob("*"))
    # Room for one checkpoint and the small files of a run, and not for two checkpoints.
    disk = small_disk(int(1.6 * whole / 1024) + 32)
    write(**{"checkpoint.every": 1, "run.folder": str(disk)})
    result = run("train", "recipe.yaml")
    assert "the disk is full" in result.stderr
    _left_intact(result, disk / "recipe", "step-000000")


def _left_intact(result: Any, folder: Path, checkpoint: str) -> None:
    assert result.exit_code == 1, result.output
    assert "could not be written" in result.stderr
    assert "the previous checkpoint is intact" in result.stderr
    assert "Traceback" not in result.output
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == checkpoint
    assert not list(checkpoints.glob(".*.partial"))
    assert loads(checkpoints / checkpoint)
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
