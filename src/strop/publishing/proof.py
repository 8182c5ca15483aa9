"""The proof of delivery: trainer and engines score the same probe, and must agree.

Where weights are moved, checksums come first (`Receiver.verify`): they name each tensor that is not what was sent. They
say nothing of what an engine derived from weights, such as packed copies, merged adapters and caches; the probe goes
through these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from strop.errors import RunFailure
from strop.rollout.engine import Engine

# Times the largest difference seen while both sides certainly hold the same weights.
MARGIN = 10.0
# Two ways of computing that differ by more than this, in nats, do not compute the same model.
MOST = 1.0

Scores = Sequence[np.ndarray]
"""Log-probability of each token, float32 [L], for each sequence."""


class Scorer(Protocol):
    """The trainer's side of the probe."""

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        ...


@dataclass
class Probe:
    """Fixed token sequences whose log-probabilities tell two sets of weights apart.

    token_lists: what is scored. floor: differences up to here are rounding, whatever was measured: some thousand
    units in the last place of a log-probability of 10 (float32 1e-4, bfloat16 0.1).
    """

    token_lists: list[list[int]]
    floor: float
    tolerance: float | None = field(default=None)

    @classmethod
    def make(cls, vocabulary: int, *, floor: float, length: int = 4) -> Probe:
        """One sequence that walks from one end of the vocabulary to the other; each of its tokens uses all layers."""
        step = max(1, (vocabulary - 2) // (length - 1))
        return cls([[(1 + at * step) % vocabulary for at in range(length)]], floor)

    async def prove(self, trainer: Scorer, engine: Engine, *, version: int, cause: str = "") -> float:
        """Largest difference between the two sides, in nats. cause: what a difference would come from.

        Raises:
            RunFailure: the engine does not serve the trainer's weights.
        """
        mine = trainer.score(self.token_lists)
        return self.judge(mine, {"": await engine.score(self.token_lists)}, version=version, cause=cause)

    def judge(self, mine: Scores, theirs: Mapping[str, Scores], *, version: int, cause: str = "") -> float:
        """Largest difference between the trainer's scores and those of any engine, in nats.

        The first call happens before any update, when all hold the weights that were loaded: it measures the rounding
        between the two ways of computing, and later calls are held to ten times that.

        Args:
            theirs: scores by the engine's name; an empty name where there is only one. cause: ends the message.

        Raises:
            RunFailure: an engine does not serve the trainer's weights.
        """
        gaps = {name: _gap(mine, scores) for name, scores in theirs.items()}
        # What is not a number is larger than anything.
        worst_name = max(gaps, key=lambda name: (math.isnan(gaps[name]), gaps[name]))
        worst = gaps[worst_name]
        if self.tolerance is None:
            self.tolerance = min(max(self.floor, MARGIN * worst), MOST) if worst <= 100 * self.floor else self.floor
        if not worst <= self.tolerance:
            which = worst_name and f"engine {worst_name}: "
            raise RunFailure(
                f"{which}the engine does not serve the weights of version {version}: log-probabilities of the probe "
                f"differ by {worst:.3g} nats, {self.tolerance:.3g} is rounding{cause and f'. {cause}'}",
                mend="the run stops so that nothing is trained on samples of other weights; resume from the checkpoint",
            )
        return worst


def _gap(mine: Scores, theirs: Scores) -> float:
    return float(max(np.abs(a[1:] - b[1:]).max() for a, b in zip(mine, theirs, strict=True)))
