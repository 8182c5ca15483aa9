"""Whether trainer and engine have room on one GPU together, or take turns (`rollout.engine.sleep: auto`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.config import Config

if TYPE_CHECKING:
    from strop.planning.hardware import Hardware

GIB = 1 << 30
ROOM = 0.9
"""Share of a GPU that may be planned for; the rest is the driver's, the kernels' and what lies between tensors."""
ACTIVATIONS = 0.25
"""Share that micro-batches on `auto` are chosen for."""
_MOMENTS = {"adamw": 8, "adafactor": 0, "muon": 8, "adamw_8bit": 2}
"""Bytes of optimizer state for each trained weight, at most."""


def trainer_bytes(config: Config, model: Any, *, item: int, reference: bool) -> int:
    """Bytes that the trainer holds on its GPU during an update, beside activations: weights, gradients, masters and
    moments of what is trained, weights of the rest, and a reference's. A critic is not counted.

    Args:
        item: bytes of a number that the model computes in. reference: a frozen copy of the weights is needed.
    """
    total = int(sum(p.numel() for p in model.parameters()))
    trained = int(sum(p.numel() for p in model.parameters() if p.requires_grad))
    settings = config.training.optimizer
    each = 0 if settings.offload else 4 + (4 if item < 4 else 0) + _MOMENTS[settings.name]
    copies = 2 if reference and trained == total else 1
    return total * item * copies + trained * each


def engine_sleeps(
    config: Config, hardware: Hardware, model: Any, *, share: float, reference: bool
) -> tuple[bool, tuple[str, ...]]:
    """(whether the engine sleeps while the trainer computes, why where `auto` chose so).

    What the card has decides, not what is free on it, so that a run that goes on chooses the same again.

    Args:
        share: of the GPU's memory that the engine takes beside the trainer; 0 where it is elsewhere, or nothing is
            sampled.
    """
    asked = config.rollout.engine.sleep
    if asked != "auto":
        return asked == "always" and config.supervised is None, ()
    if not share or hardware.device.type != "cuda" or config.rollout.engine.tensor > 1:
        return False, ()
    held = trainer_bytes(config, model, item=hardware.dtype.itemsize, reference=reference)
    together = held + (ACTIVATIONS + share) * hardware.memory
    if together <= ROOM * hardware.memory:
        return False, ()
    why = f"the engine sleeps while the trainer computes (together they may need {together / GIB:.0f} GiB)"
    return True, (why,)


__all__ = ["engine_sleeps", "trainer_bytes"]
