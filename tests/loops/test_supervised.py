"""Learning from examples: against plain PyTorch, whatever the packing, and the same after a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import steps_of
from typer.testing import CliRunner

import strop
from strop.algorithms.supervised import CrossEntropy
from strop.cli import app
from strop.config.loading import load_config
from strop.config.training import OptimizerSettings
from strop.data.examples import Example, ExampleRow
from strop.errors import ConfigError, DataError, UserError
from strop.loops.supervised import open_supervised_run
from strop.loops.supervised_run import batch_of, mismatched
from strop.training.batching import micro_batches
from strop.training.single import SingleDeviceTrainer

METHODS = [
    "sft",
    "reward_model",
    "process_reward",
    "dpo",
    "cdpo",
    "robust_dpo",
    "ipo",
    "simpo",
    "orpo",
    "kto",
]  # fmt: skip


def rows_of(numbers: range) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{a}+{b}=",
            "answer": str(a + b),
            "chosen": str(a + b),
            "rejected": str(a + b + 1),
            "completion": str(a + b + (a * b) % 2),
            "label": (a * b) % 2 == 0,
            "steps": [str(a), str(b)],
            "labels": [a > b, True],
        }
        for a in numbers
        for b in range(10)
    ]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    for name, numbers in (("train", range(8)), ("eval", range(8, 10))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(numbers)))
    return tmp_path


def config_of(method: str, *overrides: str, **supervised: Any) -> strop.Config:
    model = {"characters": "0123456789+=\n", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}
    data = {
        "model": {"create": model},
        "data": {"train": {"path": "train.jsonl"}, "eval": {"path": "eval.jsonl"}},
        "supervised": {"method": method, "batch_size": 8, **supervised},
        "training": {"optimizer": {"learning_rate": 5e-3}},
        "checkpoint": {"every": 2},
        "run": {"steps": 6, "name": "run"},
        "tracking": {"display": "off", "tensorboard": False},
        "hardware": {"threads": 1, "device": "cpu"},
    }
    return load_config(None, overrides, data=data)


def metrics_of(run: Path, kind: str = "train") -> list[dict[str, float]]:
    """Without what depends on the clock and the machine."""
    return [metrics for found, _, metrics in steps_of(run) if found == kind]


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_bit_for_bit(method: str) -> None:
    whole = strop.train(config_of(method, "run.name=whole"))
    strop.train(config_of(method, "run.name=parts", "run.steps=4"))
    parts = strop.train(config_of(method, "run.name=parts"))
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (whole, parts))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics_of(whole.folder) == metrics_of(parts.folder)
    assert whole.before.keys() == whole.after.keys() != set()
    assert whole.after["loss"] < whole.before["loss"]


@pytest.mark.parametrize("method", ["dpo", "cdpo", "robust_dpo"])
async def test_the_first_loss_is_log_two(method: str) -> None:
    async with open_supervised_run(config_of(method, label_smoothing=None)) as run:
        await run.begin()
        stats = await run.update(await run.next_batch())
        expected = math.log(2)
        assert stats["loss"] == pytest.approx(expected, abs=1e-6)
        assert stats["preference/margin"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("method", ["sft", "dpo", "simpo", "kto", "reward_model"])
def test_the_micro_batches_do_not_change_the_result(method: str) -> None:
    whole = strop.train(config_of(method, "run.name=whole"))
    small = strop.train(config_of(method, "run.name=small", "training.tokens_per_micro_batch=1"))
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (whole, small))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    assert small.after["loss"] == pytest.approx(whole.after["loss"], rel=1e-4)


def test_pairs_stay_together_in_a_micro_batch() -> None:
    examples = [Example(np.arange(5 + n, dtype=np.int64), np.arange(5 + n) >= 3) for n in range(6)]
    rows = [ExampleRow(str(n), tuple(examples[2 * n : 2 * n + 2]), (0.0, 0.0)) for n in range(3)]
    for budget in (1, 14, 17, 1000):
        cut = micro_batches(batch_of(rows), budget, torch.device("cpu"), whole_groups=True)
        assert [at for micro in cut for at in micro.sequences.tolist()] == list(range(6))
        assert all(len(micro.sequences) % 2 == 0 for micro in cut)
        assert all(len(micro.sequences) == 2 or micro.inputs.tokens <= budget for micro in cut)


# --- against plain PyTorch -----------------------------------------------------------------------------------------


def padded(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = max(len(example.tokens) for example in examples)
    ids, attention, mask = (torch.zeros(len(examples), longest, dtype=torch.int64) for _ in range(3))
    for at, example in enumerate(examples):
        length = len(example.tokens)
        ids[at, :length] = torch.from_numpy(example.tokens)
        attention[at, :length] = 1
        mask[at, :length] = torch.from_numpy(example.loss_mask)
    return ids, attention, mask.bool()


def plain_loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """Mean negative log-likelihood of the trained tokens of a padded batch, by transformers and torch alone."""
    ids, attention, mask = padded(examples)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    picked = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
    return -picked[mask[:, 1:]].sum() / mask.sum()


def some_examples() -> list[Example]:
    generator = np.random.default_rng(0)
    lengths = [4, 19, 7, 12, 5, 30]
    return [
        Example(generator.integers(3, 30, size=length).astype(np.int64), np.arange(length) >= 2) for length in lengths
    ]


def test_packed_padded_and_single_gradients_are_equal(tiny_model: Any) -> None:
    examples = some_examples()

    def packed(parts: list[list[Example]]) -> dict[str, torch.Tensor]:
        model = tiny_model()
        trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1, budget=100)
        counted = sum(int(example.loss_mask.sum()) for example in examples)
        for part in parts:
            batch = batch_of([ExampleRow("", (example,), (0.0,)) for example in part])
            for micro in micro_batches(batch, 100, trainer.device):
                from strop.models.attention import running

                with running(model, micro.inputs.attention):
                    _, _, terms, _ = trainer._loss(micro, CrossEntropy(), {"": float(counted)})
                    terms["nll"].backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    reference = tiny_model()
    plain_loss(reference, examples).backward()
    for parts in ([examples], [[example] for example in examples]):
        found = packed(parts)
        for name, parameter in reference.named_parameters():
            assert float((found[name] - parameter.grad).abs().max()) < 1e-5, name


async def test_fine_tuning_ends_where_a_plain_loop_does() -> None:
    """The same rows in the same order through a loop of twenty lines: the losses agree within 2 % at the end."""
    config = config_of("sft", "run.steps=40", "checkpoint.every=100")
    seen: list[list[Example]] = []
    async with open_supervised_run(config) as run:
        start = {name: value.clone() for name, value in run.roles.model.state_dict().items()}
        ours = []
        for _ in range(40):
            rows = [run.stream.next()[0] for _ in range(8)]
            seen.append([example for row in rows for example in row.examples])
            ours.append((await run.update(batch_of(rows)))["loss"])
        model = run.roles.model
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.999), weight_decay=0.0)
        theirs = []
        for examples in seen:
            loss = plain_loss(model, examples)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            theirs.append(float(loss.detach()))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[-1] == pytest.approx(theirs[-1], rel=0.02)
    assert ours[-1] < 0.8 * ours[0]


# --- reward models -------------------------------------------------------------------------------------------------


def test_a_reward_model_learns_an_order_and_loads_in_transformers() -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = [
        {"prompt": f"{a}=", "chosen": str(max(b, c)), "rejected": str(min(b, c))}
        for a in range(10)
        for b in range(10)
        for c in range(b)
    ]
    for name, part in (("train", rows[::2]), ("eval", rows[1::2])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    summary = strop.train(config_of("reward_model", "run.steps=150", "checkpoint.every=1000", batch_size=16))
    assert summary.before["accuracy"] == 0.0
    assert summary.after["accuracy"] >= 0.95
    model = AutoModelForSequenceClassification.from_pretrained(summary.model)
    tokenizer = AutoTokenizer.from_pretrained(summary.model)

    def score(text: str) -> float:
        ids = torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
        return float(model(input_ids=ids).logits[0, 0])

    scores = [score(f"3={digit}") for digit in range(10)]
    assert scores[0] < scores[4] < scores[9]


def test_adapters_train_a_reward_models_head_whole() -> None:
    summary = strop.train(config_of("reward_model", "model.lora={rank: 4}"))
    weights = load_file(summary.model / "model.safetensors")
    assert float(weights["score.weight"].abs().max()) > 0
    assert not any("lora" in name for name in weights)


def test_mismatched_completions_belong_to_the_next_prompt() -> None:
    examples = [
        Example(np.asarray([at, at, 10 + at], dtype=np.int64), np.asarray([False, False, True])) for at in range(3)
    ]
    found = mismatched(batch_of([ExampleRow(str(at), (e,), (0.0,)) for at, e in enumerate(examples)]))
    assert found.input_ids.tolist() == [0, 0, 11, 1, 1, 12, 2, 2, 10]
    assert found.loss_mask.tolist() == [False, False, True] * 3


# --- recipes that cannot work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "overrides", "says"),
    [
        ("sft", ["supervised.beta=0.1"], "`supervised.beta` has no effect with sft"),
        ("dpo", ["supervised.centre=0.1"], "`supervised.centre` has no effect with dpo"),
        ("cdpo", ["supervised.label_smoothing=0.6"], "below 0.5"),
        ("kto", ["supervised.batch_size=1"], "a batch of one has none"),
        ("reward_model", ["supervised.columns={ranked: r, chosen: c}"], "`supervised.columns.chosen` has no effect"),
        ("dpo", ["supervised.columns.label=good"], "`supervised.columns.label` has no effect with dpo"),
        ("sft", ["rollout.group_size=4"], "`rollout` has no effect with `supervised`"),
        ("sft", ["training.epochs=2"], "`training.epochs` has no effect with `supervised`"),
        ("sft", ["evaluation.temperature=1"], "`evaluation.temperature` has no effect"),
    ],
)
def test_settings_without_effect_are_refused(method: str, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strop.train(config_of(method, *overrides))
    assert says in str(caught.value)
    assert not Path("runs").exists()


def test_longer_examples_than_the_context_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit the model's context of 32 tokens"):
        strop.train(config_of("sft", "supervised.max_tokens=64"))
    with pytest.raises(UserError, match="at most 3 fit"):
        strop.train(config_of("sft", "supervised.max_tokens=3"))


def test_a_recipe_without_rewards_or_examples_says_both() -> None:
    data = {"model": {"create": {}}, "data": {"train": {"path": "train.jsonl"}}}
    with pytest.raises(ConfigError, match="`rewards` is missing"):
        load_config(None, data=data)
    both = {**data, "rewards": {"verifiers": [{"kind": "exact"}]}, "supervised": {}}
    with pytest.raises(ConfigError, match="exclude each other"):
        load_config(None, data=both)


def test_the_command_shows_losses(tmp_path: Path) -> None:
    from strop.config.loading import resolved_yaml

    Path("recipe.yaml").write_text(resolved_yaml(config_of("sft", "tracking.display=plain")))
    result = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.stdout
    assert "sft, 8 rows a step" in result.stdout
    assert "tokens right" in result.stdout
    shown = CliRunner().invoke(app, ["runs", "show", "runs/run"])
    assert shown.exit_code == 0, shown.output
    assert "perplexity" in shown.stdout


def test_commands_of_reinforcement_learning_say_so() -> None:
    from strop.config.loading import resolved_yaml

    Path("recipe.yaml").write_text(resolved_yaml(config_of("dpo", beta=0.3)))
    scored = CliRunner().invoke(app, ["eval", "recipe.yaml"])
    assert scored.exit_code == 2
    assert "learns from examples" in scored.stderr
    assert "--model" in scored.stderr
    shown = CliRunner().invoke(app, ["config", "show", "recipe.yaml"])
    assert shown.exit_code == 0, shown.output
    assert (
        "# the objective that results: method: dpo, beta: 0.3, length_normalised: False, nll_coef: 0.0" in shown.stdout
    )


def test_characters_that_a_new_model_lacks_are_named() -> None:
    rows = [*rows_of(range(1)), {**rows_of(range(1))[0], "answer": "x"}]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="alphabet lacks") as caught:
        strop.train(config_of("sft"))
    assert "train.jsonl:11" in caught.value.where
