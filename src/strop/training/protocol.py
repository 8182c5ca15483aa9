"""What a trainer is (docs/architecture.md, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from strop.algorithms.base import Objective
from strop.algorithms.batch import TokenBatch
from strop.training.snapshot import Held

Role = Literal["policy", "reference"]


class Trainer(Protocol):
    """Scores and updates one model. It knows objectives, never algorithms' names, rewards or engines."""

    def logprobs(self, batch: TokenBatch, *, role: Role) -> Tensor:
        """[T] float32 at the sampling temperature, 0 where the loss mask is False."""
        ...

    def update(self, batch: TokenBatch, objective: Objective) -> dict[str, float]:
        """All mini-batches and epochs of one step; returns metrics."""
        ...

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, at temperature 1, float32 [L]; the first one is NaN."""
        ...

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """How far rounding may move each of these scores, in nats, float32 [L]; the first one is NaN."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole weights, adapters merged."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, by its name in the model; adapters alone where there are adapters."""
        ...

    def export(self, tokenizer: Any, folder: Path) -> None:
        """Write the model as a Hugging Face folder, adapters merged."""
        ...

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the state that resumes bit for bit; returns what goes into the checkpoint's JSON."""
        ...

    def hold(self, tokenizer: Any) -> Held:
        """What `export` and `save` would write now, in copies that no update changes."""
        ...

    def held_bytes(self) -> tuple[int, int]:
        """(bytes that `hold` copies, bytes of memory that are free where it does)."""
        ...

    def load(self, directory: Path, state: dict[str, Any]) -> None: ...

    def offload(self) -> int:
        """Move what only updates need (masters, moments) to the CPU's memory; returns the bytes. Everything but an
        update works meanwhile, saving included; the weights stay."""
        ...

    def reload(self) -> int:
        """Take it back; returns the bytes. `update` does it where nobody did."""
        ...
