"""Where the values of Hugging Face's weights are in a model of vLLM; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from strop.rollout.engines.vllm_weights import Sent, as_they_are, load, places, stale

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


class Layer(nn.Module):
    """As vLLM has them: fused, and with a vocabulary of 10 padded to 16; rank `rank` of `size`."""

    packed_modules_mapping: ClassVar = PACKED

    def __init__(self, size: int = 1, *, kv: int = 4) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, (8 + 2 * kv) // size)
        self.o_proj = nn.Linear(8 // size, 4, bias=False)
        self.embed = nn.Embedding(16 // size, 4)
        self.norm = nn.LayerNorm(4)
        self.packed = nn.Parameter(torch.zeros(0))


class Model(nn.Module):
    packed_modules_mapping: ClassVar = PACKED

    def __init__(self, size: int = 1, **shape: Any) -> None:
        super().__init__()
        self.attn = Layer(size, **shape)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(-1.0)


def weights_of(kv: int = 4) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"o_proj.weight": (4, 8), "embed.weight": (10, 4)}
    for name, rows in (("q", 8), ("k", kv), ("v", kv)):
        shapes |= {f"{name}_proj.weight": (rows, 4), f"{name}_proj.bias": (rows,)}
    shapes |= {"norm.weight": (4,), "norm.bias": (4,), "packed": (3, 4)}
    return {f"attn.{name}": torch.randn(shape) for name, shape in shapes.items()}


def put(model: nn.Module, weights: dict[str, Tensor], rank: int, size: int) -> set[str]:
    found = places(model, Sent.of(weights).shapes, rank=rank, size=size)
    with torch.no_grad():
        for name, (live, part) in found.items():
            live.copy_(weights[name][part])
    return set(found)


def test_parts_of_fused_weights_are_found() -> None:
    model, weights = Model(), weights_of()
    assert put(model, weights, 0, 1) == set(weights) - {"attn.packed"}
    attn = model.attn
    fused = [weights[f"attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(attn.qkv_proj.weight, torch.cat(fused))
    assert torch.equal(attn.embed.weight[:10], weights["attn.embed.weight"])
    assert (attn.embed.weight[10:] == -1).all()


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_share(size: int) -> None:
    weights, rows = weights_of(), []
    for rank in range(size):
        model = Model(size)
        assert put(model, weights, rank, size) == set(weights) - {"attn.packed"}
        each = [weights[f"attn.{name}_proj.weight"].chunk(size)[rank] for name in "qkv"]
        assert torch.equal(model.attn.qkv_proj.weight, torch.cat(each))
        bias = [weights[f"attn.{name}_proj.bias"].chunk(size)[rank] for name in "qkv"]
        assert torch.equal(model.attn.qkv_proj.bias, torch.cat(bias))
        assert torch.equal(model.attn.o_proj.weight, weights["attn.o_proj.weight"].chunk(size, 1)[rank])
        assert torch.equal(model.attn.norm.weight, weights["attn.norm.weight"])
        rows.append(model.attn.embed.weight)
    assert torch.equal(torch.cat(rows)[:10], weights["attn.embed.weight"])
    assert (torch.cat(rows)[10:] == -1).all()


def test_keys_that_ranks_have_twice_are_not_looked_for() -> None:
    weights = weights_of(kv=2)
    model = Model(4, kv=4)  # 8/4 rows of queries, and one head of 2 rows each of keys and values
    assert len(model.attn.qkv_proj.weight) == 4
    found = places(model, Sent.of(weights).shapes, rank=3, size=4)
    assert not {name for name in found if "_proj" in name and "o_proj" not in name}


def test_what_differs_is_named() -> None:
    model, weights = Model(), weights_of()
    put(model, weights, 0, 1)
    assert stale(model, weights) == []
    changed = {**weights, "attn.k_proj.bias": weights["attn.k_proj.bias"] + 1}
    assert stale(model, changed) == ["attn.k_proj.bias"]
    assert stale(model, {"attn.packed": torch.ones(3, 4)}) == []


def test_a_tied_weight_counts_as_found() -> None:
    weights = weights_of()
    del weights["attn.packed"]
    sent = Sent.of({**weights, "head.weight": weights["attn.embed.weight"]})
    assert sent.same_as == {"head.weight": "attn.embed.weight"}
    found = places(Model(), sent.shapes)
    assert as_they_are(found, sent)
    assert not as_they_are(found, Sent.of({**weights, "head.weight": torch.zeros(10, 4)}))


@pytest.mark.parametrize(("quantised", "packed", "way"), [(None, 0, "in place"), (None, 1, "anew"), ("fp8", 0, "anew")])
def test_which_way_weights_take(quantised: str | None, packed: int, way: str) -> None:
    taken = []
    weights = weights_of()
    if not packed:
        del weights["attn.packed"]
    model = Model()
    model.load_weights = lambda given: taken.append(("in place", dict(given)))  # type: ignore[assignment]
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(quantization=quantised)),
        reload_weights=lambda weights_iterator: taken.append(("anew", dict(weights_iterator))),
    )
    load(worker, weights.items(), Sent.of(weights))
    [(found, given)] = taken
    assert found == way
    assert given.keys() == weights.keys()
