"""`supervised.reference: precomputed`: asked once, kept in the run's folder, and the same numbers as asked in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import steps_of

import strop
from strop.config.loading import load_config
from strop.errors import ConfigError, RunFailure
from strop.loops.reference import FILE, AskedReference
from strop.loops.supervised import open_supervised_run
from strop.training.single import SingleDeviceTrainer

METHODS = ["dpo", "cdpo", "robust_dpo", "ipo", "kto"]
ROWS = 60


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "chosen": str(a + b),
            "rejected": str(a + b + 1),
            "completion": str(a + b + (a * b) % 2),
            "label": (a * b) % 2 == 0,
        }
        for a in range(8)
        for b in range(10)
    ]
    for name, part in (("train", rows[:ROWS]), ("eval", rows[ROWS:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return tmp_path


def config_of(method: str, reference: str, *overrides: str) -> strop.Config:
    model = {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}
    data = {
        "model": {"create": model},
        "data": {"train": {"path": "train.jsonl"}, "eval": {"path": "eval.jsonl"}},
        "supervised": {"method": method, "batch_size": 8, "reference": reference},
        "training": {"optimizer": {"learning_rate": 5e-3}},
        "checkpoint": {"every": 2},
        "run": {"steps": 6, "name": reference},
        "tracking": {"display": "off", "tensorboard": False},
        "hardware": {"threads": 1, "device": "cpu"},
    }
    return load_config(None, overrides, data=data)


def training_of(summary: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [metrics for kind, _, metrics in steps_of(summary.folder) if kind == "train"]


def weights_of(summary: Any) -> dict[str, torch.Tensor]:
    return load_file(summary.model / "model.safetensors")


def same_weights(first: Any, second: Any) -> bool:
    ours, theirs = weights_of(first), weights_of(second)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


class Calls:
    """Counts what a trainer is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        logprobs = SingleDeviceTrainer.logprobs

        def counting(trainer: Any, batch: Any, *, role: Any = "policy") -> Any:
            self.found.append((role, trainer.optimizer.updates))
            return logprobs(trainer, batch, role=role)

        monkeypatch.setattr(SingleDeviceTrainer, "logprobs", counting)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_it_gives_what_asking_in_place_gives_bit_for_bit(method: str, adapter: bool) -> None:
    """Six steps of eight rows are within the first epoch of sixty."""
    lora = ["model.lora={rank: 4}"] if adapter else []
    in_place = strop.train(config_of(method, "adapter_off" if adapter else "model", *lora))
    asked = strop.train(config_of(method, "precomputed", *lora))
    assert same_weights(in_place, asked)
    assert steps_of(in_place.folder) == steps_of(asked.folder)
    assert (asked.folder / FILE).is_file()
    assert not (in_place.folder / FILE).exists()


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_later_epochs_differ_by_rounding_at_most(method: str) -> None:
    """A row then has other neighbours in its batch than when it was first seen."""
    in_place = strop.train(config_of(method, "model", "run.steps=20", "training.optimizer.learning_rate=1e-3"))
    asked = strop.train(config_of(method, "precomputed", "run.steps=20", "training.optimizer.learning_rate=1e-3"))
    first, second = ([metrics["loss"] for metrics in training_of(summary)] for summary in (in_place, asked))
    assert first[:7] == second[:7]
    assert first == pytest.approx(second, abs=2e-6)


