"""The optimizer's state goes to pinned memory of the CPU and back to the GPU: the same bits, and the GPU's memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from rank_cases import Case, objective_of, ragged_batch, tiny_model
from test_optimizer import NAMES

from strop.config.training import OptimizerSettings
from strop.training.optimizer import MasterOptimizer
from strop.training.single import SingleDeviceTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES = {"w": (600, 400), "b": (400,), "large": (2000, 1500), "embedding": (8, 4)}


def parameters(dtype: torch.dtype) -> list[tuple[str, torch.nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    return [(n, torch.nn.Parameter(torch.randn(s, generator=draw).to("cuda", dtype))) for n, s in SHAPES.items()]


def backward(named: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _, p in named:
        (p.float() * torch.randn(p.shape, generator=draw).cuda()).sum().backward()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_the_same_and_the_memory_is_free_in_between(name: str, dtype: torch.dtype) -> None:
    settings = OptimizerSettings(name=name, learning_rate=1e-2, weight_decay=0.1)
    here, away = parameters(dtype), parameters(dtype)
    plain, parked = (MasterOptimizer(named, settings, total=30, outer={"embedding"}) for named in (here, away))
    places, left = [], []
    for seed in range(20):
        parked.parked.reload()
        for named, optimizer in ((here, plain), (away, parked)):
            backward(named, seed)
            backward(named, seed + 100)
            optimizer.step()
        torch.cuda.synchronize()
        # What earlier tests and updates left in cycles is not what is measured.
        gc.collect()
        before = torch.cuda.memory_allocated()
        moved = parked.parked.offload()
        freed = before - torch.cuda.memory_allocated()
        assert 0.99 * moved <= freed <= 1.1 * moved + (1 << 20)
        state, expected = parked.state(), plain.state()
        assert all(torch.equal(state[key].cpu(), expected[key].cpu()) for key in expected)
        large = {key: value for key, value in state.items() if value.numel() >= 16}
        assert all(value.is_pinned() for value in large.values())
        places.append({key: value.data_ptr() for key, value in large.items()})
        left.append(torch.cuda.memory_allocated())
    if dtype == torch.bfloat16:
        # Of all but Adafactor moments too.
        assert moved >= sum(p.numel() for _, p in away) * (4 if name in ("adafactor", "muon", "adamw_8bit") else 12)
    assert all(one == places[0] for one in places)
    assert left[-1] <= left[1] * 1.01
    for (key, a), (_, b) in zip(here, away, strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_whose_state_was_away_has_the_same_weights(dtype: torch.dtype, tmp_path: Any) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, again, parked = (trained(dtype, away, tmp_path) for away in (False, False, True))
    finally:
        torch.use_deterministic_algorithms(False)
    if any(not torch.equal(plain[name], again[name]) for name in plain):
        pytest.skip("two plain runs differ on this GPU, so nothing can be said of bits")
    assert all(torch.equal(plain[name], parked[name]) for name in plain)


def trained(dtype: torch.dtype, away: bool, folder: Any) -> dict[str, torch.Tensor]:
    """Weights after five updates; where the state goes away, through a checkpoint that was saved while it was."""

    def made() -> SingleDeviceTrainer:
        model = tiny_model("llama").to("cuda", dtype)
        return SingleDeviceTrainer(model, OptimizerSettings(learning_rate=1e-2), total_updates=10, budget=64)

    trainer, objective = made(), objective_of(Case())
    for seed in range(5):
        trainer.update(ragged_batch(9, seed=seed), objective)
        if away:
            assert trainer.offload() > 0
        if away and seed == 2:
            state = trainer.save(folder)
            trainer = made()
            trainer.load(folder, state)
    return {name: p.detach().cpu().clone() for name, p in trainer.optimizer.parameters.items()}
