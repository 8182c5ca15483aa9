"""Distillation on given texts: from teachers in memory and from a file, against plain models, and after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import steps_of
from typer.testing import CliRunner

import strop
from strop.cli import app
from strop.config.loading import load_config, resolved_yaml
from strop.data.targets import TargetsFile, example_fingerprint
from strop.errors import ConfigError, DataError, ModelError, UserError
from strop.loops.supervised import open_supervised_run
from strop.loops.supervised_run import batch_of
from strop.loops.teach import now_and_then, teach

CHARACTERS = "0123456789+="
VOCABULARY = len(CHARACTERS) + 3
OFFLINE = {"display": "off", "tensorboard": False}


def write_rows(path: Path, numbers: range) -> None:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sections(*, characters: str = CHARACTERS, hidden: int = 32, steps: int = 6, name: str = "run") -> dict[str, Any]:
    return {
        "model": {"create": {"characters": characters, "hidden_size": hidden, "layers": 1, "heads": 2, "context": 32}},
        "data": {"train": {"path": "train.jsonl"}, "eval": {"path": "eval.jsonl"}},
        "training": {"optimizer": {"learning_rate": 1e-2}},
        "checkpoint": {"every": 2},
        "run": {"steps": steps, "name": name},
        "tracking": OFFLINE,
        "hardware": {"threads": 1, "device": "cpu"},
    }


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of a teacher that has learned its sums, and of others that have not learned much."""
    folder = tmp_path_factory.mktemp("teachers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("os.fsync", lambda _: None)
        write_rows(folder / "train.jsonl", range(8))
        write_rows(folder / "eval.jsonl", range(8))
        for name, steps, hidden, characters in (
            ("good", 150, 32, CHARACTERS),
            ("poor", 10, 48, CHARACTERS),
            ("foreign", 1, 32, CHARACTERS + " "),
        ):
            data = sections(steps=steps, name=name, hidden=hidden, characters=characters)
            data |= {"supervised": {"method": "sft", "batch_size": 16}, "checkpoint": {"every": 1000}}
            shutil.copytree(strop.train(load_config(None, data=data)).model, folder / name)
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, teachers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    write_rows(tmp_path / "train.jsonl", range(8))
    write_rows(tmp_path / "eval.jsonl", range(8, 10))
    for name in ("good", "poor", "foreign"):
        Path(name).symlink_to(teachers / name)
    return tmp_path


BOTH = [{"path": "good", "weight": 3.0}, {"path": "poor", "weight": 1.0}]


def config_of(*overrides: str, teachers: Any = BOTH, **supervised: Any) -> strop.Config:
    found = {"method": "distillation", "batch_size": 8, "teachers": teachers, **supervised}
    return load_config(None, overrides, data=sections() | {"supervised": found})


def taught(config: strop.Config, file: str = "t.parquet") -> strop.Config:
    """The recipe with what its teachers say in a file, and without teachers."""
    teach(config, out=Path(file))
    assert config.supervised is not None
    # Those two are the file's own.
    gone = {"teachers": [], "targets": file, "temperature": None, "top_k": None}
    return config.model_copy(update={"supervised": config.supervised.model_copy(update=gone)})


def weights_of(summary: Any) -> dict[str, torch.Tensor]:
    return load_file(summary.model / "model.safetensors")


def train_metrics(run: Path) -> list[dict[str, float]]:
    return [metrics for kind, _, metrics in steps_of(run) if kind == "train"]


# --- against plain models ------------------------------------------------------------------------------------------


def plain_logits(folder: str, tokens: np.ndarray) -> torch.Tensor:
    """[L, V] float64 of a model that transformers loads, with nothing of strop's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens)[None]).logits[0]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon"])
@pytest.mark.parametrize("stored", [False, True])
async def test_the_loss_is_that_of_whole_distributions(kind: str, stored: bool) -> None:
    """Temperature, weights of two teachers and the labels' share, by hand over every token of the vocabulary."""
    choices = {"divergence": kind, "temperature": 2.0, "cross_entropy_weight": 0.25, "top_k": VOCABULARY}
    if kind == "jensen_shannon":
        choices["jsd_beta"] = 0.3
    config = config_of(**choices)
    if stored:
        config = taught(config)
    async with open_supervised_run(config) as run:
        rows = [run.stream.next()[0] for _ in range(4)]
        batch = batch_of(rows)
        run._fill(batch, "train", rows, "step-0")
        run.roles.model.save_pretrained("student")
        stats = await run.update(batch)
    total, count = 0.0, 0
    for row in rows:
        [example] = row.examples
        student, good, poor = (plain_logits(name, example.tokens)[:-1] for name in ("student", "good", "poor"))
        q = 0.75 * (good / 2).softmax(-1) + 0.25 * (poor / 2).softmax(-1)
        p, labels = (student / 2).softmax(-1), student.log_softmax(-1)
        middle = 0.3 * q + 0.7 * p
        divergence = {
            "forward_kl": (q * (q.log() - p.log())).sum(-1),
            "reverse_kl": (p * (p.log() - q.log())).sum(-1),
            "jensen_shannon": 0.3 * (q * (q / middle).log()).sum(-1) + 0.7 * (p * (p / middle).log()).sum(-1),
        }[kind]
        nll = -labels.gather(1, torch.from_numpy(example.tokens[1:, None]))[:, 0]
        inside = torch.from_numpy(example.loss_mask[1:])
        total += float((0.75 * 4 * divergence + 0.25 * nll)[inside].sum())
        count += int(inside.sum())
    # float16 keeps 11 bits of a log-probability.
    assert stats["loss"] == pytest.approx(total / count, rel=2e-3 if stored else 1e-5)
    assert stats["distillation/coverage"] == pytest.approx(1.0)


async def test_the_gradient_is_that_of_whole_distributions() -> None:
    from transformers import AutoModelForCausalLM

    config = config_of("training.optimizer.max_grad_norm=null", teachers=[{"path": "good"}], top_k=VOCABULARY)
    async with open_supervised_run(config) as run:
        rows = [run.stream.next()[0] for _ in range(4)]
        batch = batch_of(rows)
        run._fill(batch, "train", rows, "step-0")
        run.roles.model.save_pretrained("student")
        stats = await run.update(batch)
    model = AutoModelForCausalLM.from_pretrained("student", dtype=torch.float64)
    losses = []
    for row in rows:
        [example] = row.examples
        q = plain_logits("good", example.tokens)[:-1].log_softmax(-1)
        p = model(input_ids=torch.from_numpy(example.tokens)[None]).logits[0, :-1].log_softmax(-1)
        losses.append((q.exp() * (q - p)).sum(-1)[torch.from_numpy(example.loss_mask[1:])])
    torch.cat(losses).mean().backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


async def test_a_tail_changes_little_where_the_teacher_is_sure() -> None:
    whole, few = (config_of(teachers=[{"path": "good"}], top_k=k) for k in (VOCABULARY, 3))
    found = []
    for config in (whole, few):
        async with open_supervised_run(config, fresh=True) as run:
            rows = [run.stream.next()[0] for _ in range(8)]
            batch = batch_of(rows)
            run._fill(batch, "train", rows, "step-0")
            found.append(await run.update(batch))
    assert found[1]["distillation/coverage"] > 0.9
    assert 0 < found[1]["distillation/divergence"] <= found[0]["distillation/divergence"] + 1e-6
    assert found[1]["distillation/divergence"] == pytest.approx(found[0]["distillation/divergence"], rel=0.2)


# --- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_a_student_becomes_its_teacher(stored: bool) -> None:
    """The texts' own answers are all wrong: what the student learns is the teacher's."""
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    wrong = [{**row, "answer": str(int(row["answer"]) % 9 + 1)} for row in rows]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    shutil.copy("train.jsonl", "eval.jsonl")
    overrides = ["run.steps=150", "checkpoint.every=1000", "training.optimizer.schedule=cosine"]
    config = config_of(*overrides, teachers=[{"path": "good"}], batch_size=16, top_k=4)
    summary = strop.train(taught(config) if stored else config)
    assert summary.before["agreement"] < 0.4
    assert summary.after["agreement"] > 0.9
    assert summary.after["divergence"] < summary.before["divergence"] / 50
    assert summary.after["agreement"] > summary.after["token_accuracy"] + 0.2


def test_several_teachers_pull_towards_their_mixture() -> None:
    """With a weight near 0 a teacher does not count, with one near 1 it alone does."""
    alone = strop.train(config_of("run.name=alone", teachers=[{"path": "good"}]))
    for weight, near in ((1e-6, True), (1.0, False)):
        teachers = [{"path": "good"}, {"path": "poor", "weight": weight}]
        mixed = strop.train(config_of(f"run.name=mixed-{near}", teachers=teachers))
        gap = max(float((a - b).abs().max()) for a, b in zip(*map(_values, (alone, mixed)), strict=True))
        assert (gap < 1e-3) == near
    scaled = [{**teacher, "weight": 2 * teacher["weight"]} for teacher in BOTH]
    first, second = (
        strop.train(config_of(f"run.name={name}", teachers=teachers))
        for name, teachers in (("first", BOTH), ("second", scaled))
    )
    assert all(torch.equal(a, b) for a, b in zip(_values(first), _values(second), strict=True))


def _values(summary: Any) -> list[torch.Tensor]:
    return list(weights_of(summary).values())


# --- the file ------------------------------------------------------------------------------------------------------


def test_the_file_says_what_the_teachers_do() -> None:
    config = config_of(top_k=6)
    told = []
    progress: list[tuple[int, int]] = []
    found = teach(config, out=Path("t.parquet"), progress=lambda done, total: progress.append((done, total)))
    file = TargetsFile(found.path)
    assert (found.examples, found.k, found.skipped) == (100, 6, 0)
    assert progress[-1] == (100, 100)
    assert len(file) == 100
    assert [record.share for record in file.header.teachers] == [0.75, 0.25]

    async def look() -> None:
        async with open_supervised_run(config) as run:
            for dataset in (run.prepared.train, run.prepared.held_out):
                rows = [dataset[number] for number in range(20)]
                batch = batch_of(rows)
                run._fill(batch, "train", rows, "step-0")
                told.append((rows, batch))

    import asyncio

    asyncio.run(look())
    for rows, batch in told:
        names = [example_fingerprint(e.tokens, e.loss_mask) for row in rows for e in row.examples]
        ids, logprobs = (np.concatenate(parts) for parts in zip(*(file.read(name, 6) for name in names), strict=True))
        inside = batch.loss_mask
        # Tokens that are equally likely to 11 bits may change places.
        expected = batch.extra["target_logprobs"][inside].numpy()
        np.testing.assert_allclose(logprobs, expected, rtol=2e-3, atol=2e-3)
        assert (ids == batch.extra["target_ids"][inside].numpy()).mean() > 0.99


def test_training_from_a_file_needs_no_teacher_and_follows_the_same_path() -> None:
    asked = strop.train(config_of("run.name=asked"))
    config = taught(config_of("run.name=stored"))
    for name in ("good", "poor"):
        Path(name).unlink()
    stored = strop.train(config)
    assert stored.after["loss"] == pytest.approx(asked.after["loss"], rel=2e-3)
    first = [train_metrics(summary.folder)[0]["loss"] for summary in (asked, stored)]
    assert first[1] == pytest.approx(first[0], rel=1e-3)
    # Adam divides by the size of a gradient, so that small differences of small gradients show.
    gap = max(float((a - b).abs().max()) for a, b in zip(_values(asked), _values(stored), strict=True))
    assert gap < 0.02


def test_rows_may_be_shuffled_cut_and_joined_after_they_were_taught() -> None:
    config = taught(config_of())
    lines = Path("train.jsonl").read_text().splitlines()
    Path("train.jsonl").write_text("\n".join([*lines[60:20:-1], *Path("eval.jsonl").read_text().splitlines()]) + "\n")
    assert strop.train(config).after["loss"] > 0


@pytest.mark.parametrize("change", ["answer", "prompt", "new"])
def test_a_row_that_has_changed_is_named(change: str) -> None:
    config = taught(config_of())
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    if change == "new":
        rows.insert(6, {"prompt": "1+1+1=", "answer": "3"})
    else:
        rows[6][change] = "1+2=" if change == "prompt" else "44"
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has none for this example") as caught:
        strop.train(config)
    assert "train.jsonl:7" in caught.value.where
    assert "strop teach" in caught.value.mend
    assert not Path("runs").exists()


def test_a_row_beyond_those_that_are_looked_at_first_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = taught(config_of("data.shuffle=false"))
    monkeypatch.setattr("strop.loops.targets.CHECK_FIRST_ROWS", 5)
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    rows[20]["answer"] = "44"
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has none for this example") as caught:
        strop.train(config)
    assert "train.jsonl:21" in caught.value.where


def test_the_file_must_be_that_of_the_recipe() -> None:
    teach(config_of(top_k=4, temperature=2.0), out=Path("t.parquet"))
    both = {"teachers": BOTH, "targets": "t.parquet"}
    good: dict[str, Any] = {"teachers": [], "targets": "t.parquet"}
    strop.train(config_of(**both))
    strop.train(config_of("run.name=smaller", **(good | {"top_k": 2})))
    half = [{"path": "good"}, {"path": "poor"}]
    for changes, error, says in (
        (good | {"top_k": 5}, UserError, "tell 4 tokens apart at each position, and 5"),
        (good | {"temperature": 1.0}, UserError, "at temperature 2.0, not 1.0"),
        (
            both | {"teachers": half[:1]},
            UserError,
            r"those of good \(0.75\), poor \(0.25\), and .* names good \(1.00\)",
        ),
        (both | {"teachers": half}, UserError, r"the recipe names good \(0.50\), poor \(0.50\)"),
        (good | {"targets": "nowhere.parquet"}, DataError, "no such file of targets"),
    ):
        with pytest.raises(error, match=says):
            strop.train(config_of("run.name=bad", **changes))
    with pytest.raises(DataError, match="another tokenizer"):
        strop.train(config_of(f"model.create.characters='{CHARACTERS} '", "run.name=bad", **good))


def test_a_teacher_that_changed_since_is_noticed() -> None:
    both = {"teachers": [{"path": "good"}], "targets": "t.parquet"}
    teach(config_of(**both))
    strop.train(config_of(**both))
    target = Path("good").resolve()
    Path("good").unlink()
    shutil.copytree(target, "good")
    weights = load_file("good/model.safetensors")
    from safetensors.torch import save_file

    save_file({name: value * 1.01 for name, value in weights.items()}, "good/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the teacher good has changed since it wrote the targets"):
        strop.train(config_of("run.name=again", **both))


# --- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_a_stopped_run_goes_on_bit_for_bit(stored: bool) -> None:
    config = config_of(divergence="jensen_shannon", cross_entropy_weight=0.1, top_k=5)
    if stored:
        config = taught(config)

    def run(name: str, steps: int) -> Any:
        changed = config.run.model_copy(update={"name": name, "steps": steps})
        return strop.train(config.model_copy(update={"run": changed}))

    whole = run("whole", 6)
    run("parts", 4)
    parts = run("parts", 6)
    ours, theirs = weights_of(whole), weights_of(parts)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert train_metrics(whole.folder) == train_metrics(parts.folder)


def test_a_run_does_not_go_on_with_other_targets() -> None:
    config = taught(config_of(top_k=4))
    strop.train(config)
    Path("t.parquet").unlink()
    teach(config_of(top_k=4, teachers=[{"path": "good"}]), out=Path("t.parquet"))
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 8})})
    with pytest.raises(UserError, match="what the run learns from has changed since its checkpoint"):
        strop.train(longer)


