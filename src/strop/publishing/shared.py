"""Publication to an engine that shares the trainer's module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strop.publishing.proof import Probe, Scorer
from strop.rollout.engine import Engine, WeightUpdate

# All that can differ: there are no tensors of which one could be wrong.
CAUSE = (
    "Trainer and engine share one module, so what the engine derived from older weights is stale: packed weights, "
    "merged adapters or caches"
)


class SharedPublisher:
    """Nothing is moved: the engine drops what it derived from the old weights, and the probe shows that it did."""

    def __init__(self, engine: Engine, probe: Probe) -> None:
        self._engine = engine
        self._probe = probe

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """While the trainer's weights become those of a version; here nobody else reads them meanwhile."""
        yield

    async def publish(self, trainer: Scorer, *, version: int) -> dict[str, float]:
        """Make the engine serve `version`; returns metrics.

        Raises:
            RunFailure: the engine's log-probabilities on the probe are not the trainer's.
        """
        served = await self._engine.update_weights(WeightUpdate(version))
        worst = await self._probe.prove(trainer, self._engine, version=served, cause=CAUSE)
        return {"publish/probe_gap": worst, "publish/version": float(served)}
