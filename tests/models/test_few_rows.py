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


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("adapters", [False, True])
def test_three_or_four_rows_are_multiplied_by_blas_where_inputs_are_short(
    rows: int, adapters: bool, products: mock.Mock
) -> None:
    torch.manual_seed(1)
    sizes = [(512, 384), (384, 1200), (1200, 512)]
    model: Any = nn.Sequential(*(nn.Linear(width, out, bias=False) for width, out in sizes))
    if adapters:
        model = adapted(model, target_modules=["0", "1", "2"])
    x = torch.randn(1, rows, 512)
    with torch.no_grad():
        expected = model(x)
        with few_rows.few_rows(model), mock.patch.object(torch, "mm", side_effect=torch.mm) as seen:
            found = model(x)
    # Each adapter is two further products, of which one is added in place.
    assert (seen.call_count, products.call_count) == (4 if adapters else 2, 1)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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


def adapted(base: nn.Module | None = None, **changes: Any) -> Any:
    """Layers, two of which have adapters of rank 4 if nothing else is said, whose B is no zero."""
    from peft import LoraConfig, get_peft_model

    from strop.models.adapters import compute_like_inputs

    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["0", "2"], "init_lora_weights": False, **changes}
    model = get_peft_model(layers() if base is None else base, LoraConfig(**settings)).eval()
    compute_like_inputs(model)
    return model


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_plain_adapters_are_added_in_the_same_call(rows: int, rank_stabilised: bool) -> None:
    model, x = adapted(use_rslora=rank_stabilised), torch.randn(2, rows, 512)
    own = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    with torch.no_grad():
        expected = model(x)
        with few_rows.few_rows(model), mock.patch.object(type(own[0]), "forward", side_effect=AssertionError):
            found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), model.disable_adapter():
        without = model(x)
        with few_rows.few_rows(model):
            torch.testing.assert_close(model(x), without, rtol=1e-5, atol=1e-6)
    assert (without - expected).abs().max() > 1e-2
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "changed",
    [
        lambda: adapted(use_dora=True),
        lambda: adapted(lora_bias=True),
        lambda: adapted(lora_dropout=0.5).train(),
        lambda: adapted().bfloat16(),
        adapted,
    ],
    ids=["dora", "bias", "dropout", "bfloat16", "none of it"],
)
def test_other_adapters_are_left_to_peft(changed: Any, request: pytest.FixtureRequest) -> None:
    model = changed()
    own = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    taken = [few_rows._added(layer) is not None for layer in own]
    assert taken == [request.node.callspec.id == "none of it"] * 2
    if request.node.callspec.id != "dropout":
        x = torch.randn(2, 512, dtype=own[0].weight.dtype)
        with torch.no_grad():
            expected = model(x)
            with few_rows.few_rows(model):
                torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize("before", [True, False])
def test_a_part_of_an_adapter_that_somebody_replaced_is_used(part: str, before: bool) -> None:
    model, x = adapted(), torch.randn(2, 512)
    layer = model.get_base_model()[0]
    inner = layer.base_layer if part == "base_layer" else getattr(layer, part)["default"]
    own = type(inner).forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * own(inner, x)

    with torch.no_grad():
        plain = model(x)
        vars(inner)["forward"] = doubled
        expected = model(x)
        del vars(inner)["forward"]
        assert (expected - plain).abs().max() > 1e-2
        if before:
            vars(inner)["forward"] = doubled
        with few_rows.few_rows(model):
            vars(inner)["forward"] = doubled
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_weight_that_is_computed_from_others_is_the_one_that_counts(part: str, norm: Any) -> None:
    model, x = adapted(), torch.randn(1, 3, 512)
    layer = model.get_base_model()[0]
    norm(layer.base_layer if part == "base_layer" else getattr(layer, part)["default"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("weight_g", "weight.original0")):
                parameter.mul_(2)
        expected = model(x)
        with few_rows.few_rows(model):
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_merged_adapters_are_not_added_twice() -> None:
    model, x = adapted(), torch.randn(2, 512)
    with torch.no_grad():
        expected = model(x)
        model.merge_adapter()
        with few_rows.few_rows(model):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