@pytest.mark.parametrize("overrides", [["training.tokens_per_micro_batch=1"], ["training.logprob_chunk=3"]])
def test_how_it_is_cut_does_not_change_the_result(overrides: list[str]) -> None:
    whole = strop.train(config_of("run.name=whole"))
    cut = strop.train(config_of("run.name=cut", *overrides))
    assert max(float((a - b).abs().max()) for a, b in zip(_values(whole), _values(cut), strict=True)) < 1e-4


def test_with_an_adapter() -> None:
    summary = strop.train(config_of("model.lora={rank: 4}", "run.steps=20", teachers=[{"path": "good"}]))
    assert summary.after["divergence"] < summary.before["divergence"]


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_the_file_and_training_reads_it() -> None:
    recipe = config_of("tracking.display=plain", targets="t.parquet", top_k=4)
    Path("recipe.yaml").write_text(resolved_yaml(recipe))
    early = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert early.exit_code == 2
    assert "no such file of targets" in early.stderr
    assert "strop teach RECIPE" in early.stderr
    found = CliRunner().invoke(app, ["teach", "recipe.yaml"])
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[0] == "t.parquet"
    assert "100 examples" in found.stdout
    assert "the 4 likeliest told for each" in found.stdout
    trained = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert trained.exit_code == 0, trained.output
    assert "as they are in t.parquet" in trained.stdout
    assert "divergence" in trained.stdout
    assert "agreement" in trained.stdout
    again = CliRunner().invoke(app, ["teach", "recipe.yaml"])
    assert again.exit_code == 2
    assert "the file is there already" in again.stderr
    shown = CliRunner().invoke(app, ["config", "show", "recipe.yaml"])
    assert "method: distillation, cross_entropy_weight: 0.0, divergence: forward_kl" in shown.stdout


