"""Linear layers laid out once for small matrix products on a CPU.

A decoding step multiplies a few dozen rows with every weight; a plain product re-orders each weight matrix at each
call. oneDNN can hold them in its own order: twice as fast for the output head of a 49,152-token vocabulary at 64 rows
(benchmarks/sampling.py). Adapters are merged on the way, so sampling with LoRA costs what the base model costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.adapters import adapter_delta

# Smaller matrices gain nothing: the call itself costs more.
SMALLEST = 1 << 17


def available(model: nn.Module) -> bool:
    """Whether this build of torch and this model (float32 on a CPU) can use packed weights."""
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def effective_weight(module: nn.Module) -> Tensor | None:
    """The weight [out, in] that a linear layer multiplies with, its active adapters added; None for other modules."""
    base: Any = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear):
        return None
    weight = base.weight.detach()
    if base is not module:
        lora: Any = module
        if getattr(lora, "merged", False) or getattr(lora, "disable_adapters", False):
            return weight
        if any(not isinstance(drop, nn.Identity) for drop in lora.lora_dropout.values()) and module.training:
            return None
        for adapter in lora.active_adapters:
            if adapter in lora.lora_A:
                weight = weight + adapter_delta(lora, adapter, base.weight).to(weight.dtype)
    return weight


class PackedLinears:
    """The packed weights of a model at one version."""

    def __init__(self, model: nn.Module, *, rows: int) -> None:
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        inside: set[nn.Module] = set()
        for module in model.modules():
            if module in inside:
                continue
            weight = effective_weight(module)
            if weight is None or weight.numel() < SMALLEST:
                continue
            inside.update(module.modules())
            base: Any = getattr(module, "base_layer", module)
            self._forwards.append((module, packed_product(weight, base.bias, rows)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model's linear layers use the packed weights."""
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.__dict__["forward"]


def packed_product(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """x -> x @ weight.T + bias, with the weight in oneDNN's order for products of about `rows` rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    held = None if bias is None else bias.detach()

    def product(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, held, "none", [], "")  # type: ignore[no-any-return]

    return product
