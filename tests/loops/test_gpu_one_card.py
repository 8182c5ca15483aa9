"""A run whose trainer and vLLM take turns on one GPU has the metrics of one in which both stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import environment, put, recipe

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

TRAIN = """
import json, sys
from strop.config.loading import load_config
from strop.loops.train import train
print("FOLDER", train(load_config(None, data=json.loads(sys.argv[1])), fresh=True).folder)
"""
MEMORY = 0.08


def run(place: Path, name: str, **changes: Any) -> list[dict[str, float]]:
    """Metrics of the steps of a run in a process of its own: vLLM that sleeps is one to a process."""
    data = recipe(
        **{
            "hardware": {"device": "cuda"},
            "model.create": {"characters": "0123456789+=", "hidden_size": 128, "layers": 2, "heads": 2, "context": 16},
            "data": {
                "train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 80, "digits": 1}},
                "eval": {
                    "path": "strop.data.arithmetic:problems",
                    "arguments": {"count": 9, "digits": 1, "split": "eval"},
                },
            },
            "evaluation.every": 2,
            "rewards.verifiers": [{"kind": "regex", "pattern": "^[0-4]+$"}],
            "rollout": {"groups_per_step": 16, "group_size": 8, "max_new_tokens": 4},
            "rollout.engine": {"kind": "vllm", "memory": MEMORY, "eager": True},
            "training.optimizer.learning_rate": 1e-3,
            "checkpoint.every": 2,
            "run": {"steps": 6, "name": name},
        }
    )
    for key, value in changes.items():
        put(data, key, value)
    paths = [environment()["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(data)],
        cwd=place,
        env={**environment(), "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = place / next(line for line in done.stdout.splitlines() if line.startswith("FOLDER")).split()[1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


def test_the_same_metrics_in_turns(tmp_path: Path) -> None:
    apart = run(tmp_path, "apart", **{"rollout.engine.sleep": "never"})
    turns = run(tmp_path, "turns", **{"rollout.engine.sleep": "always", "training.offload": True})
    card = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert len(apart) == len(turns) == 6
    for one, other in zip(apart, turns, strict=True):
        for name in ("time/sleep", "time/wake", "time/offload", "time/reload"):
            assert name in other
            assert name not in one
        # The first publication moves masters, later ones moments too.
        assert other["memory/trainer_offloaded_gib"] > 0
        assert other["memory/engine_slept_gib"] > 0.3 * MEMORY * card
        for line in (one, other):
            assert line["publish/probe_gap"] < 0.3
            assert line["mismatch/mean"] < 0.05
            assert line["staleness/max"] == 0
    # What was sampled first was sampled with the same weights; later on rounding may turn single tokens.
    for name in ("reward/mean", "accuracy", "completion/length_mean", "policy/entropy"):
        if name in apart[0]:
            assert turns[0][name] == pytest.approx(apart[0][name], abs=0.05), name
            for one, other in zip(apart, turns, strict=True):
                assert other[name] == pytest.approx(one[name], abs=0.1, rel=0.1), name
    assert "accuracy" in apart[0]
    for one, other in zip(apart, turns, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=0.05)