def test_it_says_how_far_it_is_now_and_then() -> None:
    said: list[str] = []
    always, hardly = now_and_then(said.append, seconds=0.0), now_and_then(said.append, seconds=1000.0)
    for progress in (always, hardly):
        progress(1000, 5000)
    assert said == ["1,000 of 5,000 rows"]


def test_rows_that_are_too_long_are_left_out_and_counted() -> None:
    rows = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(rows + json.dumps({"prompt": "1" * 40, "answer": "1"}) + "\n")
    found = teach(config_of("data.overlong_prompts=skip"), out=Path("t.parquet"))
    assert (found.examples, found.skipped) == (100, 1)


def test_nothing_is_left_of_a_file_that_could_not_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        teach(config_of(), out=Path("t.parquet"), progress=fail)
    assert not list(Path().glob("*.parquet*"))
    assert not list(Path().glob(".*parquet*"))


# --- recipes that cannot work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"teachers": []}, "none is named"),
        ({"teachers": [{"path": "good", "weight": 2.0}]}, "`supervised.teachers.0.weight` has no effect"),
        ({"jsd_beta": 0.3}, "`supervised.jsd_beta` has no effect with divergence forward_kl"),
        ({"cross_entropy_weight": 1.0}, "the teachers have no effect"),
        ({"method": "sft"}, "`supervised.teachers` has no effect with sft"),
        ({"method": "sft", "teachers": [], "targets": "t"}, "`supervised.targets` has no effect with sft"),
        ({"method": "sft", "teachers": [], "top_k": 3}, "`supervised.top_k` has no effect with sft"),
        ({"beta": 0.3}, "`supervised.beta` has no effect with distillation"),
        ({"neftune_alpha": 5.0}, "`supervised.neftune_alpha` has no effect with distillation"),
        ({"reference": "model"}, "`supervised.reference` has no effect with distillation"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strop.train(config_of(**changes))
    assert says in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ([{"path": "nowhere"}], "nowhere"),
        ([{"path": "good"}, {"path": "foreign"}], "another tokenizer than the student"),
    ],
)
def test_teachers_that_cannot_be_used_are_refused(named: list[dict[str, str]], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        strop.train(config_of(teachers=named))
    with pytest.raises(ModelError, match=says):
        teach(config_of(teachers=named), out=Path("t.parquet"))
    assert not Path("runs").exists()
    assert not Path("t.parquet").exists()


@pytest.mark.parametrize(
    ("changes", "out", "says"),
    [
        ({"method": "sft", "teachers": []}, "t.parquet", "recipes that learn from them"),
        ({"teachers": [], "targets": "t.parquet"}, "t.parquet", "names no teacher that could be asked"),
        ({}, None, "nothing says where the targets are to be written"),
        ({}, "train.jsonl", "the file is there already"),
        ({}, "nowhere/t.parquet", "there is no such folder"),
    ],
)
def test_what_cannot_be_taught_is_refused(changes: dict[str, Any], out: str | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        teach(config_of(**changes), out=None if out is None else Path(out))


def test_a_list_of_names_is_no_list_of_teachers() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(teachers=["good"])
    assert "`supervised.teachers.0` must be a section" in str(caught.value)
