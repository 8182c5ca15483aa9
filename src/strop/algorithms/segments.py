"""Sums over sequences or groups whose members are named by ids, in a flat or a padded layout."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.masking import exact_dtype, widen


def segment_sum(values: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """Sum of the masked values of each id.

    Args:
        values: any shape, differentiable; what it holds where the mask is False does not matter.
        mask: bool, same shape.
        ids: int64, same shape, at least 0 where the mask is True.

    Returns:
        [S] with S = max(ids) + 1, in float64 (float32 on Apple's GPU); 0 for an id without tokens.
    """
    inside = mask.bool()
    size = int(ids.max()) + 1 if ids.numel() else 1
    wide = torch.where(inside, widen(values), 0.0).to(exact_dtype(values.device))
    index = torch.where(inside, ids, 0)
    total = torch.zeros(max(size, 1), dtype=wide.dtype, device=wide.device)
    return total.index_add(0, index.reshape(-1), wide.reshape(-1))


def segment_count(mask: Tensor, ids: Tensor) -> Tensor:
    """[S] number of True tokens of each id, in the format of `segment_sum`."""
    return segment_sum(mask.to(torch.float32), mask, ids)


def segment_mean(values: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """[S] mean over the masked tokens of each id; 0 for an id without any."""
    return segment_sum(values, mask, ids) / segment_count(mask, ids).clamp(min=1.0)


def spread(per_segment: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """Give each token the number of its segment, 0 where the mask is False: [S] -> the shape of `ids`."""
    inside = mask.bool()
    return torch.where(inside, per_segment[torch.where(inside, ids, 0)], 0.0)
