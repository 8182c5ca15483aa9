"""`rollout.engine.sleep: auto` looks at what the card has, and at what trainer and engine may need together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strop.config.loading import load_config
from strop.planning.hardware import Hardware
from strop.planning.turns import engine_sleeps, trainer_bytes

GIB = 1 << 30
RECIPE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": {"path": "d.jsonl"}},
    "rewards": {"verifiers": [{"kind": "exact"}]},
}


def config_of(**changes: Any) -> Any:
    data = {**RECIPE, "rollout": {"engine": {"sleep": changes.pop("sleep", "auto")}}}
    return load_config(None, data={**data, "training": changes})


def model_of(billions: float, *, frozen: float = 0.0) -> nn.Module:
    """A model of so many weights that takes no memory."""
    made = nn.Module()
    for name, size, trained in (("trained", billions, True), ("frozen", frozen, False)):
        weight = torch.empty(int(size * 1e9), device="meta", dtype=torch.bfloat16)
        made.register_parameter(name, nn.Parameter(weight, requires_grad=trained))
    return made


def card(gib: float, device: str = "cuda") -> Hardware:
    return Hardware(torch.device(device), torch.bfloat16, 1, int(gib * GIB), ())


def test_bytes_of_a_trainer() -> None:
    def of(model: nn.Module, *, item: int = 2, reference: bool = False, **changes: Any) -> float:
        return trainer_bytes(config_of(**changes), model, item=item, reference=reference) / 1e9

    assert of(model_of(1)) == pytest.approx(18)
    assert of(model_of(1), item=4) == pytest.approx(16)
    assert of(model_of(1), reference=True) == pytest.approx(20)
    assert of(model_of(0.1, frozen=1), reference=True) == pytest.approx(0.1 * 18 + 2)
    assert of(model_of(1), optimizer={"name": "adamw_8bit"}) == pytest.approx(12)
    assert of(model_of(1), optimizer={"offload": True}) == pytest.approx(2)


def test_the_engine_sleeps_where_both_do_not_fit() -> None:
    def sleeps(model: nn.Module, hardware: Hardware, *, share: float = 0.3, **changes: Any) -> bool:
        found, why = engine_sleeps(config_of(**changes), hardware, model, share=share, reference=False)
        assert bool(why) == (found and changes.get("sleep", "auto") == "auto")
        return found

    # 18 bytes for each weight, and 55 % of the card for activations and the engine.
    assert not sleeps(model_of(1), card(80))
    assert sleeps(model_of(3), card(80))
    assert not sleeps(model_of(3), card(180))
    assert not sleeps(model_of(0.1, frozen=3), card(80))
    assert not sleeps(model_of(3), card(80), share=0.0)
    assert not sleeps(model_of(3), card(80, "cpu"))
    assert not sleeps(model_of(3), card(80), sleep="never")
    assert sleeps(model_of(0.1), card(80, "cpu"), sleep="always")
