"""Weights on their way into workers that stand for vLLM's: what one of them does not hold is named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.publishing import checksums, into_vllm
from strop.publishing.into_vllm import IntoWorkers, WorkerExtension

ROWS = {"embed": 40, "first": 12, "second": 12, "norm": 4}


class Model(nn.Module):
    """The share of a rank: of the rows of each weight every second half."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.forgets = ""
        for name, rows in ROWS.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(rows // 2, 30, dtype=dtype)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            own = getattr(self, name)
            if name != self.forgets:
                own.copy_(weight[self.rank * len(own) : (self.rank + 1) * len(own)])
            # As a loader may that computes in place.
            weight.fill_(float("nan"))


class Worker(WorkerExtension):
    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.device, self.model = rank, torch.device("cpu"), Model(rank, dtype)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=2), model_config=SimpleNamespace(quantization=None)
        )
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)


def weights_of(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 30, generator=draw) for name, rows in ROWS.items()}


def calling(workers: list[Worker]) -> Callable[[str, tuple[Any, ...]], list[Any]]:
    """As vLLM calls a method of all its workers at once."""

    def call(method: str, arguments: tuple[Any, ...]) -> list[Any]:
        found: dict[int, Any] = {}

        def one(worker: Worker) -> None:
            found[worker.rank] = getattr(worker, method)(*arguments)

        threads = [threading.Thread(target=one, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[worker.rank] for worker in workers]

    return call


@pytest.fixture(params=["each alone", "together"])
def into(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[IntoWorkers]:
    if request.param == "together":
        # As on a GPU, in several batches.
        monkeypatch.setattr(into_vllm, "ahead", partial(checksums.ahead, alone=()))
        monkeypatch.setattr(into_vllm, "summed", partial(checksums._summed, alone=()))
        monkeypatch.setattr(into_vllm, "_BATCH", 3000)
    made = IntoWorkers(2, bucket_bytes=2000)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workers_hold_what_they_were_given(into: IntoWorkers, dtype: torch.dtype) -> None:
    workers = [Worker(rank, dtype) for rank in range(2)]
    for seed in range(3):
        weights = weights_of(seed)
        assert into.push(calling(workers), weights) == []
        for name, weight in weights.items():
            held = torch.cat([getattr(worker.model, name) for worker in workers])
            assert torch.equal(held, weight.to(dtype))


@pytest.mark.parametrize("name", ROWS)
def test_what_a_worker_does_not_hold_is_named(into: IntoWorkers, name: str) -> None:
    workers = [Worker(rank, torch.float32) for rank in range(2)]
    workers[1].model.forgets = name
    assert into.push(calling(workers), weights_of(0)) == [name]
    workers[1].model.forgets = ""
    assert into.push(calling(workers), weights_of(1)) == []
