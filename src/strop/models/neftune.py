"""NEFTune: noise on the embeddings of what is trained.

Source: arXiv 2310.05914, algorithm 1: uniform in [-1, 1], times alpha / sqrt(L d) for a sequence of L tokens and
embeddings of width d.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def embedding_noise(lengths: Sequence[int], width: int, alpha: float, *, keys: Sequence[int], update: int) -> Tensor:
    """[T, width] float32 on the CPU: the noise of sequences that lie end to end.

    Each sequence has a random stream of its own, Philox (Salmon et al., SC 2011) keyed by its key and the update: what
    it gets does not depend on its neighbours, on the cut into micro-batches, on the device, or on what was drawn
    before.

    Args:
        lengths: tokens of each sequence. keys: one number of 64 bits for each. update: updates that are done.
    """
    found = []
    for length, key in zip(lengths, keys, strict=True):
        stream = np.random.Generator(np.random.Philox(key=np.array([key % 2**64, update], np.uint64)))
        draws = stream.random((length, width), dtype=np.float32)
        found.append((2 * draws - 1) * np.float32(alpha / (length * width) ** 0.5))
    return torch.from_numpy(np.concatenate(found))


@contextmanager
def noisy_embeddings(model: nn.Module, noise: Tensor) -> Iterator[None]:
    """Add noise [T, width] to the embeddings of the packed row [1, T] that goes through the model inside."""

    def add(_: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        return embedded + noise.to(embedded)

    layer: Any = model.get_input_embeddings()  # type: ignore[operator]
    handle = layer.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
