"""What a transport is: a sending half beside the trainer and a taking half beside each engine.

Bytes go through the transport. What goes through the caller's own channel (a method call of an actor, a pipe) is one
small `Offer` for each publication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from strop.publishing.manifest import Recording
from strop.publishing.receiver import Receiver


@dataclass(frozen=True)
class Offer:
    """How to get the bytes of a version; picklable.

    streams: sending and taking run at the same time; otherwise everything is sent first, and the offer that `send`
    returns is the one to take. details: what only the transport understands.
    """

    transport: str
    version: int
    streams: bool
    details: dict[str, Any] = field(default_factory=dict)


class SendingHalf(Protocol):
    """The trainer's half. One thread at a time."""

    def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        """Announce a version to so many engines; returns at once. whole: some engine lacks the version before."""
        ...

    def send(self, recording: Recording, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        """Send all tensors of the version offered last; blocks until they are on their way or taken.

        Raises:
            RunFailure: an engine was lost, or did not come.
        """
        ...

    def close(self) -> None: ...


class TakingHalf(Protocol):
    """An engine's half. One thread at a time."""

    def take(self, offer: Offer, receiver: Receiver) -> None:
        """`begin` a version in the receiver and give it everything that is delivered; blocks until it is all there.

        Raises:
            RunFailure: the trainer was lost, or the offer is not for what the engine holds.
        """
        ...

    def close(self) -> None: ...
