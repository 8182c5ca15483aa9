"""FSDP2: each rank holds a share of every weight, and gathers a block while it computes it (arXiv 2304.11277)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from strop.models.blocks import blocks_of


def shard(whole: nn.Module, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool) -> None:
    """Divide a module's weights among the ranks of a mesh, in place.

    Trained weights become float32 first: their shares are the masters that the optimizer updates. Gradients are summed,
    not averaged, and in float32: denominators are global already.

    Args:
        whole: what is called for a pass; it holds the model. dtype: what is computed in.
    """
    for parameter in whole.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy(),
    }
    for block in blocks_of(model):
        fully_shard(block, **policy)
    fully_shard(whole, **policy)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
