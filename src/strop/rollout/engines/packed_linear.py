"""Linear layers laid out once for small matrix products on a CPU.

A decoding step multiplies a few dozen rows with every weight; a plain product re-orders each weight matrix at each
call. oneDNN can hold them in its own order: twice as fast for the output head of a 49,152-token vocabulary at 64 rows
(benchmarks/sampling.py). Adapters are merged on the way, so sampling with LoRA costs what the base model costs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.adapters import adapter_delta
from strop.models.few_rows import available as has_products
from strop.models.replaced import replaced

Product = Callable[..., Tensor]
# Smaller matrices gain nothing: the call itself costs more.
SMALLEST = 1 << 17
# How much smaller they may be with adapters: merged, these need no product, and no module of peft, of their own.
ADAPTED = 8


def available(model: nn.Module) -> bool:
    """Whether this build of torch and this model (float32 on a CPU) can use packed weights."""
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and has_products()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def base_of(module: nn.Module) -> nn.Linear | None:
    """The linear layer whose weight can be packed, its adapters added; None for other modules, and with dropout."""
    base: Any = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear):
        return None
    if base is not module and _adds(module):
        lora: Any = module
        drops = lora.lora_dropout.values()
        if module.training and any(not isinstance(drop, nn.Identity) for drop in drops):
            return None
    return base


def effective_weight(module: nn.Module, base: nn.Linear) -> Tensor:
    """The weight [out, in] that a layer multiplies with: that of `base_of`, its active adapters added."""
    weight = base.weight.detach()
    if base is not module and _adds(module):
        lora: Any = module
        for adapter in lora.active_adapters:
            if adapter in lora.lora_A:
                weight = weight + adapter_delta(lora, adapter, base.weight).to(weight.dtype)
    return weight


def _adds(lora: Any) -> bool:
    """Whether adapters are added while a pass is computed."""
    return not (getattr(lora, "merged", False) or getattr(lora, "disable_adapters", False))


class PackedLinears:
    """The packed weights of a model at one version.

    A layer's weight is packed when it is first used, and multiplied with while the processor's caches still hold it:
    the first pass of a version, the proof of delivery, costs little more than the packing that sampling needs anyway.
    Until then nobody may change the weights; `LocalEngine` has one for each version.
    """

    def __init__(self, model: nn.Module, *, rows: int) -> None:
        self._forwards: list[tuple[nn.Module, Product]] = []
        inside: set[nn.Module] = set()
        for module in model.modules():
            if module in inside:
                continue
            base = base_of(module)
            if base is None or base.weight.numel() * (1 if base is module else ADAPTED) < SMALLEST:
                continue
            inside.update(module.modules())
            self._forwards.append((module, _packed_when_used(module, base, rows)))

    def active(self) -> AbstractContextManager[None]:
        """Let the model's linear layers use the packed weights."""
        return replaced(self._forwards)


def _packed_when_used(module: nn.Module, base: nn.Linear, rows: int) -> Product:
    product: Product | None = None

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        nonlocal product
        if product is None:
            product = packed_product(effective_weight(module, base), base.bias, rows)
        return product(x)

    return forward


def packed_product(weight: Tensor, bias: Tensor | None, rows: int) -> Product:
    """x -> x @ weight.T + bias, with the weight in oneDNN's order for products of about `rows` rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    held = None if bias is None else bias.detach()

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, held, "none", [], "")

    return product
