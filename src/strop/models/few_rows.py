"""Linear layers for a few rows on a CPU, such as the tokens of a proof of delivery.

BLAS puts a weight into another order before it multiplies, which for a few rows costs more than the product. oneDNN
reads it once, where it lies: a pass of four tokens over SmolLM2-135M takes three quarters of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.replaced import replaced

# Above these rows, and below these weights, where the call itself costs more, the ordinary product is as fast.
MOST = 16
SMALLEST = 1 << 17

Added = list[tuple[nn.Linear, nn.Linear, float]]

_wanted: ContextVar[bool] = ContextVar("products of a few rows", default=False)


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """While this is entered, float32 products of a few rows with a weight on a CPU go to oneDNN, without gradients.

    Plain adapters (LoRA) are added in the same call, where their layers in peft would start a dozen modules and
    operations for each. Whatever else is computed, and weights that are divided among ranks, stay as they are. So do
    modules whose forward somebody else has replaced.
    """
    if not available() or torch.is_grad_enabled() or next(model.parameters()).device.type != "cpu":
        yield
        return
    forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
    left = [model]
    while left:
        module = left.pop()
        if "forward" in vars(module):
            left += _children(module)
        elif type(module) is nn.Linear:
            forwards.append((module, partial(_forward, module)))
        elif (added := _added(module)) is not None:
            forwards.append((module, partial(_adapted, module, added)))
        else:
            left += _children(module)
    token = _wanted.set(True)
    try:
        with replaced(forwards):
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


def _adapted(lora: Any, added: Added, x: Tensor, *given: Any, **named: Any) -> Tensor:
    """LoRA (arXiv 2106.09685): x W^T + s (x A^T) B^T, dropout off."""
    base = lora.base_layer
    if any("forward" in vars(one) for one in (base, *(factor for a, b, _ in added for factor in (a, b)))):
        # Somebody has replaced a part of it since, and wants to be asked.
        return type(lora).forward(lora, x, *given, **named)  # type: ignore[no-any-return]
    result = linear(x, base.weight, base.bias)
    rows, flat = result.view(-1, result.shape[-1]), x.reshape(-1, x.shape[-1])
    for a, b, scale in added:
        rows.addmm_(flat @ a.weight.T, b.weight.T, alpha=scale)
    return result


def _added(module: nn.Module) -> Added | None:
    """(A [rank, in], B [out, rank], scale) of each adapter that a layer adds; None where it is no layer of peft's whose
    adapters are two plain float32 matrices that nobody computes in another way."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    if layers is None or type(module) is not layers.Linear:
        return None
    lora: Any = module
    if lora.disable_adapters or lora.merged or lora.fan_in_fan_out or lora.lora_variant:
        return None
    base = lora.base_layer
    if type(base) is not nn.Linear or "forward" in vars(base) or base.weight.dtype != torch.float32:
        return None
    added = []
    for name in lora.active_adapters:
        if name not in lora.lora_A:
            continue
        if module.training and not isinstance(lora.lora_dropout[name], nn.Identity):
            return None
        for factor in (lora.lora_A[name], lora.lora_B[name]):
            weight = factor.weight
            plain = isinstance(factor, nn.Linear) and type(weight) is nn.Parameter and weight.dtype == torch.float32
            if not plain or factor.bias is not None or "forward" in vars(factor):
                return None
        added.append((lora.lora_A[name], lora.lora_B[name], float(lora.scaling[name])))
    return added


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


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
