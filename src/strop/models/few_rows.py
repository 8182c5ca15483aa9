"""Linear layers for a few rows on a CPU, such as the tokens of a proof of delivery.

BLAS puts a weight into another order before it multiplies, which for a few rows costs more than the product. oneDNN
reads it once, where it lies: a pass of four tokens over SmolLM2-135M takes three quarters of the time. BLAS does so too
for three or four rows, and faster, where it is asked for the transposed product, W x^T.
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
# What is computed as W x^T, three rows as if they were four. With others, and over longer inputs, oneDNN is faster.
TRANSPOSED_ROWS = (3, 4)
TRANSPOSED_LONGEST = 1024
TRANSPOSED_SMALLEST = 1 << 14

Added = list[tuple[nn.Linear, nn.Linear, float]]

_wanted: ContextVar[bool] = ContextVar("products of a few rows", default=False)


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """While this is entered, float32 products of a few rows with a weight on a CPU are computed so, without gradients.

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
    """x @ weight.T + bias; within `few_rows` in the way that is the fastest."""
    if _wanted.get():
        if _turns(x, weight, bias):
            return _turned(torch.mm(weight, _columns(x)), x)
        if _fits(x, weight, bias):
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return nn.functional.linear(x, weight, bias)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _adapted(lora: Any, added: Added, x: Tensor, *given: Any, **named: Any) -> Tensor:
    """LoRA (arXiv 2106.09685): x W^T + s (x A^T) B^T, dropout off."""
    base = _child(lora, "base_layer")
    replaced_since = "forward" in vars(base)
    for a, b, _ in added:
        replaced_since = replaced_since or "forward" in vars(a) or "forward" in vars(b)
    if replaced_since:
        # Somebody wants to be asked.
        return type(lora).forward(lora, x, *given, **named)
    weight, bias = _parameter(base, "weight"), _parameter(base, "bias")
    if _turns(x, weight, bias):
        columns = _columns(x)
        product = torch.mm(weight, columns)
        for a, b, scale in added:
            product.addmm_(_parameter(b, "weight"), torch.mm(_parameter(a, "weight"), columns), alpha=scale)
        return _turned(product, x)
    result = linear(x, weight, bias)
    rows, flat = result.view(-1, result.shape[-1]), x.reshape(-1, x.shape[-1])
    for a, b, scale in added:
        rows.addmm_(flat @ _parameter(a, "weight").T, _parameter(b, "weight").T, alpha=scale)
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
    base = _child(lora, "base_layer")
    if type(base) is not nn.Linear or "forward" in vars(base):
        return None
    if (weight := _parameter(base, "weight")) is None or weight.dtype != torch.float32:
        return None
    added = []
    every_a, every_b = _child(lora, "lora_A")._modules, _child(lora, "lora_B")._modules
    for name in lora.active_adapters:
        if name not in every_a:
            continue
        if lora.training and not isinstance(lora.lora_dropout[name], nn.Identity):
            return None
        a, b = every_a[name], every_b[name]
        if not _plain_factor(a) or not _plain_factor(b):
            return None
        added.append((a, b, float(lora.scaling[name])))
    return added


def _plain_factor(factor: Any) -> bool:
    if not isinstance(factor, nn.Linear) or "forward" in vars(factor) or _parameter(factor, "bias") is not None:
        return False
    weight = _parameter(factor, "weight")
    return type(weight) is nn.Parameter and weight.dtype == torch.float32


# Attributes of a module are looked for in three places, and there are a dozen for each layer.
def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]


def _parameter(module: nn.Module, name: str) -> Any:
    """None where it is computed from others (`torch.nn.utils.weight_norm`)."""
    return module._parameters.get(name)


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def _turns(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is to be computed as W x^T."""
    return (
        bias is None
        and weight.numel() >= TRANSPOSED_SMALLEST
        and x.shape[-1] <= TRANSPOSED_LONGEST
        and x.numel() // x.shape[-1] in TRANSPOSED_ROWS
        and _are_plain(x, weight, bias)
    )


def _columns(x: Tensor) -> Tensor:
    """[H, 4] of [..., H], zeros in a column that is not there: BLAS is made for four."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) < TRANSPOSED_ROWS[-1]:
        rows = nn.functional.pad(rows, (0, 0, 0, TRANSPOSED_ROWS[-1] - len(rows)))
    return rows.t()


def _turned(product: Tensor, x: Tensor) -> Tensor:
    """[..., out] of [out, 4], with the first dimensions of x."""
    return product[:, : x.numel() // x.shape[-1]].t().contiguous().view(*x.shape[:-1], product.shape[0])


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is to be computed by oneDNN."""
    return weight.numel() >= SMALLEST and 0 < x.numel() <= MOST * x.shape[-1] and _are_plain(x, weight, bias)


def _are_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        all(type(one) in (Tensor, nn.Parameter) for one in (x, weight, bias) if one is not None)
        and x.dtype == weight.dtype == torch.float32
    )


@cache
def available() -> bool:
    """Whether this build of torch has oneDNN's products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
