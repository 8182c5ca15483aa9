"""Every named algorithm trains a model through the real loop, and the reward rises.

A tiny model is warmed up on demonstrations of which six in ten are wrong, so it answers right four times in ten. Each
step asks the same eight prompts, so that the mean rewards of two steps can be compared. Everything is seeded and a CPU
computes the same numbers every time: a failure is a change of the code, not of the dice. The margin leaves room for
other processors, whose rounding differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import put, recipe, steps_of

from strop.algorithms.named import ALGORITHMS
from strop.config.loading import load_config
from strop.loops.train import train

PROMPTS = 8
STEPS = 12
MARGIN = 0.12
"""Half of what every algorithm gains; a model that is not trained gains nothing but chance, less than half of it."""
TASK: dict[str, Any] = {
    "model": {"create": {"characters": "0123456789=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 16}},
    "data.train": {"path": "prompts.jsonl"},
    "data.shuffle": False,
    "rewards.verifiers": [{"kind": "exact"}],
    "rollout": {"groups_per_step": PROMPTS, "group_size": 16, "max_new_tokens": 5},
    "training.optimizer": {"learning_rate": 1e-3},
    "tracking.episodes_every": 0,
    "checkpoint.every": 100,
    "run.steps": STEPS,
}
WARMUP = {"steps": 60, "batch_size": 40, "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"}}


def run(name: str, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Train in the working folder; the model's folder and the metrics of each step."""
    data = recipe(**TASK)
    put(data, "run.name", name)
    for key, value in changes.items():
        put(data, key, value)
    summary = train(load_config(None, data=data), fresh=True)
    return summary.model, [metrics for kind, _, metrics in steps_of(summary.folder) if kind == "train"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the prompts; the student, right four times in ten, and a teacher, which nearly always is."""
    folder = tmp_path_factory.mktemp("algorithms")
    prompts = [{"prompt": f"{n}=", "answer": str(n)} for n in range(PROMPTS)]
    wrong = [{"prompt": f"{n}=", "answer": str(n + 1)} for n in range(PROMPTS)]
    for name, rows in (("prompts", prompts), ("flawed", prompts * 2 + wrong * 3)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = {"folder": folder}
        for name, file in (("student", "flawed"), ("teacher", "prompts")):
            warmup = {**WARMUP, "data": {"path": f"{file}.jsonl"}}
            changes = {"warmup": warmup, "run.steps": 1, "training.optimizer.learning_rate": 1e-9}
            model, steps = run(name, **changes)
            found[name] = folder / model
            found[f"{name} reward"] = steps[0]["reward/mean"]
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_reward_rises(name: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models["folder"])
    changes: dict[str, Any] = {"model": {"path": str(models["student"])}, "algorithm.name": name}
    if name in ("opd", "gkd"):
        changes["algorithm.teacher"] = str(models["teacher"])
    if name == "ppo":
        changes["critic.optimizer.learning_rate"] = 1e-2
    _, steps = run(name, **changes)
    rewards = [metrics["reward/mean"] for metrics in steps]
    assert len(rewards) == STEPS
    assert mean(rewards[-3:]) > mean(rewards[:3]) + MARGIN, rewards
    for metrics in steps:
        assert metrics["groups/sampled"] == metrics["groups/kept"] + metrics["groups/discarded"]
        assert metrics["mismatch/effective_share"] == pytest.approx(1, abs=1e-4)
        assert metrics["mismatch/abs_max"] < 1e-3


def test_without_training_it_does_not_rise(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models["folder"])
    _, steps = run("still", **{"model": {"path": str(models["student"])}, "training.optimizer.learning_rate": 1e-9})
    rewards = [metrics["reward/mean"] for metrics in steps]
    assert mean(rewards[-3:]) - mean(rewards[:3]) < MARGIN / 2, rewards


def test_the_student_is_wrong_more_often_than_not_and_the_teacher_right(models: dict[str, Any]) -> None:
    assert 0.25 < models["student reward"] < 0.55
    assert models["teacher reward"] > 0.9