def test_the_model_is_in_memory_once_and_no_step_asks_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)

    async def look() -> None:
        async with open_supervised_run(config_of("dpo", "precomputed")) as run:
            assert run.trainer._reference is None
            await run.begin()
            before = len(calls.found)
            assert before == 7, "six batches and the held-out rows"
            await run.update(await run.next_batch())
            await run.evaluate()
            assert len(calls.found) == before

    import asyncio

    asyncio.run(look())
    assert {updates for _, updates in calls.found} == {0}


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_stopped_run_goes_on_bit_for_bit_and_asks_only_for_what_is_new(
    method: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = ["model.lora={rank: 4}"] if adapter else []
    whole = strop.train(config_of(method, "precomputed", "run.name=whole", "run.steps=10", *lora))
    strop.train(config_of(method, "precomputed", "run.name=parts", "run.steps=4", *lora))
    calls = Calls(monkeypatch)
    parts = strop.train(config_of(method, "precomputed", "run.name=parts", "run.steps=10", *lora))
    assert same_weights(whole, parts)
    assert training_of(whole) == training_of(parts)
    role = "reference" if adapter else "policy"
    # Steps 5 to 8 meet new rows (60 of 8 a step); KTO also mismatches rows anew at each of steps 5 to 10.
    assert [call for call in calls.found if call[1] == 0] == [(role, 0)] * (4 if method == "dpo" else 10)
    calls.found.clear()
    again = strop.train(config_of(method, "precomputed", "run.name=parts", "run.steps=10", *lora))
    assert same_weights(parts, again)
    assert not [call for call in calls.found if call[1] == 0], "everything is in the file"


def test_a_run_that_died_before_its_first_checkpoint_uses_the_file_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = strop.train(config_of("dpo", "precomputed", "run.name=whole"))

    async def die(_: Any) -> None:
        raise RuntimeError("the lights went out")

    with monkeypatch.context() as patch:
        patch.setattr("strop.loops.base_run.BaseRun.evaluate", die)
        with pytest.raises(RuntimeError, match="lights"):
            strop.train(config_of("dpo", "precomputed"))
    calls = Calls(monkeypatch)
    found = strop.train(config_of("dpo", "precomputed"))
    assert calls.found == []
    assert same_weights(expected, found)


@pytest.mark.parametrize("damage", ["other key", "cut short"])
def test_a_file_that_does_not_belong_to_the_run_does_not_count(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("dpo", "precomputed")
    expected = strop.train(config)
    file = expected.folder / FILE
    longer = config_of("dpo", "precomputed", "run.steps=7")
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:100])
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(file)
        pq.write_table(table.replace_schema_metadata({b"strop.reference": b"{}"}), file)
    calls = Calls(monkeypatch)
    found = strop.train(longer)
    assert len(calls.found) == 8
    whole = strop.train(config_of("dpo", "precomputed", "run.steps=7", "run.name=whole"))
    assert same_weights(found, whole)


def test_rows_that_were_not_asked_for_are_a_failure(tmp_path: Path) -> None:
    asked = AskedReference(tmp_path / FILE, "{}")
    with pytest.raises(RunFailure, match="was not asked for train/3"):
        asked.fill(None, ["train/3"])  # type: ignore[arg-type]


def test_skipped_rows_and_a_batch_that_runs_into_the_next_epoch() -> None:
    lines = Path("train.jsonl").read_text().splitlines()
    long = json.dumps({"prompt": "1" * 40, "chosen": "1", "rejected": "2"})
    Path("train.jsonl").write_text("\n".join([*lines[:10], long, *lines[10:]]) + "\n")
    overrides = ["data.overlong_prompts=skip", "run.steps=9", "supervised.batch_size=7"]
    in_place = strop.train(config_of("dpo", "model", *overrides))
    asked = strop.train(config_of("dpo", "precomputed", *overrides))
    first, second = ([metrics["loss"] for metrics in training_of(summary)] for summary in (in_place, asked))
    assert first[:8] == second[:8]
    assert first == pytest.approx(second, abs=2e-6)


@pytest.mark.parametrize(
    ("method", "reference", "overrides", "says"),
    [
        ("dpo", "adapter_off", [], "there is no adapter to switch off"),
        ("dpo", "model", ["model.lora={rank: 4}"], "would only cost memory"),
        ("orpo", "precomputed", [], "`supervised.reference` has no effect with orpo, which has none"),
    ],
)
def test_references_that_make_no_sense_are_refused(
    method: str, reference: str, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        strop.train(config_of(method, reference, *overrides))
    assert says in str(caught.value)
    assert not Path("runs").exists()
