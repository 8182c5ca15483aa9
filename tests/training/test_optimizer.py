"""AdamW over float32 masters: small steps are not lost, sums are float32, and the state comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strop.config.training import OptimizerSettings
from strop.training.optimizer import MasterOptimizer


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (6, 4), "b": (4,)}
    return [(name, nn.Parameter(torch.randn(s, generator=draw).to(dtype))) for name, s in shapes.items()]


def backward(named: list[tuple[str, nn.Parameter]], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _, p in named:
        (p.float() * torch.randn(p.shape, generator=draw)).sum().backward()


def test_float32_is_plain_adamw() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None)
    optimizer = MasterOptimizer(ours, settings, total=10)
    groups = [{"params": [theirs[0][1]], "weight_decay": 0.1}, {"params": [theirs[1][1]], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2)
    for seed in range(5):
        backward(ours, seed)
        backward(theirs, seed)
        optimizer.step()
        plain.step()
        plain.zero_grad()
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7), name


def test_bfloat16_weights_move_at_small_learning_rates_where_plain_adamw_stands_still() -> None:
    ours, theirs = ([(n, nn.Parameter(p.detach() * 0.02)) for n, p in parameters(torch.bfloat16)] for _ in range(2))
    before = [p.detach().clone() for _, p in ours]
    settings = OptimizerSettings(learning_rate=1e-6, max_grad_norm=None)
    optimizer = MasterOptimizer(ours, settings, total=100)
    plain = torch.optim.AdamW([p for _, p in theirs], lr=1e-6, weight_decay=0.0)
    for _ in range(100):
        backward(ours, 3)
        backward(theirs, 3)
        optimizer.step()
        plain.step()
        plain.zero_grad()
    large = [p.abs() > 1e-3 for p in before]
    # A step of 1e-6 is below half a unit in the last place of a bfloat16 above 1e-3 (2**-18 at the least).
    for (_, p), old, big in zip(theirs, before, large, strict=True):
        assert torch.equal(p[big], old[big])
    for (name, p), old in zip(ours, before, strict=True):
        master = optimizer.masters[name]
        assert (master - old.float()).abs().min() > 0.9e-4
        assert torch.equal(p, master.bfloat16())
        assert (p != old).float().mean() > 0.5


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([("p", p)], OptimizerSettings(), total=1)
    p.sum().backward()
    for _ in range(512):
        (p * (1 / 512)).sum().backward()
    # In bfloat16, 1 + 1/512 is 1: the sum would have stayed where it was.
    assert optimizer.masters["p"].grad is not None
    assert optimizer.masters["p"].grad.tolist() == [2.0] * 3
    assert p.grad is None


@pytest.mark.parametrize("limit", [0.5, None])
def test_clipping_by_the_global_norm(limit: float | None) -> None:
    named = parameters(torch.float32)
    optimizer = MasterOptimizer(named, OptimizerSettings(max_grad_norm=limit, beta1=0.0), total=1)
    backward(named, 1)
    grads = torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])
    found = optimizer.step()
    assert float(found["grad_norm"]) == pytest.approx(float(grads.norm()), rel=1e-6)
    assert float(grads.norm()) > 0.5
    taken = torch.cat([optimizer.adamw.state[p]["exp_avg"].flatten() for _, p in named])
    assert float(taken.norm()) == pytest.approx(limit or float(grads.norm()), rel=1e-4)


def test_norms_and_biases_are_not_decayed() -> None:
    named = parameters(torch.float32)
    optimizer = MasterOptimizer(named, OptimizerSettings(learning_rate=0.1, weight_decay=0.5), total=1)
    before = {name: p.detach().clone() for name, p in named}
    for _, p in named:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(named[0][1], before["w"] * 0.95)
    assert torch.equal(named[1][1], before["b"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 3])
def test_state_comes_back_bit_for_bit(dtype: torch.dtype, done: int) -> None:
    settings = OptimizerSettings(learning_rate=1e-3, schedule="linear", warmup_steps=2)
    ours = parameters(dtype)
    optimizer = MasterOptimizer(ours, settings, total=8)
    for seed in range(done):
        backward(ours, seed)
        optimizer.step()
    state = {name: value.clone() for name, value in optimizer.state().items()}
    again = parameters(dtype)
    with torch.no_grad():
        for (_, new), (_, old) in zip(again, ours, strict=True):
            new.copy_(old)
    resumed = MasterOptimizer(again, settings, total=8)
    resumed.load(state, done)
    for seed in range(10, 13):
        rates = []
        for named, one in ((ours, optimizer), (again, resumed)):
            backward(named, seed)
            rates.append(one.step()["learning_rate"])
        assert rates[0] == rates[1]
    for name, value in optimizer.state().items():
        assert torch.equal(value, resumed.state()[name]), name


def test_what_is_frozen_is_left_alone() -> None:
    named = parameters(torch.float32)
    named[0][1].requires_grad_(False)
    assert list(MasterOptimizer(named, OptimizerSettings(), total=1).parameters) == ["b"]


def test_close_gives_the_gradients_back_to_the_parameters() -> None:
    named = parameters(torch.bfloat16)
    optimizer = MasterOptimizer(named, OptimizerSettings(), total=1)
    optimizer.close()
    backward(named, 0)
    assert all(p.grad is not None for _, p in named)
