"""What rounding may do to scores: layers whose outputs are moved by at most one unit roundoff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from strop.config.training import OptimizerSettings
from strop.models.disturbed import disturbed
from strop.training.single import SingleDeviceTrainer

Make = Callable[..., Any]
TOKENS = [[3, 4, 5, 6], [7, 8, 9]]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(TOKENS[:1])).logits.float()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_move_by_rounding_and_everything_else_stays(tiny_model: Make, family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype).eval()
    before, weights = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with disturbed(model, 1):
        once = logits(model)
    with disturbed(model, 1):
        again = logits(model)
    with disturbed(model, 2):
        other = logits(model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    assert not torch.equal(once, other)
    unit, size = torch.finfo(dtype).eps / 2, float(before.abs().max())
    assert 0.05 * unit * size < float((once - before).abs().max()) < 100 * unit * size
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_each_layer_is_moved_by_at_most_one_roundoff(tiny_model: Make) -> None:
    model = tiny_model()
    layer = model.model.layers[0].mlp.up_proj
    given = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
    plain = layer(given)
    with disturbed(model, 0):
        moved = layer(given)
    far = ((moved - plain) / plain).detach()
    # What is moved is rounded once more.
    assert 2**-25 < float(far.abs().max()) <= 2**-24 + 2**-24
    # As often upwards as downwards.
    assert float((far > 0).float().mean()) > 0.1
    assert float((far < 0).float().mean()) > 0.1


def test_a_failed_pass_leaves_nothing_behind(tiny_model: Make) -> None:
    model = tiny_model()
    before = logits(model)
    with pytest.raises(ZeroDivisionError), disturbed(model, 0):
        raise ZeroDivisionError
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trainer_says_what_rounding_does_to_each_score(tiny_model: Make, compiled: bool) -> None:
    def of(dtype: torch.dtype, compiled: bool = False) -> tuple[list[np.ndarray], list[np.ndarray]]:
        model = tiny_model().to(dtype)
        trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1, compiled=compiled)
        return trainer.score(TOKENS), trainer.rounding(TOKENS)

    exact, small = of(torch.float32)
    rounded, large = of(torch.bfloat16, compiled)
    for fine, coarse, a, b in zip(small, large, exact, rounded, strict=True):
        assert fine.shape == coarse.shape == a.shape
        assert np.isnan([fine[0], coarse[0]]).all()
        assert ((fine[1:] > 0) & (fine[1:] < 1e-5)).all()
        assert (np.abs(a - b)[1:] < 4 * coarse[1:]).all()
        assert coarse[1:].max() > 1000 * fine[1:].max()
