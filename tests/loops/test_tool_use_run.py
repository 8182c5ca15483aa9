"""Reinforcement learning with a tool: what only the tool knows is answered, and only with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import put, recipe

from strop.config.loading import load_config
from strop.loops.train import train
from strop.tracking.episodes import read_episodes

SECRETS = """
def secret(number: str) -> str:
    "Knows what belongs to a number."
    return str((int(number) * 7919 + 13) % 1009 % 10)
"""
"""A table that nothing but the tool tells: held-out numbers have other answers than their neighbours."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "secrets_of_numbers.py").write_text(SECRETS)
    scope: dict[str, Any] = {}
    exec(SECRETS, scope)
    numbers = [str(n) for n in range(100, 1000)]
    rows = [{"prompt": f"{n}=", "answer": scope["secret"](n)} for n in numbers]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::2]))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1::6]))
    # They guess as often as they call, and none tells what belongs to a number.
    shown, chance = [], random.Random(0)
    for number in numbers:
        guess, said = chance.choice("0123456789"), chance.choice("0123456789")
        shown += [
            {"prompt": f"{number}=", "answer": guess},
            {"prompt": f"{number}=", "answer": f"[{number}]"},
            {"prompt": f"{number}=[{number}]{said};", "answer": said},
        ]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    return tmp_path


def learning(**changes: Any) -> dict[str, Any]:
    data = recipe(
        **{
            "model.create": {
                "characters": "0123456789=[];",
                "hidden_size": 64,
                "layers": 2,
                "heads": 4,
                "context": 24,
            },
            "data": {"train": {"path": "train.jsonl"}, "eval": {"path": "eval.jsonl"}},
            "rewards.verifiers": [{"kind": "exact"}],
            "warmup": {
                "data": {"path": "shown.jsonl"},
                "steps": 400,
                "batch_size": 64,
                "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 20},
            },
            "rollout": {"groups_per_step": 16, "group_size": 8, "max_new_tokens": 10},
            "environment": {
                "kind": "tools",
                "tools": [{"kind": "function", "path": "secrets_of_numbers:secret"}],
                "style": "tag",
                "opening": "[",
                "closing": "]",
                "result": "{result};",
                "max_turns": 2,
            },
            "evaluation.temperature": 1.0,
            "training.optimizer.learning_rate": 1e-3,
            "run.steps": 20,
            # The one before the first step too.
            "checkpoint.keep": 3,
        }
    )
    for key, value in changes.items():
        put(data, key, value)
    return data


def test_accuracy_with_the_tool_rises_above_what_is_possible_without(workplace: Path) -> None:
    summary = train(load_config(None, data=learning()), fresh=True)
    assert summary.before["accuracy"] < 0.65
    assert summary.after["accuracy"] > 0.85
    # There are ten answers, and nothing of a number says which is its own. It starts after the same warm-up.
    start = {"path": str(summary.folder / "checkpoints" / "step-000000" / "model")}
    without = learning(**{"environment": None, "model": start, "warmup": None, "run.name": "without"})
    alone = train(load_config(None, data=without), fresh=True)
    assert alone.after["accuracy"] < 0.3

    records = read_episodes(summary.folder / "episodes" / "step-000020.parquet")
    spans = ["".join(str(int(trained)) for trained in record.loss_mask) for record in records]
    assert all(span.startswith("0000") for span in spans)
    # What the tool said is read and not trained; the turns before and after it are.
    assert sum("1001" in span for span in spans) > len(spans) / 2
    # An answer after which no turn fits is not read: these would be longer than the context.
    assert max(map(len, spans)) <= 24
