"""Preference losses: exact gradients, limits, and the numbers of their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from strop.algorithms.preference import bradley_terry, cdpo, dpo, ipo, kto, orpo, simpo

DRAW = torch.Generator().manual_seed(0)
PAIRS = 7
CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = (
    -torch.rand(PAIRS, generator=DRAW, dtype=torch.float64) * 20 - 1 for _ in range(4)
)
LENGTHS = torch.arange(3, 3 + PAIRS)
DESIRABLE = torch.arange(PAIRS) % 2 == 0

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "dpo": lambda c, r: dpo(c, r, REF_CHOSEN, REF_REJECTED)[0],
    "cdpo": lambda c, r: cdpo(c, r, REF_CHOSEN, REF_REJECTED)[0],
    "ipo": lambda c, r: ipo(c, r, REF_CHOSEN, REF_REJECTED)[0],
    "simpo": lambda c, r: simpo(c, r, LENGTHS, LENGTHS + 2)[0],
    "orpo": lambda c, r: orpo(c, r, LENGTHS, LENGTHS + 2)[0],
    "bradley_terry": lambda c, r: bradley_terry(c, r, margin=0.5)[0],
    "kto": lambda c, r: kto(c, REF_CHOSEN, DESIRABLE, 0.3)[0] + kto(r, REF_REJECTED, ~DESIRABLE, 0.3)[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name: str) -> None:
    pair = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[name], pair)
    assert LOSSES[name](*pair).shape == (PAIRS,)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"kto", "ipo"}))
def test_better_chosen_is_less_loss(name: str) -> None:
    worse, better = (LOSSES[name](CHOSEN + shift, REJECTED) for shift in (0.0, 0.5))
    assert bool((better < worse).all())


def test_values() -> None:
    margin = (CHOSEN - REJECTED) - (REF_CHOSEN - REF_REJECTED)
    sigmoid = torch.sigmoid(0.1 * margin)
    torch.testing.assert_close(LOSSES["dpo"](CHOSEN, REJECTED), -sigmoid.log())
    torch.testing.assert_close(LOSSES["cdpo"](CHOSEN, REJECTED), -0.9 * sigmoid.log() - 0.1 * (1 - sigmoid).log())
    torch.testing.assert_close(LOSSES["ipo"](CHOSEN, REJECTED), (margin - 5).square())
    means = CHOSEN / LENGTHS, REJECTED / (LENGTHS + 2)
    torch.testing.assert_close(LOSSES["simpo"](CHOSEN, REJECTED), -torch.sigmoid(2 * (means[0] - means[1]) - 1).log())
    odds = [x.exp() / (1 - x.exp()) for x in means]
    expected = -means[0] - 0.1 * torch.sigmoid((odds[0] / odds[1]).log()).log()
    torch.testing.assert_close(LOSSES["orpo"](CHOSEN, REJECTED), expected)
    loss, _ = kto(torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0]), torch.tensor([True, False]), -4.0, beta=0.5)
    p = 1 / (1 + math.exp(-1.0))
    torch.testing.assert_close(loss, torch.tensor([1 - p, p]))
    loss, _ = kto(torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0]), torch.tensor([True, False]), 1.5, beta=0.5)
    p = 1 / (1 + math.exp(-0.25))
    torch.testing.assert_close(loss, torch.tensor([1 - p, p]))


def test_metrics_and_extremes() -> None:
    _, metrics = dpo(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
    margin = (CHOSEN - REJECTED) - (REF_CHOSEN - REF_REJECTED)
    torch.testing.assert_close(metrics["preference/margin"], 0.1 * margin)
    assert torch.equal(metrics["preference/accuracy"], (margin > 0).double())
    certain = torch.zeros(1, requires_grad=True)
    far = torch.tensor([-1e5])
    for loss, _ in (orpo(certain, far, torch.ones(1), torch.ones(1)), dpo(certain, far, far, certain, beta=1.0)):
        assert bool(loss.isfinite().all())
        assert bool(torch.autograd.grad(loss.sum(), certain)[0].isfinite().all())


def test_refusals() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="beta"):
        dpo(one, one, one, one, beta=0.0)
    with pytest.raises(ValueError, match="label_smoothing"):
        cdpo(one, one, one, one, label_smoothing=0.5)
