"""What a checkpoint will hold, copied: training goes on while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

# Share of the free memory that copies may take, and bytes below which writing is no wait worth a copy.
SHARE = 1 / 4
LEAST = 64 << 20


@dataclass(frozen=True)
class Held:
    """What a trainer's `export` and `save` would write at the moment when it was made.

    Both may be called in another thread, once each; the trainer goes on meanwhile.
    """

    export: Callable[[Path], None]
    save: Callable[[Path], dict[str, Any]]


class Copies:
    """Copies of tensors in the CPU's memory; one that is asked for under two names is copied once.

    Args:
        model: its weights that are not trained are nobody's to change, and are not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = {_place(p) for p in model.parameters() if not p.requires_grad and p.device.type != "meta"}
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place in self._frozen:
            return tensor.detach()
        if place not in self._made:
            # The tensor is kept too, or another one could get its place in memory.
            self._made[place] = tensor, tensor.detach().to("cpu", copy=True).contiguous()
        return self._made[place][1]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that copies of tensors take, each once."""
    return sum({_place(t): t.numel() * t.element_size() for t in tensors}.values())


def free_memory() -> int:
    """Bytes that this machine, or the container that the process is in, still has."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def in_background(asked: bool | str, needed: int, free: int) -> tuple[bool, str]:
    """(whether a checkpoint is written while training goes on, why so).

    Args:
        asked: `checkpoint.in_background`. needed: bytes of a copy. free: of the memory that it would be in.
    """
    if isinstance(asked, bool):
        return asked, "checkpoint.in_background"
    mib = f"a copy takes {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} are free"
    return LEAST <= needed <= SHARE * free, mib


__all__ = ["Copies", "Held", "copied_bytes", "free_memory", "in_background"]
