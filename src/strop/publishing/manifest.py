"""What a version of the weights is made of, tensor by tensor, and how a fault in it is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from strop.publishing.checksums import Summed, ahead, finished, summed

# Names that a message has room for.
NAMED = 5
# Bytes of tensors that are summed in one go on their way into a transport, where they are not on a CPU.
_BATCH = 256 << 20

FaultKind = Literal["missing", "corrupted", "old", "swapped", "unpublished", "unknown", "shape"]


@dataclass(frozen=True)
class Entry:
    """One tensor as the trainer sent it. dtype: without `torch.`. checksum: 64 bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """All tensors of a version, in the order in which they were sent. bytes: of all of them."""

    version: int
    entries: tuple[Entry, ...]
    bytes: int = 0
    checksum_seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises KeyError, TypeError or ValueError where the text is no manifest."""
        raw: dict[str, Any] = json.loads(text)
        entries = [Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw.pop("entries")]
        return cls(**raw, entries=tuple(entries))


@dataclass(frozen=True)
class Fault:
    """One tensor of an engine that is not what the trainer sent."""

    name: str
    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})"


def told(faults: Sequence[Fault]) -> str:
    """Up to five faults by name, and how many there are."""
    names = "; ".join(map(str, faults[:NAMED]))
    return names if len(faults) <= NAMED else f"{names}; and {len(faults) - NAMED} more"


@dataclass
class Recording:
    """A manifest while it is made: tensors pass through `over` on their way into a transport."""

    version: int
    forms: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    parts: list[Summed] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    def over(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors; each is written down before it is handed on. Those of a GPU are read `ahead`."""
        return ahead(tensors, _BATCH, self._write_down)

    def manifest(self) -> Manifest:
        started = time.perf_counter()
        entries = [Entry(*form, sums) for form, sums in zip(self.forms, finished(self.parts), strict=True)]
        self.seconds += time.perf_counter() - started
        return Manifest(self.version, tuple(entries), self.bytes, self.seconds)

    def _write_down(self, batch: Sequence[tuple[str, Tensor]]) -> None:
        started = time.perf_counter()
        self.forms += [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in batch]
        # What is read off a GPU here would make the transport wait for it.
        self.parts.append(summed([tensor for _, tensor in batch]))
        self.seconds += time.perf_counter() - started
        self.bytes += sum(tensor.nbytes for _, tensor in batch)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Raises ValueError where torch has no such number format."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no number format of torch")
    return dtype
