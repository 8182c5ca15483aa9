"""Whole runs that sample with vLLM; skipped where it is not installed (`.ci/run` has it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import put, recipe

from strop.config.loading import load_config
from strop.loops.evaluate import evaluate_model
from strop.loops.rollout import rollout
from strop.loops.train import train

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


def small_digits(**changes: Any) -> dict[str, Any]:
    """A model without any training learns to write digits below five."""
    data = recipe(
        **{
            # Heads of 32, the smallest that vLLM has a kernel for.
            "model.create": {"characters": "0123456789+=", "hidden_size": 64, "layers": 2, "heads": 2, "context": 16},
            "data": {"train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 80, "digits": 1}}},
            "rewards.verifiers": [{"kind": "regex", "pattern": "^[0-4]+$"}],
            "rollout": {"groups_per_step": 16, "group_size": 8, "max_new_tokens": 4},
            "training.optimizer.learning_rate": 5e-3,
            "run.steps": 12,
        }
    )
    for key, value in {"rollout.engine.kind": "vllm", **changes}.items():
        put(data, key, value)
    return data


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


def test_a_run_learns_with_vllm_and_its_logprobs_are_the_trainers(workplace: Path) -> None:
    steps = metrics_of(train(load_config(None, data=small_digits())).folder)
    assert len(steps) == 12
    for step in steps:
        assert step["mismatch/abs_max"] < 1e-3
        assert step["publish/probe_gap"] < 1e-3
        assert step["staleness/max"] == 0
    accuracy = [step["accuracy"] for step in steps]
    assert sum(accuracy[-3:]) / 3 > sum(accuracy[:3]) / 3 + 0.3


def test_a_run_whose_vllm_divides_its_layers(workplace: Path) -> None:
    data = small_digits(**{"run.steps": 3})
    found = []
    for name, tensor in (("one", 1), ("two", 2)):
        put(data, "run.name", name)
        put(data, "rollout.engine.tensor", tensor)
        found.append(metrics_of(train(load_config(None, data=data)).folder))
    for one, two in zip(*found, strict=True):
        assert two["mismatch/abs_max"] < 1e-3
        assert two["publish/probe_gap"] < 1e-3
        assert two["accuracy"] == one["accuracy"]


@pytest.mark.parametrize("cluster", [{}, {"kind": "ray", "engines": {"placement": "separate"}}], ids=["here", "ray"])
def test_a_run_whose_vllm_has_its_adapters_beside_the_weights(workplace: Path, cluster: dict[str, Any]) -> None:
    if cluster:
        pytest.importorskip("ray")
    lora = {"model.lora": {"rank": 4}, "training.optimizer.learning_rate": 2e-2}
    data = small_digits(**{"run.steps": 4, **lora})
    found = []
    for name, merges in (("merged", True), ("beside", False)):
        put(data, "run.name", name)
        put(data, "rollout.engine.merge_adapters", merges)
        found.append(metrics_of(train(load_config(None, data={**data, "cluster": {} if merges else cluster})).folder))
    for merged, beside in zip(*found, strict=True):
        assert beside["mismatch/abs_max"] < 1e-3
        assert beside["publish/probe_gap"] < 1e-3
        assert beside["accuracy"] == merged["accuracy"]


def test_a_model_is_evaluated_and_sampled_into_a_file_with_vllm(workplace: Path) -> None:
    held_out = {"path": "strop.data.arithmetic:problems", "arguments": {"count": 9, "digits": 1, "split": "eval"}}
    data = small_digits(**{"data.eval": held_out})
    found = {}
    for kind in ("local", "vllm"):
        put(data, "rollout.engine.kind", kind)
        config = load_config(None, data=data)
        rollout(config, f"{kind}.jsonl", prompts=3)
        lines = [json.loads(line) for line in Path(f"{kind}.jsonl").read_text().splitlines()]
        found[kind] = evaluate_model(config).metrics(), [line["prompt"] for line in lines]
        assert len(lines) == 3 * 8
        assert all(len(line["logprobs"]) == len(line["completion_ids"]) for line in lines)
    # The likeliest completions are those of the model, whoever samples them.
    assert found["vllm"] == found["local"]


def test_a_run_on_ray_whose_engine_is_vllm(workplace: Path) -> None:
    pytest.importorskip("ray")
    data = small_digits(**{"run.steps": 2})
    here = metrics_of(train(load_config(None, data={**data, "run": {**data["run"], "name": "here"}})).folder)
    cluster = {"kind": "ray", "engines": {"placement": "separate"}, "trainer": {"ranks": 2}}
    there = metrics_of(train(load_config(None, data={**data, "cluster": cluster})).folder)
    # Two processes share its layers; it has a process of its own without being told.
    put(data, "rollout.engine.tensor", 2)
    put(data, "run.name", "divided")
    divided = metrics_of(train(load_config(None, data={**data, "cluster": {"kind": "ray"}})).folder)
    for one, *others in zip(here, there, divided, strict=True):
        for other in others:
            assert other["accuracy"] == one["accuracy"]
            assert other["mismatch/abs_max"] < 1e-3
