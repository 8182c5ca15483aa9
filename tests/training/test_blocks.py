"""Compiled blocks: the gradients of plain ones, alone and among ranks, and refusals where they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import (
    Case,
    gradients,
    gradients_of_rank,
    make_trainer,
    objective_of,
    ragged_batch,
    run_ranks,
    tiny_model,
)
from torch._dynamo.utils import counters

from strop.errors import ModelError, UserError
from strop.models.blocks import ChangedBlocks, check_compiler

ALONE = [
    Case(compiled=True),
    Case(compiled=True, shape="qwen3", budget=20),
    Case(compiled=True, lora=True),
    Case(compiled=True, recompute=True),
    Case(compiled=True, recompute=True, lora=True),
]
RANKS = [
    Case(compiled=True, shards=2),
    Case(compiled=True, shards=2, fsdp=True, budget=20),
    Case(compiled=True, recompute=True, shards=2, fsdp=True, budget=20),
]


def compare(case: Case, theirs: dict[str, Any]) -> None:
    mine = gradients(Case(**{**vars(case), "compiled": False, "shards": 1, "fsdp": False}))
    assert mine["gradients"].keys() == theirs["gradients"].keys()
    for name, grad in mine["gradients"].items():
        gap = float((grad - theirs["gradients"][name]).norm()) / float(grad.norm())
        assert gap < 1e-5, f"{name}: {gap:.2e}"
    for key in ("logprobs", "seen", "score"):
        torch.testing.assert_close(theirs[key], mine[key], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_gradients_are_those_of_plain_blocks(case: Case) -> None:
    torch._dynamo.reset()
    # With a gradient: a first update makes no pass without one.
    counters.clear()
    make_trainer(case, None).update(ragged_batch(9), objective_of(case))
    assert counters["stats"]["unique_graphs"] > 2
    compare(case, gradients(case))
    # Graphs of operations that were compiled, with a gradient too; attention is where they are divided, nothing else.
    assert counters["aot_autograd"]["ok"] > 0
    reasons = list(counters["graph_break"])
    assert all("torch.compiler.disable" in reason for reason in reasons), reasons


def test_ranks_compute_compiled_blocks(tmp_path: Path) -> None:
    for case, found in zip(RANKS, run_ranks(2, gradients_of_rank, RANKS, tmp_path), strict=True):
        compare(case, found)


def test_more_tokens_are_not_compiled_anew() -> None:
    torch._dynamo.reset()
    case = Case(compiled=True, budget=40)
    trainer = make_trainer(case, None)
    for seed in (1, 2):
        trainer.update(ragged_batch(9, seed=seed), objective_of(case))
    counters.clear()
    for seed in (3, 4, 5):
        trainer.update(ragged_batch(9, seed=seed), objective_of(case))
    assert counters["stats"]["unique_graphs"] == 0


def test_blocks_are_plain_outside_of_the_trainers_passes() -> None:
    model = tiny_model("llama")
    names = list(model.state_dict())
    layer = model.model.layers[0]
    forward = layer.forward
    for compiled, recompute in ((True, False), (False, True), (True, "keep_attention")):
        blocks = ChangedBlocks(model, compiled=compiled, recompute=recompute)
        for _ in range(2):
            assert layer._compiled_call_impl is None
            assert layer.forward == forward
            with blocks.used():
                assert (layer._compiled_call_impl is not None) == (compiled and not recompute)
                assert (layer.forward != forward) == bool(recompute)
        assert list(model.state_dict()) == names == list(tiny_model("llama").state_dict())


@pytest.mark.parametrize(
    ("compiled", "recompute", "key"),
    [(True, False, "training.compile"), (False, True, "model.activation_checkpointing")],
)
def test_a_model_whose_blocks_nobody_names_is_refused(compiled: bool, recompute: bool, key: str) -> None:
    with pytest.raises(ModelError, match="does not name the class of its blocks") as caught:
        ChangedBlocks(torch.nn.Linear(2, 2), compiled=compiled, recompute=recompute)
    assert caught.value.where == key


def test_where_there_is_no_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(torch.device("cpu"))
    from torch._inductor import config, cpp_builder

    monkeypatch.setenv("CXX", "no-such-compiler")
    cpp_builder.cpp_compiler_search.cache_clear()
    # By torch's own means: what sets an attribute back would delete this one, for every test that comes later.
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(UserError, match=r"needs a C\+\+ compiler") as caught,
    ):
        check_compiler(torch.device("cpu"))
    assert "g++" in caught.value.mend


def test_where_there_are_no_headers_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="needs the headers of Python") as caught:
        check_compiler(torch.device("cpu"))
    assert "python3-dev" in caught.value.mend
