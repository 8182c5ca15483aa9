"""A linear recurrence over flat sequences, in chunks instead of token by token."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 64
"""Tokens in a chunk: the number of dependent steps at each level."""


def reverse_recurrence(inputs: Tensor, decays: Tensor) -> Tensor:
    """y[t] = inputs[t] + decays[t] * y[t + 1], with y beyond the end 0.

    A decay of 0 cuts the sequence: nothing from later tokens passes it. All chunks of `WIDTH` tokens are solved side by
    side as if nothing followed them; the first y of each chunk then obeys a recurrence of the same form, `WIDTH` times
    shorter, and what it carries into a chunk is added. The work is linear in the length, and no quotient of powers ever
    appears, so decays of 0 or 1 are as exact as any.

    Args:
        inputs: [M] float.
        decays: [M], same format.

    Returns:
        [M], same format.
    """
    length = inputs.shape[0]
    if length == 0:
        return inputs.clone()
    chunks = -(-length // WIDTH)
    pad = chunks * WIDTH - length
    # [WIDTH, chunks], so that a step over all chunks reads neighbouring memory.
    sums = torch.nn.functional.pad(inputs, (0, pad)).reshape(chunks, WIDTH).t().contiguous()
    products = torch.nn.functional.pad(decays, (0, pad)).reshape(chunks, WIDTH).t().contiguous()
    for step in range(WIDTH - 2, -1, -1):
        sums[step].addcmul_(products[step], sums[step + 1])
        products[step].mul_(products[step + 1])
    if chunks > 1:
        first = reverse_recurrence(sums[0], products[0])
        sums[:, :-1].addcmul_(products[:, :-1], first[1:])
    return sums.t().reshape(-1)[:length]
