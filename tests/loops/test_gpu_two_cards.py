"""A run whose vLLM has two GPUs, and one whose adapters it keeps beside the weights, have the metrics of plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_one_card import run

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

ADAPTERS = {"model.lora": {"rank": 4}, "training.optimizer.learning_rate": 1e-2}


def alike(place: Path, **others: dict[str, Any]) -> None:
    (first, *later) = [run(place, name, **changes) for name, changes in others.items()]
    assert len(first) == 6
    for other in later:
        for one, two in zip(first, other, strict=True):
            for line in (one, two):
                assert line["publish/probe_gap"] < 0.3
                assert line["mismatch/mean"] < 0.05
                assert line["staleness/max"] == 0
            # Rounding may turn single tokens.
            for name in ("reward/mean", "completion/length_mean", "policy/entropy"):
                assert two[name] == pytest.approx(one[name], abs=0.1, rel=0.1), name
            assert two["loss"] == pytest.approx(one["loss"], abs=0.05)


@two_cards
@pytest.mark.multi_gpu
def test_vllm_on_two_cards(tmp_path: Path) -> None:
    alike(tmp_path, one={"rollout.engine.sleep": "never"}, two={"rollout.engine.tensor": 2})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rollout.engine.sleep": "never"}, id="awake"),
        pytest.param({"rollout.engine.sleep": "always", "training.offload": True}, id="in turns"),
        pytest.param({"rollout.engine.tensor": 2}, id="two cards", marks=[pytest.mark.multi_gpu, two_cards]),
    ],
)
def test_adapters_beside_the_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    alike(
        tmp_path,
        merged={**ADAPTERS, "rollout.engine.sleep": "never"},
        beside={**ADAPTERS, "rollout.engine.merge_adapters": False, **changes},
    )
