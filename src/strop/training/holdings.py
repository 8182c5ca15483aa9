"""What of a trainer is in the memory of its device all the time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strop.training.optimizer import MASTER

if TYPE_CHECKING:
    from strop.training.single import SingleDeviceTrainer


def held_parts(trainer: SingleDeviceTrainer) -> dict[str, int]:
    """Bytes on the trainer's device: weights, masters (those that are no weights), gradients (as many as there are at
    the end of a backward pass), optimizer state, reference. Memory that several share counts once."""
    optimizer, device = trainer.optimizer, trainer.device
    state = optimizer.state()
    own = {id(p) for p in optimizer.parameters.values()}
    masters = [m for m in optimizer.masters.values() if id(m) not in own]
    reference = () if trainer._reference is None else trainer._reference.model.parameters()
    gradients = sum(4 * m.numel() for m in optimizer.masters.values() if m.device.type == device.type)
    found = {
        "weights": _bytes((*trainer.model.parameters(), *optimizer.parameters.values()), device),
        "masters": _bytes(masters, device),
        "gradients": gradients,
        "optimizer state": _bytes((t for key, t in state.items() if not key.startswith(f"{MASTER}/")), device),
        "reference": _bytes(reference, device),
    }
    return {name: size for name, size in found.items() if size}


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return sum(storages.values())
