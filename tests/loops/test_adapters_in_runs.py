"""Whole runs with environments and data of other frameworks: they learn, and go on as if never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import episodes_of, put, recipe, steps_of, weights_of

from strop.config.loading import load_config
from strop.loops.train import train

for _package in ("gymnasium", "reasoning_gym"):
    pytest.importorskip(_package)

DOORS: dict[str, Any] = {
    "model.create": {"characters": "123[]:", "hidden_size": 64, "layers": 1, "heads": 4, "context": 64},
    "data": {
        "train": {"path": "strop.data.seeds:episodes", "arguments": {"count": 64, "prompt": ":"}},
        "render": "text",
    },
    "rewards.verifiers": [{"kind": "environment"}],
    "environment": {
        "kind": "gymnasium",
        "id": "tiny_gym:Doors-v0",
        "opening": "{observation}:",
        "observation": "{observation}:",
        "render": "observation",
        "max_turn_tokens": 1,
    },
    "rollout": {"groups_per_step": 16, "group_size": 8, "max_new_tokens": 2},
}
SLIME: dict[str, Any] = {
    "environment": {"kind": "slime", "generate": "tiny_slime:two_turns", "arguments": {"says": "1"}},
    "rollout.max_new_tokens": 8,
    "rewards.verifiers": [{"kind": "slime", "function": "tiny_slime:ones"}],
}
SUMS: dict[str, Any] = {
    "data": {"train": {"path": "reasoning-gym:chain_sum", "arguments": {"size": 40, "max_terms": 2, "max_digits": 1}}},
    "data.prompt_template": "{metadata[expression]}=",
    "model.create.characters": "0123456789+-= ",
    "rewards.verifiers": [{"kind": "reasoning_gym"}],
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)


def run(changes: dict[str, Any], **more: Any) -> Path:
    data = recipe(**changes)
    for key, value in more.items():
        put(data, key, value)
    return train(load_config(None, data=data)).folder


def test_a_policy_learns_an_environment_of_gymnasium() -> None:
    folder = run(DOORS, **{"run.steps": 20, "training.optimizer.learning_rate": 5e-3})
    rewards = [line["reward/mean"] for kind, _, line in steps_of(folder) if kind == "train"]
    # Whoever goes through any of the three doors gets two thirds of a point in two rounds.
    assert sum(rewards[:3]) / 3 < 0.7
    assert sum(rewards[-3:]) / 3 > 1.2
    records = episodes_of(folder)[-8:]
    assert all(any(record.loss_mask) for record in records)


@pytest.mark.parametrize("changes", [DOORS, SLIME, SUMS], ids=["gymnasium", "slime", "reasoning-gym"])
def test_a_run_goes_on_bit_for_bit(changes: dict[str, Any]) -> None:
    whole = run(changes, **{"run.steps": 3, "run.name": "whole", "checkpoint.every": 1})
    parts = [run(changes, **{"run.steps": steps, "run.name": "parts", "checkpoint.every": 1}) for steps in (1, 3)]
    assert parts[0] == parts[1]
    assert weights_of(parts[1]) == weights_of(whole)
    texts = [[record.completion_text for record in episodes_of(folder)] for folder in (whole, parts[1])]
    assert json.dumps(texts[0]) == json.dumps(texts[1])
