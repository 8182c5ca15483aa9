"""Captured decoding steps where there is no GPU: what a graph would compute is computed when it is replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models import repeated
from strop.rollout.engines import graphs, local
from strop.rollout.engines.derived import Derived
from strop.rollout.engines.kv_cache import Decode, KVCache


class EagerDecoder(graphs.GraphDecoder):
    """A GraphDecoder whose graphs are Python; their results lie in tensors of their own, as those of graphs do."""

    def _capture(self, size: int) -> Any:
        held = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
        return Replayed(self, size, held), *held


class Replayed:
    """Computes again what was captured, from the joined layers that were captured: nobody brings new weights to them
    meanwhile."""

    def __init__(self, decoder: EagerDecoder, size: int, held: tuple[Tensor, Tensor]) -> None:
        self._decoder, self._size, self._held = decoder, size, held
        self._copies = decoder._joined()

    def replay(self) -> None:
        asks, self._decoder._joined = self._decoder._joined, lambda: self._copies
        try:
            drawn = self._decoder._compute(self._size)
        finally:
            self._decoder._joined = asks
        for tensor, found in zip(self._held, drawn, strict=True):
            tensor.copy_(found)


def captured(compute: Any, pool: Any = None) -> Any:
    """`repeated.captured`: what a graph would compute is computed when it is replayed."""

    class Graph:
        def replay(self) -> None:
            with pytest.MonkeyPatch.context() as patch:
                # Nobody brings new weights to the joined layers meanwhile.
                patch.setattr(Derived, "joined", lambda derived, _: derived._kept if derived._joins else None)
                found = compute()
            for tensor, new in zip(held, found, strict=True):
                tensor.copy_(new)

        def pool(self) -> Any:
            return pool

    held = tuple(torch.zeros_like(found) for found in compute())
    return Graph(), held


class Lengths:
    """A cache with the lengths that a step was given, which those of the cache may be ahead of."""

    def __init__(self, cache: KVCache, lengths: Tensor) -> None:
        self.lengths, self.layer, self._capacity = lengths.numpy().copy(), cache.layer, cache.capacity

    def reserve(self, length: int) -> None:
        assert length <= self._capacity, "a graph cannot make room"


def step(cache: KVCache, lengths: Tensor) -> Decode:
    return Decode(Lengths(cache, lengths), len(lengths), lengths.device)  # type: ignore[arg-type]


def capture_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let local engines and trainers that are made from now on compute as they do on a GPU."""
    monkeypatch.setattr(graphs, "_Step", step)
    monkeypatch.setattr(repeated, "captured", captured)
    monkeypatch.setattr(repeated, "_DEVICES", ("cpu",))
    monkeypatch.setattr(local, "GraphDecoder", EagerDecoder)
    monkeypatch.setattr(local, "capturable", lambda _: True)
    monkeypatch.setattr(local.LocalEngine, "_drawn_in_one_pass", local.LocalEngine._drawn)
