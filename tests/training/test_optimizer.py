"""Optimizers over float32 masters: small steps are not lost, sums are float32, and the state comes back."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from strop.config.model import LoraConfig, NewModel
from strop.config.training import OptimizerSettings
from strop.errors import MissingExtra
from strop.models.create import create_model
from strop.models.load import add_lora
from strop.models.scalar import with_scalar_head
from strop.training.optimizer import MasterOptimizer
from strop.training.update_rules import outer_weights

NAMES = [
    "adamw",
    "adafactor",
    "muon",
    pytest.param(
        "adamw_8bit",
        marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs strop[bnb]"),
    ),
]


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    # "large" is big enough for bitsandbytes to keep its moments in 8 bits.
    shapes = {"w": (6, 4), "b": (4,), "large": (70, 60), "embedding": (8, 4)}
    return [(name, nn.Parameter(torch.randn(s, generator=draw).to(dtype))) for name, s in shapes.items()]


def backward(named: list[tuple[str, nn.Parameter]], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _, p in named:
        (p.float() * torch.randn(p.shape, generator=draw)).sum().backward()


def decayed(named: list[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, object]]:
    return [
        {"params": [p for _, p in named if p.ndim == 2], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]


def test_float32_is_plain_adamw() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None)
    optimizer = MasterOptimizer(ours, settings, total=10)
    plain = torch.optim.AdamW(decayed(theirs, 0.1), lr=1e-2)
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
    taken = torch.cat([optimizer.rules[0].state[p]["exp_avg"].flatten() for _, p in named])
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 3])
def test_state_comes_back_bit_for_bit(name: str, offload: bool, dtype: torch.dtype, done: int) -> None:
    settings = OptimizerSettings(
        name=name, learning_rate=1e-2, weight_decay=0.1, schedule="linear", warmup_steps=2, offload=offload
    )
    ours = parameters(dtype)
    optimizer = MasterOptimizer(ours, settings, total=8, outer={"embedding"})
    for seed in range(done):
        backward(ours, seed)
        optimizer.step()
    state = {key: value.clone() for key, value in optimizer.state().items()}
    again = parameters(dtype)
    with torch.no_grad():
        for (_, new), (_, old) in zip(again, ours, strict=True):
            new.copy_(old)
    resumed = MasterOptimizer(again, settings, total=8, outer={"embedding"})
    resumed.load(state, done)
    before = [p.detach().clone() for _, p in ours]
    for seed in range(10, 13):
        rates = []
        for named, one in ((ours, optimizer), (again, resumed)):
            backward(named, seed)
            rates.append(one.step()["learning_rate"])
        assert rates[0] == rates[1]
    for (key, a), (_, b), old in zip(ours, again, before, strict=True):
        assert torch.equal(a, b), key
        assert not torch.equal(a, old), key
    assert optimizer.state().keys() == resumed.state().keys()
    for key, value in optimizer.state().items():
        assert torch.equal(value, resumed.state()[key]), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_updates_are_the_same_and_leave_the_parameters_only_rounded_copies(
    name: str, dtype: torch.dtype
) -> None:
    here, away = parameters(dtype), parameters(dtype)
    for named, offload in ((here, False), (away, True)):
        settings = OptimizerSettings(name=name, learning_rate=1e-2, offload=offload)
        optimizer = MasterOptimizer(named, settings, total=3)
        for seed in range(3):
            backward(named, seed)
            backward(named, seed + 10)
            if offload:
                assert all(p.grad is None for _, p in named)
            optimizer.step()
    for (key, a), (_, b) in zip(here, away, strict=True):
        assert torch.equal(a, b), key
    assert all(master.device.type == "cpu" and master is not dict(away)[n] for n, master in optimizer.masters.items())


def test_adafactor_is_torchs_and_keeps_no_state_of_the_size_of_a_matrix() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    settings = OptimizerSettings(name="adafactor", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None)
    optimizer = MasterOptimizer(ours, settings, total=5)
    plain = torch.optim.Adafactor(decayed(theirs, 0.1), lr=1e-2)
    for seed in range(5):
        backward(ours, seed)
        backward(theirs, seed)
        optimizer.step()
        plain.step()
        plain.zero_grad()
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), name
    assert max(value.numel() for key, value in optimizer.state().items() if key.endswith("/large")) == 70


def test_muon_takes_the_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    ours, alone, muon = parameters(torch.float32), parameters(torch.float32), parameters(torch.float32)
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": None, "schedule": "cosine"}
    optimizer = MasterOptimizer(ours, OptimizerSettings(name="muon", **settings), total=4, outer={"embedding"})
    adamw = MasterOptimizer(alone, OptimizerSettings(**settings), total=4)
    plain = torch.optim.Muon(
        [p for n, p in muon if n in ("w", "large")], lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(4):
        for named in (ours, alone, muon):
            backward(named, seed)
        rate = optimizer.step()["learning_rate"]
        assert adamw.step()["learning_rate"] == rate
        plain.param_groups[0]["lr"] = rate
        plain.step()
        plain.zero_grad()
    for name, expected in (("b", alone), ("embedding", alone), ("w", muon), ("large", muon)):
        assert torch.equal(dict(ours)[name], dict(expected)[name]), name
    assert not torch.equal(dict(alone)["w"], dict(muon)["w"])


@pytest.mark.parametrize("tied", [True, False])
def test_outer_weights_are_embeddings_and_output_head_but_no_adapters(tied: bool) -> None:
    model, _ = create_model(NewModel(hidden_size=16, layers=1, heads=2, context=32), seed=0)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    names = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert outer_weights(model) == names
    adapted = add_lora(model, LoraConfig(targets="all-linear" if tied else ["q_proj", "lm_head"]), seed=0)
    assert {name for name in outer_weights(adapted) if "lora" in name} == set()


def test_a_scalar_head_is_an_outer_weight_under_adapters_too() -> None:
    model = with_scalar_head(create_model(NewModel(hidden_size=16, layers=1, heads=2, context=32), seed=0)[0])
    assert outer_weights(model) == {"model.embed_tokens.weight", "score.weight"}
    adapted = add_lora(model, LoraConfig(rank=2), seed=0)
    trained = [(name, p) for name, p in adapted.named_parameters() if p.requires_grad]
    optimizer = MasterOptimizer(trained, OptimizerSettings(name="muon"), total=1, outer=outer_weights(adapted))
    muon, adamw = optimizer.rules
    assert [p.shape for group in adamw.param_groups for p in group["params"]] == [(1, 16)]
    assert sum(len(group["params"]) for group in muon.param_groups) == len(trained) - 1


def test_eight_bit_adamw_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(MissingExtra, match=r"strop\[bnb\]"):
        MasterOptimizer(parameters(torch.float32), OptimizerSettings(name="adamw_8bit"), total=1)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs strop[bnb]")
def test_eight_bit_adamw_keeps_bytes_and_stays_near_adamw() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    start = dict(parameters(torch.float32))["large"]
    optimizer = MasterOptimizer(ours, OptimizerSettings(name="adamw_8bit", learning_rate=1e-2), total=5)
    plain = MasterOptimizer(theirs, OptimizerSettings(learning_rate=1e-2), total=5)
    for seed in range(5):
        for named, one in ((ours, optimizer), (theirs, plain)):
            backward(named, seed)
            one.step()
    assert optimizer.state()["state1/large"].dtype == torch.uint8
    assert not any(key.startswith("qmap") for key in optimizer.state())
    difference = (dict(ours)["large"] - dict(theirs)["large"]).norm()
    assert difference < 0.1 * (dict(theirs)["large"] - start).norm()


def test_what_is_frozen_is_left_alone() -> None:
    named = parameters(torch.float32)
    named[0][1].requires_grad_(False)
    assert list(MasterOptimizer(named, OptimizerSettings(), total=1).parameters) == ["b", "large", "embedding"]


def test_close_gives_the_gradients_back_to_the_parameters() -> None:
    named = parameters(torch.bfloat16)
    optimizer = MasterOptimizer(named, OptimizerSettings(), total=1)
    optimizer.close()
    backward(named, 0)
    assert all(p.grad is not None for _, p in named)
