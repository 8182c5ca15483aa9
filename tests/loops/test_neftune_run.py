"""Runs with `supervised.neftune_alpha`: packing and cuts do not change the noise, and a stopped run goes on with it."""

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

import strop
from strop.config.loading import load_config
from strop.config.training import OptimizerSettings
from strop.data.order import stream_key
from strop.errors import ConfigError
from strop.loops.supervised import open_supervised_run
from strop.loops.supervised_run import batch_of, draw_keys
from strop.models.neftune import embedding_noise
from strop.training.single import SingleDeviceTrainer

ALPHA = 5.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    # All prompts begin alike, so that without noise their beginning would be computed once.
    rows = [{"prompt": f"0000+{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(10)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_of(*overrides: str, alpha: float | None = ALPHA, method: str = "sft") -> strop.Config:
    model = {"characters": "0123456789+=", "hidden_size": 32, "layers": 2, "heads": 2, "context": 32}
    data: dict[str, Any] = {
        "model": {"create": model},
        "data": {"train": {"path": "train.jsonl"}, "eval": {"path": "train.jsonl"}},
        "supervised": {"method": method, "batch_size": 6, "neftune_alpha": alpha},
        "training": {"optimizer": {"learning_rate": 5e-3}},
        "checkpoint": {"every": 2},
        "evaluation": {"prompts": 8},
        "run": {"steps": 6, "name": "run"},
        "tracking": {"display": "off", "tensorboard": False},
        "hardware": {"threads": 1, "device": "cpu"},
    }
    return load_config(None, overrides, data=data)


def training_of(summary: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [metrics for kind, _, metrics in steps_of(summary.folder) if kind == "train"]


def weights_of(summary: Any) -> dict[str, torch.Tensor]:
    return load_file(summary.model / "model.safetensors")


def largest_gap(first: Any, second: Any) -> float:
    ours, theirs = weights_of(first), weights_of(second)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


async def test_the_loss_is_that_of_the_noisy_embeddings_by_plain_torch() -> None:
    config = config_of()
    async with open_supervised_run(config) as run:
        rows = [run.stream.next()[0] for _ in range(6)]
        model = run.roles.model
        total, count = torch.zeros(()), 0
        for row in rows:
            [example] = row.examples
            length, key = len(example.tokens), stream_key(config.run.seed, row.index, 0)
            draws = np.random.Generator(np.random.Philox(key=np.array([key, 0], np.uint64))).random(
                (length, 32), dtype=np.float32
            )
            noise = torch.from_numpy(2 * draws - 1) * ALPHA / math.sqrt(length * 32)
            ids = torch.from_numpy(example.tokens)[None]
            with torch.no_grad():
                logits = model(inputs_embeds=model.get_input_embeddings()(ids) + noise).logits[0, :-1]
            picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            total = total - picked[torch.from_numpy(example.loss_mask[1:])].sum()
            count += int(example.loss_mask.sum())
        batch = batch_of(rows)
        batch.draw_keys = draw_keys(rows, config.run.seed)
        plain = run.trainer.evaluate(batch, run.objective)["loss"]
        stats = await run.update(batch)
    assert stats["loss"] == pytest.approx(float(total) / count, rel=1e-5)
    # An evaluation has no noise.
    assert abs(plain - stats["loss"]) > 1e-3


@pytest.mark.parametrize(
    "overrides",
    [["training.tokens_per_micro_batch=1"], ["training.tokens_per_micro_batch=30"],
     ["model.activation_checkpointing=true"]],
)  # fmt: skip
@pytest.mark.parametrize("adapter", [False, True])
def test_how_a_batch_is_cut_does_not_change_the_noise(overrides: list[str], adapter: bool) -> None:
    lora = ["model.lora={rank: 4}"] if adapter else []
    whole = strop.train(config_of("run.name=whole", *lora))
    cut = strop.train(config_of("run.name=cut", *overrides, *lora))
    silent = strop.train(config_of("run.name=silent", *lora, alpha=None))
    assert largest_gap(whole, cut) < 1e-4
    assert largest_gap(whole, silent) > 1e-3


@pytest.mark.parametrize("overrides", [[], ["model.lora={rank: 4}"], ["model.activation_checkpointing=true"]])
def test_a_stopped_run_goes_on_bit_for_bit(overrides: list[str]) -> None:
    whole = strop.train(config_of("run.name=whole", *overrides))
    strop.train(config_of("run.name=parts", "run.steps=4", *overrides))
    parts = strop.train(config_of("run.name=parts", *overrides))
    assert largest_gap(whole, parts) == 0
    assert training_of(whole) == training_of(parts)


def test_another_seed_is_another_noise_and_an_epoch_is_not_the_last() -> None:
    rows = [type("Row", (), {"index": at, "examples": (None,)})() for at in range(3)]
    keys = draw_keys(rows, 0)
    assert keys.dtype == torch.int64
    assert len(set(keys.tolist()) | set(draw_keys(rows, 1).tolist())) == 6
    lengths = [5, 5, 5]
    first, again = (embedding_noise(lengths, 4, 1.0, keys=keys.tolist(), update=update) for update in (0, 7))
    assert not torch.equal(first, again)


def test_a_batch_without_keys_is_an_error(tiny_model: Any) -> None:
    from strop.algorithms.supervised import CrossEntropy
    from strop.data.examples import Example, ExampleRow

    trainer = SingleDeviceTrainer(tiny_model(), OptimizerSettings(), total_updates=1, neftune_alpha=ALPHA)
    example = Example(np.arange(3, 9), np.arange(6) >= 2)
    with pytest.raises(AssertionError, match="the batch has none"):
        trainer.update(batch_of([ExampleRow("", (example,), (0.0,))]), CrossEntropy())


def test_it_belongs_to_fine_tuning() -> None:
    with pytest.raises(ConfigError, match=r"`supervised\.neftune_alpha` has no effect with dpo"):
        strop.train(config_of(method="dpo"))
