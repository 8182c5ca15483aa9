"""The trainer as the loop sees it when its ranks are in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.algorithms.supervised import explained_variance
from strop.cluster.group import WorkerGroup
from strop.config.training import OptimizerSettings
from strop.loops.critic import Critic
from strop.training.snapshot import Held


class Asked:
    """Calls to a group of workers from another thread than that of the event loop, which stays free to watch them.

    Args:
        loop: that the group belongs to.
    """

    def __init__(self, group: WorkerGroup, loop: asyncio.AbstractEventLoop) -> None:
        self._group, self._loop = group, loop

    def __call__(self, method: str, *args: Any, beside: bool = False) -> Any:
        """What rank 0 answers; all are asked. beside: see `WorkerGroup.call`."""
        try:
            inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            inside = False
        if inside:
            raise RuntimeError(f"{method} was asked for in the event loop that has to wait for it; use `place.aside`")
        future: Future[Any] = asyncio.run_coroutine_threadsafe(
            self._group.call(method, *args, beside=beside), self._loop
        )
        return future.result()


class RemoteTrainer:
    """`training/protocol.py` over ranks in other processes."""

    def __init__(self, ask: Asked, optimizer: OptimizerSettings) -> None:
        self._ask = ask
        # A critic on the policy's backbone reads the learning rate.
        self.optimizer = SimpleNamespace(settings=optimizer)

    def logprobs(self, batch: TokenBatch, *, role: str = "policy") -> Tensor:
        """[T] float32 at the sampling temperature, 0 where the loss mask is False."""
        return _own(self._ask("logprobs", batch, role))

    def logprobs_and_values(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """The policy's, and what its value head says before each trained token: [T] float32 each."""
        logprobs, values = self._ask("logprobs_and_values", batch)
        return _own(logprobs), _own(values)

    def update(self, batch: TokenBatch, objective: Any) -> dict[str, float]:
        """All mini-batches and epochs of one step; returns metrics, and fills the batch as a trainer here does."""
        stats, seen, old = self._ask("update", batch, objective)
        batch.extra["logprobs"] = _own(seen)
        if old is not None:
            batch.old_logprobs = _own(old)
        return dict(stats)

    def evaluate(self, batch: TokenBatch, objective: Any) -> dict[str, float]:
        """The loss and its metrics on a batch that is not trained."""
        return dict(self._ask("evaluate", batch, objective))

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, at temperature 1, float32 [L]; the first one is NaN."""
        return list(self._ask("score", token_lists))

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """How far rounding may move each of these scores, in nats, float32 [L]; the first one is NaN."""
        return list(self._ask("rounding", token_lists))

    def hold(self, tokenizer: Any) -> Held:
        """What `export` and `save` would write now, in the memory of the ranks. What is returned is called from another
        thread than the loop's, and the ranks answer while they do other work."""
        self._ask("hold")
        return Held(
            lambda folder: self._ask("write_held", "model", folder.absolute(), beside=True),
            lambda directory: dict(self._ask("write_held", "state", directory.absolute(), beside=True)),
        )

    def held_bytes(self) -> tuple[int, int]:
        """(bytes, bytes that are free) of the host of ranks with the least room, with the critic's."""
        needed, free = self._ask("held_bytes")
        return int(needed), int(free)

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the state that the ranks, or any other number of them, go on from."""
        return dict(self._ask("save", directory.absolute()))

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        self._ask("load", directory.absolute(), state)

    def export(self, tokenizer: Any, folder: Path) -> None:
        """Write the model as a Hugging Face folder; the ranks have the tokenizer themselves."""
        self._ask("export", folder.absolute())

    def offload(self) -> int:
        """See `training/protocol.py`; the bytes are those of the first rank, with the critic's."""
        return int(self._ask("offload"))

    def reload(self) -> int:
        return int(self._ask("reload"))

    def close(self) -> None:
        self._ask("close_trainer")


class RemoteCritic(Critic):
    """A critic whose backbone is with the trainer's ranks."""

    def __init__(self, ask: Asked, algorithm: Any) -> None:
        self._ask = ask
        self.algorithm = algorithm
        ask("make_critic")

    def values(self, batch: TokenBatch) -> Tensor:
        return _own(self._ask("values", batch))

    def update(self, batch: TokenBatch) -> dict[str, float]:
        assert batch.values is not None
        assert batch.returns is not None
        found = dict(self._ask("update_critic", replace(batch, extra={})))
        found["critic/explained_variance"] = explained_variance(batch.values, batch.returns, batch.loss_mask)
        return found

    def save(self, directory: Path) -> dict[str, Any]:
        directory.mkdir(exist_ok=True)
        return dict(self._ask("save_critic", directory.absolute()))

    def hold(self) -> Callable[[Path], dict[str, Any]]:
        self._ask("hold_critic")

        def save(directory: Path) -> dict[str, Any]:
            directory.mkdir(exist_ok=True)
            return dict(self._ask("write_held", "critic", directory.absolute(), beside=True))

        return save

    def held_bytes(self) -> tuple[int, int]:
        # The ranks counted it with their trainer's.
        return 0, 0

    def offload(self) -> int:
        # It goes with the trainer's of its rank.
        return 0

    def reload(self) -> int:
        return 0

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        self._ask("load_critic", directory.absolute(), state)


def _own(values: Tensor) -> Tensor:
    """With memory of its own: what arrives may be shared with other processes."""
    return torch.empty_like(values).copy_(values)
