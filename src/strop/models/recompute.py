"""Blocks whose activations are computed again in the backward pass (arXiv 1604.06174), attention's results kept or not.

Attention is the dearest part of a block on long streams, and its result one of the smallest things that it holds: kept,
the second pass leaves it out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

_local = threading.local()


class KeptResults:
    """What attention gave within one block, in the order in which it was asked.

    again: the block is computed a second time.
    """

    def __init__(self) -> None:
        self.again = False
        self._found: list[Any] = []

    def give(self, found: Any) -> None:
        self._found.append(found)

    def last(self) -> Any:
        return self._found[-1]

    def take(self) -> Any:
        return self._found.pop(0)


def kept_results() -> KeptResults | None:
    """Those of the block that is computed now; None where nothing is kept."""
    return getattr(_local, "kept", None)


def recomputed(compute: Callable[..., Any], block: nn.Module, *, keep_attention: bool) -> Callable[..., Any]:
    """A block's `forward` that keeps but its input [1, T, H], the first argument, for the backward pass."""

    dropouts = [module for module in block.modules() if isinstance(module, nn.Dropout) and module.p > 0]

    def forward(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return compute(hidden, *arguments, **named)
        kept = KeptResults() if keep_attention else None

        def run(given: Tensor) -> Any:
            with _keeping(kept):
                found = compute(given, *arguments, **named)
            if kept is not None:
                kept.again = True
            return found

        # What is drawn in the first pass must be drawn in the second.
        return CheckpointFunction.apply(run, any(dropout.training for dropout in dropouts), hidden)

    return forward


@contextmanager
def _keeping(kept: KeptResults | None) -> Iterator[None]:
    before = kept_results()
    _local.kept = kept
    try:
        yield
    finally:
        _local.kept = before


__all__ = ["KeptResults", "kept_results", "recomputed"]
