"""Requests that the local engine has begun, and what drawing their next tokens needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from strop.rollout.engine import FinishReason, SampleRequest, SampleResult
from strop.rollout.engines.graphs import Drawn
from strop.rollout.engines.stopping import ends_with_stop


@dataclass
class UnderWay:
    """A request on its way."""

    request: SampleRequest
    future: asyncio.Future[SampleResult]
    key: np.uint64
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    # Hidden state [H] after the prompt, and the version it was computed with; lent to siblings of the same version.
    first_hidden: tuple[int, Tensor] | None = None
    stop_tail: int = 0
    # Of the cache; only while it is running.
    row: int = -1
    # Called with each token as it is drawn.
    told: Callable[[int], None] | None = None

    def result(self, finish: FinishReason) -> SampleResult:
        return SampleResult(self.tokens, self.logprobs, self.versions, finish)

    def finished(self, eos: frozenset[int], tokenizer: Any) -> FinishReason | None:
        """Why no token comes after the newest one; None where another is drawn."""
        settings = self.request.settings
        if self.tokens[-1] in eos:
            return "stop"
        if self.stop_tail and ends_with_stop(tokenizer, self.tokens[-self.stop_tail :], settings.stop):
            return "stop"
        return "length" if len(self.tokens) >= settings.max_new_tokens else None


@dataclass(frozen=True)
class Launched:
    """A decoding step that a GPU computes while nobody waits for it yet.

    sequences: of its rows; those whose future is done by then get nothing of it. version: of the weights it reads.
    """

    sequences: list[UnderWay]
    version: int
    drawn: Drawn

    def sources(self, running: Sequence[UnderWay]) -> np.ndarray:
        """int64 [n]: the row of this step that draws each one's newest token; -1 where the token is known."""
        found = np.full(len(running), -1, dtype=np.int64)
        for row, sequence in enumerate(self.sequences):
            if not sequence.future.done():
                found[sequence.row] = row
        return found


class Draws:
    """What drawing needs of each running sequence, in arrays, so that a step need not gather it from objects.

    keys: uint64, of the random stream. positions: int64, of the next token in it. temperatures: float32. last: int64,
    the newest token. All [rows].
    """

    def __init__(self, rows: int) -> None:
        self.keys = np.zeros(rows, dtype=np.uint64)
        self.positions = np.zeros(rows, dtype=np.int64)
        self.temperatures = np.zeros(rows, dtype=np.float32)
        self.last = np.zeros(rows, dtype=np.int64)

    def enter(self, row: int, sequence: UnderWay) -> None:
        self.keys[row] = sequence.key
        self.positions[row] = len(sequence.tokens)
        self.temperatures[row] = sequence.request.settings.temperature

    def move(self, source: int, target: int) -> None:
        for array in (self.keys, self.positions, self.temperatures, self.last):
            array[target] = array[source]


def context_of(sequence: UnderWay) -> tuple[int, ...]:
    """What must be in the cache before the next token: the prompt, and what was sampled before a sleep."""
    return (*sequence.request.tokens, *sequence.tokens)


__all__ = ["Draws", "Launched", "UnderWay", "context_of"]
