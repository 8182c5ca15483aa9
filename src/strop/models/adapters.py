"""What an adapter adds to the weight it sits on, and the number format that it computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_FACTORS = ("lora_A", "lora_B", "lora_E")


def without_adapters(model: Any) -> Any:
    """The model that adapters were put into; one without adapters as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapter_delta(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    """What one adapter adds to a weight, float32, in the shape and on the device of the weight.

    LoRA (arXiv 2106.09685): s B A with s = alpha / r, or alpha / sqrt(r) if rank-stabilised (2312.03732). DoRA
    (2402.09353, eq. 5): m (W + s B A) / ||W + s B A|| - W, with the norm of each output's row. AdaLoRA (2303.10512,
    eq. 3): s B diag(E) A.

    peft's `get_delta_weight` knows nothing of DoRA, and for experts rounds to the number format of the weight.

    Args:
        layer: peft's wrapper of a linear layer or of the stacked experts of a mixture.
        weight: the weight without adapters.
    """
    if hasattr(layer, "lora_E"):
        a, b, e = (getattr(layer, name)[adapter].detach().to(weight.device, torch.float32) for name in _FACTORS)
        # The small number is peft's, and so belongs to what the adapter was trained as.
        delta = (b @ (a * e)) * layer.scaling[adapter] / (float(layer.ranknum[adapter]) + 1e-5)
        return delta.T if layer.fan_in_fan_out else delta
    a, b = (part[adapter].weight.detach().to(weight.device, torch.float32) for part in (layer.lora_A, layer.lora_B))
    experts = getattr(layer, "num_experts", 1)
    if experts > 1:
        a = a.reshape(experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, experts)
        shape = "eoi" if layer._did_swap_in_out_features else "eio"
        return torch.einsum(f"ore,eri->{shape}", b, a) * layer.scaling[adapter]
    delta = (b @ a) * layer.scaling[adapter]
    if adapter in layer.lora_magnitude_vector:
        plain = weight.detach().to(torch.float32)
        plain = plain.T if layer.fan_in_fan_out else plain
        magnitude = layer.lora_magnitude_vector[adapter].weight.detach().to(weight.device, torch.float32)
        whole = plain + delta
        delta = (magnitude / torch.linalg.norm(whole, dim=1))[:, None] * whole - plain
    return delta.T if layer.fan_in_fan_out else delta


def compute_like_inputs(model: nn.Module) -> None:
    """Let the float32 adapters of linear layers compute in the number format of their inputs, as the weights do.

    peft turns the inputs and the results of each layer into float32 instead, which under bfloat16 costs more time than
    the adapters do.
    """
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.cast_input_dtype_enabled = False
            for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
                factor.__class__ = LikeInput


class LikeInput(nn.Linear):
    """A linear layer that computes in the number format of its input."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)
