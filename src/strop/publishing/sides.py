"""What the trainer's and the engine's process have to do in a publication, over any transport.

Both classes are ordinary objects, to be hosted by whatever runs the processes: their methods take and return small
picklable values. Blocking work runs in a thread, so that the host stays responsive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from strop.errors import RunFailure
from strop.publishing.manifest import Fault, Manifest, Recording
from strop.publishing.proof import Scorer
from strop.publishing.receiver import Receiver
from strop.publishing.transports.protocol import Offer, SendingHalf, TakingHalf
from strop.rollout.engine import Engine, WeightUpdate


@dataclass(frozen=True)
class Delivered:
    """What was sent: its manifest, and the offer to take where nothing streams. moved: bytes, as far as known here."""

    manifest: Manifest
    offer: Offer
    moved: int


class TrainerSide:
    """The trainer's part.

    Args:
        weights: gives the tensors of the present version, one whole tensor at a time, under the engine's names. What it
            gave may not change until all is sent, as if it used one's memory for the next: some are read ahead.
        transport: None on ranks that only help to gather: these walk through `weights` and send nothing.
        scorer: scores the probe with the trainer's weights.
    """

    def __init__(
        self, weights: Callable[[], Iterable[tuple[str, Tensor]]], transport: SendingHalf | None, scorer: Scorer
    ) -> None:
        self._weights = weights
        self._transport = transport
        self._scorer = scorer
        self._version: int | None = None
        # What is left of a delivery that failed must end before the next begins.
        self._busy = threading.Lock()

    async def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer | None:
        """Announce a version; None on a rank that only helps. whole: see `SendingHalf.offer`."""
        self._version = version
        return None if self._transport is None else self._transport.offer(version, takers=takers, whole=whole)

    async def deliver(self) -> Delivered | None:
        """Send the version offered last; None on a rank that only helps.

        Raises:
            RunFailure: nothing was offered, or an engine was lost.
        """
        if self._version is None:
            raise RunFailure("weights were to be delivered that nobody had offered")
        version, self._version = self._version, None
        return await asyncio.to_thread(self._send, version)

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        return await asyncio.to_thread(self._scorer.score, token_lists)

    async def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """How far rounding may move each of these scores, in nats, float32 [L]; the first one is NaN."""
        return await asyncio.to_thread(self._scorer.rounding, token_lists)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, version: int) -> Delivered | None:
        recording = Recording(version)
        with self._busy:
            if self._transport is None:
                for _ in self._weights():
                    pass
                return None
            offer = self._transport.send(recording, recording.over(self._weights()))
        data = offer.details.get("data")
        return Delivered(recording.manifest(), offer, recording.bytes if data is None else data.nbytes)


class EngineSide:
    """An engine's part: takes versions into the module that the engine samples with.

    From the first byte of a version until `commit` the engine cannot be resumed.
    """

    def __init__(self, engine: Engine, receiver: Receiver, transport: TakingHalf) -> None:
        self._engine = engine
        self._receiver = receiver
        self._transport = transport
        self._unfinished: int | None = None
        self._busy = threading.Lock()

    async def pause(self) -> None:
        await self._engine.pause()

    async def take(self, offer: Offer) -> None:
        """Take everything of a version; the engine must be paused.

        Raises:
            RunFailure: see `TakingHalf.take`.
        """
        self._unfinished = offer.version
        await asyncio.to_thread(self._take, offer)

    async def verify(self, manifest: Manifest) -> list[Fault]:
        """What is wrong in the live module; where nothing is, the engine drops what it derived from older weights."""
        faults = await asyncio.to_thread(self._receiver.verify, manifest)
        if not faults:
            await self._engine.update_weights(WeightUpdate(manifest.version))
        return faults

    async def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """As `TrainerSide.score`, through the weights that sampling uses."""
        return await self._engine.score(token_lists)

    async def commit(self, version: int) -> None:
        """Raises RunFailure where the version was not verified."""
        self._receiver.commit(version)
        self._unfinished = None

    async def resume(self) -> None:
        """Sample on.

        Raises:
            RunFailure: a version was begun and not committed.
        """
        if self._unfinished is not None:
            raise RunFailure(
                f"the engine cannot go on: version {self._unfinished} of the weights was begun, and is not proved",
                mend="publish the weights anew",
            )
        await self._engine.resume()

    def close(self) -> None:
        self._transport.close()

    def _take(self, offer: Offer) -> None:
        with self._busy:
            self._transport.take(offer, self._receiver)
