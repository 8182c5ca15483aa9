"""Reinforcement learning with a tool: what only the tool knows is answered, and only with it."""

from __future__ import annotations

import json
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
"""A table that the prompts do not tell: held-out numbers have the answers of training no more often than chance."""


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
    # Half of the demonstrations call, the other half guess what another number has.
    shown = []
    for at, row in enumerate(rows[::2]):
        number = row["prompt"][:-1]
        if at % 2:
            shown.append({"prompt": row["prompt"], "answer": f"[{number}]"})
        else:
            shown.append({"prompt": row["prompt"], "answer": rows[at]["answer"]})
        shown.append({"prompt": f"{number}=[{number}]{row['answer']};", "answer": row["answer"]})
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
                "steps": 250,
                "batch_size": 64,
                "optimizer": {"learning_rate": 6e-3, "schedule": "cosine", "warmup_steps": 20},
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
        }
    )
    for key, value in changes.items():
        put(data, key, value)
    return data


def test_accuracy_with_the_tool_rises_above_what_is_possible_without(workplace: Path) -> None:
    summary = train(load_config(None, data=learning()), fresh=True)
    assert summary.before["accuracy"] < 0.75
    assert summary.after["accuracy"] > summary.before["accuracy"] + 0.15
    # There are ten answers, and nothing of a number says which is its own.
    assert summary.after["accuracy"] > 0.7
    without = learning(**{"environment": None, "run.name": "without"})
    alone = train(load_config(None, data=without), fresh=True)
    assert alone.after["accuracy"] < 0.3

    records = read_episodes(summary.folder / "episodes" / "step-000020.parquet")
    calling = [record for record in records if len(record.tokens) > 6]
    assert len(calling) > len(records) / 2
    for record in calling:
        # What the tool said is read and not trained; both turns are.
        spans = "".join(str(int(trained)) for trained in record.loss_mask)
        assert spans.startswith("0000")
        assert "1001" in spans
