"""Tensors on their way to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. To a GPU it goes without waiting for what that computes: from pageable memory CUDA
    would wait for all of it first."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)
