"""Which streams of a step go to which rank, so that all are done at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch

# A unit that is computed together (a prompt with its completions) is torn apart where it is larger than this share of
# what a rank has to do.
LARGEST = 0.25


def stream_costs(lengths: Tensor, *, weights: int, width: int) -> Tensor:
    """[N] float64, multiply-adds of a forward pass for streams of some lengths [N]: weights, and attention of a causal
    stream.

    Args:
        weights: of the matrices that each token meets. width: hidden size times blocks.
    """
    tokens = lengths.double()
    return tokens * (weights + width * tokens)


def shares(costs: Tensor, units: Sequence[Sequence[int]], ranks: int) -> list[Tensor]:
    """Divide units of streams among ranks: the largest first, each to the rank that has least to do.

    Args:
        costs: [N], of each stream. units: streams that stay together, each of them once.

    Returns:
        For each rank the indices of its streams, int64, increasing; empty where there are fewer units than ranks.
    """
    each = costs.numpy()
    of_unit = [float(each[list(unit)].sum()) for unit in units]
    order = sorted(range(len(units)), key=lambda at: (-of_unit[at], at))
    loads = np.zeros(ranks)
    found: list[list[int]] = [[] for _ in range(ranks)]
    for at in order:
        rank = int(loads.argmin())
        loads[rank] += of_unit[at]
        found[rank] += units[at]
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in found]


def units_of(batch: TokenBatch, costs: Tensor, ranks: int, *, whole_groups: bool) -> list[list[int]]:
    """Streams that stay together: those of a prompt, which is then computed once, unless ranks would be left idle."""
    ids = batch.group_ids if whole_groups or batch.prompt_ids is None else batch.prompt_ids
    by_id: dict[int, list[int]] = {}
    for at, number in enumerate(ids.tolist()):
        by_id.setdefault(number, []).append(at)
    together = list(by_id.values())
    if whole_groups:
        return together
    fair = LARGEST * float(costs.sum()) / ranks
    return [
        part for unit in together for part in ([unit] if float(costs[unit].sum()) <= fair else [[at] for at in unit])
    ]
