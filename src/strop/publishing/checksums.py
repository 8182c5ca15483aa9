"""A checksum of a tensor that comes out the same on every device.

The bytes are read as 32-bit words w, in rows of 65,536. A row's sum is S = sum of w[j] m[j] modulo 2^64, with one fixed
64-bit multiplier for each place; the sums are then mixed with the number of their row (the finalizer of SplitMix64,
Steele et al. 2014) and added up; number format and shape come in at the end. Multiplication and addition of integers
wrap in the same way on every device, in any order, so a GPU needs no hash function of its own.

What it certainly notices, within one row: any change of one word, because multipliers are odd; any exchange of two
unequal words, because words are 32 bits and two multipliers differ by at most 2^17 times an odd number, so the product
of both differences is no multiple of 2^64. Anything else goes unnoticed with a chance of about 2^-64. It is made
against faults, not against somebody who wants to be unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 16
# Rows that are multiplied at once where the tensors are not on a CPU.
_ROWS_ELSEWHERE = 256
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Summed:
    """A checksum on its way: the sums of its rows, int64 [some rows] each, are still on the tensor's device."""

    rows: tuple[Tensor, ...]
    form: str
    device: torch.device


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on the bytes and their order, on dtype and shape, and on nothing else.

    Memory beside the tensor: 0.5 MiB on a CPU, 128 MiB elsewhere; a copy if it is not contiguous. One transfer from the
    device.
    """
    return finished([summed(tensor)])[0]


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """The checksum of each; a GPU is waited for once, not for each of them."""
    return finished([summed(tensor) for tensor in tensors])


def finished(parts: Sequence[Summed]) -> list[int]:
    """The checksums, with one transfer from each device."""
    found = [0] * len(parts)
    for device in {part.device for part in parts}:
        chosen = [at for at, part in enumerate(parts) if part.device == device]
        sums = [rows for at in chosen for rows in parts[at].rows]
        together = torch.cat(sums).cpu().numpy().view(np.uint64) if sums else np.zeros(0, np.uint64)
        counts = [sum(len(rows) for rows in parts[at].rows) for at in chosen]
        for at, total in zip(chosen, _totals(together, counts), strict=True):
            found[at] = int(total) ^ _of_form(parts[at].form)
    return found


def summed(tensor: Tensor) -> Summed:
    """The part of a checksum that is computed where the tensor is, without waiting for it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        padded = torch.zeros((data.numel() + 3) // 4 * 4, dtype=torch.uint8, device=data.device)
        padded[: data.numel()].copy_(data)
        data = padded
    return Summed(tuple(_row_sums(data.view(torch.int32))), f"{tensor.dtype}{list(tensor.shape)}", tensor.device)


def _totals(sums: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """uint64 [parts]; sums: uint64, those of the rows of each part, one part after the other; counts: rows of each."""
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    with np.errstate(over="ignore"):
        number = (np.arange(len(sums)) - np.repeat(starts, counts) + 1).astype(np.uint64)
        so_far = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(sums + number * _STEP), dtype=np.uint64)])
        total: np.ndarray = so_far[ends] - so_far[starts]
    return total


def _of_form(form: str) -> int:
    return int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), "little")


def _row_sums(words: Tensor) -> Iterator[Tensor]:
    """int64 [some rows] each; words: int32 [n], the last row may be short."""
    multipliers = _multipliers(words.device)
    whole = len(words) // ROW
    if whole:
        rows = words[: whole * ROW].view(whole, ROW)
        yield from _sums_here(rows, multipliers) if words.device.type == "cpu" else _sums_of_many(rows, multipliers)
    if whole * ROW < len(words):
        rest = words[whole * ROW :]
        yield (rest * multipliers[: len(rest)]).sum(0, keepdim=True)


def _sums_here(rows: Tensor, multipliers: Tensor) -> Iterator[Tensor]:
    """On a CPU, one row after the other: its products take half a megabyte, which a core's own cache holds."""
    sums = torch.empty(len(rows), dtype=torch.int64)
    products = torch.empty(ROW, dtype=torch.int64)
    for at, row in enumerate(rows):
        torch.mul(row, multipliers, out=products)
        sums[at] = products.sum()
    yield sums


def _sums_of_many(rows: Tensor, multipliers: Tensor) -> Iterator[Tensor]:
    """Elsewhere as few calls as may be: what they cost is far more than the reading."""
    for some in rows.split(_ROWS_ELSEWHERE):
        yield (some * multipliers).sum(1)


@lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """int64 [ROW], all odd: the lower halves are 1, 3, 5, ..., so that any two are different; the upper ones random."""
    places = np.arange(ROW, dtype=np.uint64)
    with np.errstate(over="ignore"):
        upper = _mixed((places + np.uint64(1)) * _STEP) & np.uint64(0xFFFFFFFF00000000)
    values = upper | (np.uint64(2) * places + np.uint64(1))
    return torch.from_numpy(values.view(np.int64)).to(device)


def _mixed(x: np.ndarray) -> np.ndarray:
    """One to one on 64 bits; each bit of the input moves about half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
