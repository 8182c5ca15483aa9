"""How much a model makes of rounding: what its layers give is moved, at random, by as much as rounding may move it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.blocks import blocks_of


@contextmanager
def disturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, what embeddings, linear layers and blocks give is multiplied by 1 + u, u uniform within one unit roundoff
    of its dtype (bfloat16 2^-8, float32 2^-24), and rounded to that dtype.

    The draws are the seed's alone. Ranks that divide layers need the same one, so that what they have copies of stays
    the same, and ranks that divide rows another. Weights are not touched.
    """
    draws: dict[torch.device, torch.Generator] = {}

    def moved(given: Tensor) -> Tensor:
        if given.device not in draws:
            draws[given.device] = torch.Generator(given.device).manual_seed(seed)
        noise = torch.rand(given.shape, generator=draws[given.device], device=given.device)
        exact = given.to(torch.promote_types(given.dtype, torch.float32))
        # A sum, since 1 + u itself would be rounded, downwards more often than upwards.
        return (exact + exact * (torch.finfo(given.dtype).eps / 2 * (2 * noise - 1))).to(given.dtype)

    def hook(_: nn.Module, inputs: Any, given: Any) -> Any:
        return (moved(given[0]), *given[1:]) if isinstance(given, tuple) else moved(given)

    layers: list[Any] = [model.get_input_embeddings(), *blocks_of(model)]  # type: ignore[operator]
    layers += [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["disturbed"]
