"""Products of a few rows: other kernels, the same results, and only where they were asked for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from strop.models import few_rows

pytestmark = pytest.mark.skipif(not few_rows.available(), reason="this build of torch has no oneDNN")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 384), nn.GELU(), nn.Linear(384, 512, bias=False), nn.Linear(512, 8))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What goes to oneDNN."""
    seen = mock.Mock(side_effect=torch.ops.mkldnn._linear_pointwise)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", seen)
    return seen


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_results_are_those_of_the_ordinary_product(rows: int, products: mock.Mock) -> None:
    model, x = layers(), torch.randn(1, rows, 512)
    with torch.no_grad():
        expected = model(x)
        assert not products.called
        with few_rows.few_rows(model):
            found = model(x)
    # Two of the three layers are large enough.
    assert products.call_count == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all("forward" not in vars(layer) for layer in model)


@pytest.mark.parametrize(
    ("change", "rows"),
    [(lambda model: model, 17), (lambda model: model, 0), (lambda model: model.bfloat16(), 3)],
    ids=["many rows", "no rows", "bfloat16"],
)
def test_everything_else_stays_as_it_is(change: Any, rows: int, products: mock.Mock) -> None:
    model = change(layers())
    x = torch.randn(rows, 512, dtype=model[0].weight.dtype)
    with torch.no_grad(), few_rows.few_rows(model):
        assert model(x).shape == (rows, 8)
    assert not products.called


def test_a_pass_with_gradients_has_them() -> None:
    model, x = layers(), torch.randn(2, 512)
    with few_rows.few_rows(model):
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_forward_that_somebody_replaced_is_used() -> None:
    model, x = layers(), torch.randn(2, 512)
    vars(model[0])["forward"] = lambda x: torch.zeros(2, 384)
    with torch.no_grad(), few_rows.few_rows(model):
        found = model(x)
    assert torch.equal(found, model(x))
    assert "forward" in vars(model[0])


def test_after_a_failure_all_is_as_before() -> None:
    model = layers()
    with pytest.raises(ValueError, match="stop"), torch.no_grad(), few_rows.few_rows(model):
        raise ValueError("stop")
    assert all("forward" not in vars(layer) for layer in model)
    assert not few_rows._wanted.get()
