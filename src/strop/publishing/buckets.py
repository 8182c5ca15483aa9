"""Tensors laid into flat buffers of one size, which are allocated once and filled in turn.

A model has hundreds of tensors of very different sizes. Moved one by one the small ones cost a start each, and the
large ones need memory of their own; in buckets of one size neither is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from strop.publishing.manifest import dtype_name
from strop.publishing.receiver import Receiver

# So that a piece can be viewed in any number format; also what GPUs copy at best speed.
ALIGNED = 128
SLOTS = 2


class Piece(NamedTuple):
    """Bytes `start` to `start + length` of a tensor, at `offset` of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Filled:
    """What is in the bucket of a slot. used: bytes. last: no bucket of this version comes after it."""

    version: int
    slot: int
    pieces: tuple[Piece, ...]
    used: int
    last: bool


def make_slots(bucket_bytes: int, device: torch.device | str = "cpu") -> list[Tensor]:
    """Two buffers: one is filled while the other is on its way."""
    return [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]


def fill(
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    slots: Sequence[Tensor],
    free: Callable[[int], None],
    *,
    names_bytes: int | None = None,
) -> Iterator[Filled]:
    """Lay tensors into the slots in turn; each bucket is yielded when it is full, and the last one at the end.

    A tensor that is larger than what is left of a bucket goes on in the next.

    Args:
        free: called before a slot is written again; returns when nobody needs what is in it.
        names_bytes: most bytes that the description of a bucket may take, by `described`.
    """
    slot, pieces, used, words = 0, list[Piece](), 0, 0
    size = len(slots[0])
    taken = False
    for name, tensor in tensors:
        # The copy into the bucket converts layout and device, never values.
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        cost = described(name, shape)
        if names_bytes is not None and cost > names_bytes:
            raise ValueError(f"the name of the tensor {name[:100]} is too long to be published")
        start = 0
        while True:
            full = used >= size or (names_bytes is not None and words + cost > names_bytes)
            if full:
                yield Filled(version, slot, tuple(pieces), used, last=False)
                slot, pieces, used, words, taken = (slot + 1) % len(slots), [], 0, 0, False
            if not taken:
                free(slot)
                taken = True
            count = min(len(data) - start, size - used)
            slots[slot][used : used + count].copy_(data if count == len(data) else data[start : start + count])
            pieces.append(Piece(name, dtype, shape, start, count, used))
            start, used, words = start + count, -(-(used + count) // ALIGNED) * ALIGNED, words + cost
            if start >= len(data):
                break
    yield Filled(version, slot, tuple(pieces), min(used, size), last=True)


def unpack(filled: Filled, data: Tensor, receiver: Receiver) -> None:
    """Hand the pieces of a bucket to the receiver; data: uint8, the bucket's bytes."""
    for piece in filled.pieces:
        span = data[piece.offset : piece.offset + piece.length]
        receiver.piece(piece.name, piece.dtype, piece.shape, piece.start, span)


def described(name: str, shape: tuple[int, ...]) -> int:
    """Bytes that a piece takes in JSON at most: escaped name, and numbers of up to 20 digits."""
    return 6 * len(name) + 22 * len(shape) + 120
