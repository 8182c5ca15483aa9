"""The proof of delivery: trainer and engines score the same probe, and must agree.

Where weights are moved, checksums come first (`Receiver.verify`): they name each tensor that is not what was sent. They
say nothing of what an engine derived from weights, such as packed copies, merged adapters and caches; the probe goes
through these.

How far apart rounding puts two ways of computing one model is another for other weights: training makes places where a
block turns one way or the other, and a token that comes near one is moved by ten times of what others are. So what the
first publication measured is not the last word: where scores differ by more, the trainer measures what rounding does to
each of them with the present weights, and each is held to that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from strop.errors import RunFailure
from strop.rollout.engine import Engine

# Times the largest difference seen while both sides certainly hold the same weights.
MARGIN = 10.0
# Differences above this, in nats, are not taken for rounding because of what was measured first.
MOST = 1.0
# Times the most that disturbing a trainer's layers moves one of 32 copies of a token. Of 150,000 tokens that another
# way of computing in bfloat16 moved by more than 0.1, none was moved by more than 3.8 times that (of 1,380 that vLLM
# moved so, by 2.3). Fewer copies show less of it, and would need a margin that other weights stay within.
MARGIN_OF_ROUNDING = 4.0

Scores = Sequence[np.ndarray]
"""Log-probability of each token, float32 [L], for each sequence."""


class Scorer(Protocol):
    """The trainer's side of the probe."""

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        ...

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """How far rounding may move each of these scores, in nats, float32 [L]; the first one is NaN."""
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
        theirs = {"": await engine.score(self.token_lists)}

        async def rounding() -> Scores:
            return trainer.rounding(self.token_lists)

        return await self.judge(mine, theirs, rounding=rounding, version=version, cause=cause)

    async def judge(
        self,
        mine: Scores,
        theirs: Mapping[str, Scores],
        *,
        rounding: Callable[[], Awaitable[Scores]],
        version: int,
        cause: str = "",
    ) -> float:
        """Largest difference between the trainer's scores and those of any engine, in nats.

        The first call happens before any update, when all hold the weights that were loaded: it measures the rounding
        between the two ways of computing, and later calls are held to ten times that, or where `rounding` says that a
        token is moved by more with these weights, to four times what it says.

        Args:
            theirs: scores by the engine's name; an empty name where there is only one. rounding: see `Scorer`, of the
                trainer; asked only where scores differ by more than what was measured first. cause: ends the message.

        Raises:
            RunFailure: an engine does not serve the trainer's weights.
        """
        gaps = {name: _flat([a - b for a, b in zip(mine, scores, strict=True)]) for name, scores in theirs.items()}
        # What is not a number stays so.
        worst = float(np.concatenate(list(gaps.values())).max())
        if self.tolerance is None:
            self.tolerance = min(max(self.floor, MARGIN * worst), MOST) if worst <= 100 * self.floor else self.floor
        if worst <= self.tolerance:
            return worst
        # What is not finite allows nothing, and is more than is allowed.
        measured = np.nan_to_num(_flat(await rounding()), nan=0.0, posinf=0.0)
        allowed = np.maximum(self.tolerance, MARGIN_OF_ROUNDING * measured)
        beyond = {name: np.where(np.isfinite(gap), gap / allowed, np.inf) for name, gap in gaps.items()}
        name = max(beyond, key=lambda name: float(beyond[name].max()))
        at = int(beyond[name].argmax())
        if beyond[name][at] > 1:
            raise RunFailure(
                f"{name and f'engine {name}: '}the engine does not serve the weights of version {version}: "
                f"log-probabilities of the probe differ by {gaps[name][at]:.3g} nats, {allowed[at]:.3g} is "
                f"rounding{cause and f'. {cause}'}",
                mend="the run stops so that nothing is trained on samples of other weights; resume from the checkpoint",
            )
        return worst


def _flat(of_tokens: Scores) -> np.ndarray:
    """Sizes of all but the first of each sequence, end to end."""
    return np.abs(np.concatenate([values[1:] for values in of_tokens]))
