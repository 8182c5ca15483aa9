"""Ranks that train together compute what one process does: gradients, norms, metrics, log-probabilities, updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Case, collectives_of_rank, gradients, gradients_of_rank, make_trainer, rank_mesh, run_ranks

TWO = [
    Case(shards=2),
    Case(shards=2, fsdp=True),
    Case(shards=2, fsdp=True, every_pass=True),
    # Many passes of each rank, and not equally many.
    Case(shards=2, fsdp=True, budget=20),
    Case(shards=2, fsdp=True, budget=20, streams=4, shape="qwen3", recompute=True),
    Case(shards=2, fsdp=True, budget=20, lora=True),
    Case(shards=2, fsdp=True, budget=20, value_head=True),
    Case(shards=2, fsdp=True, budget=20, shape="qwen3_moe"),
    Case(shards=2, fsdp=True, budget=20, offload=True),
    Case(shards=2, fsdp=True, budget=20, offload=True, every_pass=True),
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
    Case(shards=2, replicas=2, fsdp=True, budget=20),
    Case(shards=2, replicas=2, fsdp=True, budget=20, every_pass=True),
    Case(shards=2, tensor=2, fsdp=True),
    Case(shards=2, tensor=2, fsdp=True, budget=20, shape="qwen3", sequence=True),
    Case(shards=2, context=2, fsdp=True, budget=20),
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
    alone, divided = (float(side["rounding"][1:].max()) for side in (mine, theirs))
    assert alone / 8 < divided < alone * 8
    assert mine["stats"].keys() == theirs["stats"].keys()
    for name, value in mine["stats"].items():
        if not name.startswith("throughput/"):
            assert theirs["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, weight in mine["weights"].items():
        # AdamW's first update is the sign of the gradient, so tiny gradients may round to another one.
        far = (weight - theirs["weights"][name]).abs() > 1e-4
        assert float(far.float().mean()) < 0.01, name


COUNTED = [
    Case(shards=2, fsdp=True, budget=20),
    Case(shards=2, fsdp=True, budget=20, every_pass=True),
    Case(shards=2, fsdp=True, budget=20, lora=True),
    Case(shards=2, fsdp=True, budget=20, bfloat16=True),
]
BFLOAT16 = [Case(shards=2, fsdp=True, budget=20, bfloat16=True, every_pass=every) for every in (False, True)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run_ranks(2, collectives_of_rank, COUNTED, tmp_path_factory.mktemp("counted"))
    return dict(zip((case.name for case in COUNTED), found, strict=True))


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_divided_gradients_are_summed_once_an_update_or_after_every_pass(case: Case, counted: dict[str, Any]) -> None:
    found = counted[case.name]
    assert found["passes"] > 2
    # Two blocks and what is around them, which with adapters has nothing that is trained.
    assert found["groups"] == 3
    trained = 2 if case.lora else 3
    expected = trained * (found["passes"] if case.every_pass else 1)
    assert found["collectives"]["_reduce_scatter_base_"] == expected
    # Weights are gathered for every pass all the same.
    assert found["collectives"]["_allgather_base_"] >= trained * found["passes"]


def test_passes_in_bfloat16_are_added_in_float32(tmp_path: Path) -> None:
    once, each = run_ranks(2, gradients_of_rank, BFLOAT16, tmp_path)
    for name, grad in each["gradients"].items():
        assert grad.dtype == torch.float32
        # Added in bfloat16 they would be some 3e-3 apart.
        gap = float((grad - once["gradients"][name]).norm()) / float(grad.norm())
        assert gap < 1e-6, f"{name}: {gap:.2e}"


def rounding_of_rank(case: Case) -> torch.Tensor:
    trainer = make_trainer(case, rank_mesh(case) if case.fsdp else None)
    return torch.from_numpy(trainer.rounding([[1, 2, 3, 4, 5, 6, 7]])[0])


def test_rounding_of_divided_weights_is_that_of_whole_ones(tmp_path: Path) -> None:
    """All layers are disturbed on ranks too, where FSDP gives blocks classes of its own."""
    case = Case(shards=2, fsdp=True, bfloat16=True)
    [divided] = run_ranks(2, rounding_of_rank, [case], tmp_path)
    torch.testing.assert_close(divided, rounding_of_rank(Case(bfloat16=True)), rtol=1e-3, atol=0, equal_nan=True)
