"""How masked tokens are kept out of a computation.

`torch.where(mask, f(x), 0)` is not enough: where `x` is NaN or `f(x)` overflows, the untaken branch still multiplies
its infinite derivative by 0 and the gradient becomes NaN. So masked inputs are replaced by a constant BEFORE `f`.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXP_LIMIT = 60.0
"""Largest exponent given to `exp`: e^60 = 1e26, far beyond any ratio that means something, and its products with
advantages still fit in float32. A guard against infinity, not a convention."""


def widen(values: Tensor) -> Tensor:
    """float64 stays float64; every other number format becomes float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def exact_dtype(device: torch.device) -> torch.dtype:
    """The format for long sums: float64, or float32 on Apple's GPU, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def fence(mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Replace what must not take part by 0.

    Args:
        mask: bool, the shape of the inputs; None takes every token at which all inputs are finite.
        inputs: tensors of one shape.

    Returns:
        (inside, cleaned inputs): `inside` is bool, True where a token takes part.
    """
    wide = [widen(values) for values in inputs]
    if mask is None:
        inside = torch.isfinite(wide[0])
        for values in wide[1:]:
            inside = inside & torch.isfinite(values)
    else:
        inside = mask.bool()
    return inside, [torch.where(inside, values, 0.0) for values in wide]


def hide(result: Tensor, inside: Tensor, mask: Tensor | None) -> Tensor:
    """The counterpart of `fence`: 0 at masked tokens.

    Without a mask, a token with an input that is not finite gets NaN and no gradient: `aggregate` drops it where its
    own mask is False, and shows it, as a NaN loss, where it is True.
    """
    return torch.where(inside, result, 0.0 if mask is not None else torch.nan)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp(min(exponent, EXP_LIMIT))."""
    return torch.exp(exponent.clamp(max=EXP_LIMIT))
