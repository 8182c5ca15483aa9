"""What a model computes again and again, as CUDA graphs.

A pass over a few tokens is a thousand kernels, each of which Python needs longer to start than a GPU to compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.models.consistent_mode import is_consistent

# How often something is computed before it is captured: kernels are chosen and compiled then.
_WARM_UP = 2
# Tokens of a pass up to which it is worth it.
_FEW = 64
_DEVICES = ("cuda",)


class Graph(Protocol):
    """A `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...

    def pool(self) -> Any: ...


def captured(compute: Callable[[], tuple[Tensor, ...]], pool: Any = None) -> tuple[Graph, tuple[Tensor, ...]]:
    """A computation as a graph, and the tensors in which each replay leaves what it gives.

    Whatever else it reads or writes must stay where it is as long as the graph is replayed. pool: of memory, which only
    graphs share that are not replayed at the same time.
    """
    here, aside = torch.cuda.current_stream(), _aside(torch.cuda.current_device())
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                compute()
    finally:
        here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = compute()
    finally:
        # A capture that fails leaves this thread on its own stream, which nothing that follows would wait for.
        torch.cuda.set_stream(here)
    return graph, found


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """One for all captures: libraries hold a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


def places(model: nn.Module) -> list[int]:
    """Where the weights of a model are."""
    return [parameter.data_ptr() for parameter in model.parameters()]


class RepeatedScores:
    """Scores of the same few tokens with each version of the weights, as a proof of delivery asks for them: from the
    second time on a graph. See `of`.

    Not in the consistent mode, and not of a model whose passes need others, such as ranks that have parts of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._possible = next(model.parameters()).device.type in _DEVICES and not is_consistent(model)
        self._asked: Any = None
        self._graph: _OfWeights | None = None

    def of(
        self, token_lists: list[list[int]], temperature: float, make: Callable[[], Callable[[], Tensor]]
    ) -> Tensor | None:
        """[N], overwritten by the next call, where the same was asked for the time before too; None where it is to be
        computed without a graph.

        Args:
            make: gives what computes it, all inputs being there. It is held as long as the graph is.
        """
        if not self._possible or sum(map(len, token_lists)) > _FEW:
            return None
        asked, before = (token_lists, temperature), self._asked
        self._asked = asked
        if asked != before:
            self._graph = None
            return None
        if self._graph is None or not self._graph.fits():
            self._graph = None
            try:
                self._graph = _OfWeights(self._model, make())
            except Exception as error:
                self._possible = False
                warnings.warn(
                    "what is scored again and again is computed without a CUDA graph, which is slower: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return None
        return self._graph.again()

    def forget(self) -> None:
        """Give the graph back: what it reads will not stay where it is."""
        self._asked = self._graph = None


class _OfWeights:
    """One computation with a model, for the weights that the model has whenever it is asked."""

    def __init__(self, model: nn.Module, compute: Callable[[], Tensor]) -> None:
        self._model = model
        # The graph reads its inputs where they were.
        self._compute = compute
        self._places = places(model)
        self._graph, (self._found,) = captured(lambda: (compute(),))

    def fits(self) -> bool:
        """Whether the weights are where they were."""
        return self._places == places(self._model)

    def again(self) -> Tensor:
        self._graph.replay()
        return self._found


__all__ = ["Graph", "RepeatedScores", "captured", "places"]
