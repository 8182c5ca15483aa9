"""Linear layers for a few rows on a CPU, such as the tokens of a proof of delivery.

BLAS puts a weight into another order before it multiplies, which for a few rows costs more than the product. oneDNN
reads it once, where it lies: a pass of four tokens over SmolLM2-135M takes three quarters of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
from torch import Tensor, nn

from strop.models.replaced import replaced

# Above these rows, and below these weights, where the call itself costs more, the ordinary product is as fast.
MOST = 16
SMALLEST = 1 << 17

_wanted: ContextVar[bool] = ContextVar("products of a few rows", default=False)


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """While this is entered, float32 products of a few rows with a weight on a CPU go to oneDNN, without gradients.

    Whatever else is computed, and weights that are divided among ranks, stay as they are. So do modules whose forward
    somebody else has replaced.
    """
    if not available() or torch.is_grad_enabled() or next(model.parameters()).device.type != "cpu":
        yield
        return
    layers = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
    token = _wanted.set(True)
    try:
        with replaced([(layer, partial(_forward, layer)) for layer in layers]):
            yield
    finally:
        _wanted.reset(token)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; by oneDNN within `few_rows`, where that is the faster way."""
    if _wanted.get() and _fits(x, weight, bias):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return nn.functional.linear(x, weight, bias)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        weight.numel() >= SMALLEST
        and 0 < x.numel() <= MOST * x.shape[-1]
        and all(type(one) in (Tensor, nn.Parameter) for one in (x, weight, bias) if one is not None)
        and x.dtype == weight.dtype == torch.float32
    )


@cache
def available() -> bool:
    """Whether this build of torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
