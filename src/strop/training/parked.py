"""An optimizer's state in the CPU's memory while nobody updates, and back for the next update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from strop.training.optimizer import MasterOptimizer

# Counts and other single numbers: a copy costs more than they take.
LEAST = 16


class Parked:
    """Moves what only updates need: masters that are no parameters, their gradients, and moments.

    The parameters stay, since the engine and the proof of delivery read them. Bytes are moved, never converted, so an
    update computes the same bits as one without a move in between. Buffers in the CPU's memory are pinned where there
    is a GPU, and kept for the next time, since pinning takes longer than the copy. Of a DTensor the rank's own shard is
    moved: nothing is communicated.

    What an optimizer keeps on the CPU anyway moves nowhere. One whose home is the CPU is copied within it, which frees
    nothing, and which runs refuse; it shows without a GPU that no number changes.
    """

    def __init__(self, optimizer: MasterOptimizer) -> None:
        self._optimizer = optimizer
        self._buffers: dict[str, Tensor] = {}
        self.away = False
        """Whether the state is in the CPU's memory."""
        self._homes: dict[str, torch.device] = {}

    def offload(self) -> int:
        """Move to the CPU's memory; returns the bytes, 0 where all of it was away before."""
        if self.away:
            return 0
        moved, devices = 0, set()
        self._homes = {}
        for key, tensor in self._tensors():
            local = _local(tensor)
            buffer = self._buffer(key, local)
            buffer.copy_(local, non_blocking=True)
            self._homes[key] = local.device
            devices.add(local.device)
            _put(tensor, buffer)
            moved += buffer.numel() * buffer.element_size()
        self.away = True
        _settle(devices)
        return moved

    def reload(self) -> int:
        """Move back to where it was; returns the bytes, 0 where nothing was away."""
        if not self.away:
            return 0
        moved = 0
        for key, tensor in self._tensors():
            home = self._homes.get(key)
            if home is None:
                continue
            buffer = _local(tensor)
            _put(tensor, torch.empty_like(buffer, device=home, pin_memory=False).copy_(buffer, non_blocking=True))
            moved += buffer.numel() * buffer.element_size()
        # Buffers are overwritten only by copies that wait for these in the same stream.
        self.away = False
        return moved

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of all that moves; tensors are changed in place, so that whoever holds one sees the move."""
        for key, tensor in self._optimizer.apart():
            if isinstance(tensor, Tensor) and tensor.numel() >= LEAST and (self.away or self._leaves(tensor)):
                yield key, tensor

    def _leaves(self, tensor: Tensor) -> bool:
        """Whether a tensor is not where the optimizer keeps it on purpose."""
        home = self._optimizer.home
        return home.type == "cpu" or _local(tensor).device.type != "cpu"

    def _buffer(self, key: str, local: Tensor) -> Tensor:
        found = self._buffers.get(key)
        if found is None or (found.shape, found.dtype, found.stride()) != (local.shape, local.dtype, local.stride()):
            found = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
            self._buffers[key] = found
        return found


def _local(tensor: Any) -> Tensor:
    """A rank's own part, or the tensor itself; the same memory."""
    # Not `to_local`, which gives a view: the part itself has to be exchanged.
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found.detach()


def _put(tensor: Any, values: Tensor) -> None:
    if hasattr(tensor, "_local_tensor"):
        tensor._local_tensor = values
    else:
        tensor.data = values


def _settle(devices: set[torch.device]) -> None:
    """Wait for the copies, and give the memory to whoever else is on the device: torch would keep it for itself."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
