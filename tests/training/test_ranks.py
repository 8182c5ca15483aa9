"""Ranks that train together compute what one process does: gradients, norms, metrics, log-probabilities, updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Case, gradients, gradients_of_rank, run_ranks

TWO = [
    Case(shards=2),
    Case(shards=2, fsdp=True),
    Case(shards=2, fsdp=True, recompute=True, shape="qwen3"),
    Case(tensor=2),
    Case(tensor=2, sequence=True),
    Case(tensor=2, shape="qwen2"),
    Case(tensor=2, shape="mistral"),
    Case(tensor=2, shape="qwen3"),
    Case(tensor=2, shape="qwen3", sequence=True, recompute=True),
    Case(tensor=2, shape="qwen3_moe"),
    Case(tensor=2, shape="qwen3_moe", sequence=True),
    Case(context=2),
    Case(context=2, shape="qwen3"),
    Case(context=2, shape="mistral"),
    Case(context=2, shape="qwen3_moe", fsdp=True),
    Case(context=2, algorithm="gspo"),
    Case(shards=2, shape="qwen3_moe", fsdp=True),
    *(
        Case(**{key: 2}, lora=True, shape=shape)
        for key in ("shards", "tensor", "context")
        for shape in ("llama", "qwen3")
    ),
    Case(tensor=2, lora=True, sequence=True),
    Case(shards=2, lora=True, fsdp=True),
    # One stream: the second rank has none.
    Case(shards=2, streams=1),
    Case(shards=2, streams=1, fsdp=True),
    Case(shards=2, streams=1, fsdp=True, lora=True),
    Case(shards=2, value_head=True),
    Case(shards=2, value_head=True, fsdp=True),
    Case(tensor=2, value_head=True),
    Case(tensor=2, value_head=True, sequence=True),
    Case(context=2, value_head=True),
]
FOUR = [
    Case(shards=4),
    Case(shards=4, fsdp=True),
    Case(shards=4, fsdp=True, shape="qwen3", streams=2),
    Case(shards=2, replicas=2, fsdp=True),
    Case(shards=2, tensor=2, fsdp=True),
    Case(shards=2, tensor=2, fsdp=True, shape="qwen3", sequence=True, lora=True),
    Case(shards=2, tensor=2, fsdp=True, shape="qwen3_moe"),
    Case(shards=2, context=2, fsdp=True),
    Case(shards=2, context=2, fsdp=True, shape="qwen3", lora=True),
    Case(shards=2, context=2, fsdp=True, shape="qwen3_moe", streams=1),
    Case(context=2, tensor=2, sequence=True, shape="qwen3"),
    Case(context=4),
    Case(tensor=2, shards=2, streams=1),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks computed, by case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    results: dict[str, Any] = {}
    for world, cases in ((2, TWO), (4, FOUR)):
        results |= zip(
            (case.name for case in cases), run_ranks(world, gradients_of_rank, cases, folder / str(world)), strict=True
        )
    return results


@pytest.mark.parametrize("case", [*TWO, *FOUR], ids=lambda case: case.name)
def test_gradients_are_those_of_one_process(case: Case, found: dict[str, Any]) -> None:
    mine, theirs = gradients(case), found[case.name]
    assert mine["gradients"].keys() == theirs["gradients"].keys()
    for name, grad in mine["gradients"].items():
        gap = float((grad - theirs["gradients"][name]).norm()) / max(float(grad.norm()), 1e-8)
        assert gap < 1e-5, f"{name}: {gap:.2e}"
    assert all(float(grad.norm()) > 0 for grad in mine["gradients"].values())
    for key in ("logprobs", "seen", "score"):
        torch.testing.assert_close(theirs[key], mine[key], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert mine["stats"].keys() == theirs["stats"].keys()
    for name, value in mine["stats"].items():
        assert theirs["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, weight in mine["weights"].items():
        # AdamW's first update is the sign of the gradient, so tiny gradients may round to another one.
        far = (weight - theirs["weights"][name]).abs() > 1e-4
        assert float(far.float().mean()) < 0.01, name
