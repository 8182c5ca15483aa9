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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 16
# Rows that are multiplied at once; a row's products take half a megabyte, which a core's own cache holds.
_ROWS = {"cpu": 1}
_ROWS_ELSEWHERE = 256
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Summed:
    """A checksum on its way: the sums of its rows, int64 [rows], are still on the tensor's device."""

    rows: Tensor
    form: str


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
    found: list[np.ndarray] = [np.zeros(0)] * len(parts)
    for device in {part.rows.device for part in parts}:
        chosen = [at for at, part in enumerate(parts) if part.rows.device == device]
        together = torch.cat([parts[at].rows for at in chosen]).cpu().numpy().view(np.uint64)
        edges = np.cumsum([len(parts[at].rows) for at in chosen])[:-1]
        for at, sums in zip(chosen, np.split(together, edges), strict=True):
            found[at] = sums
    return [_total(sums, part.form) for sums, part in zip(found, parts, strict=True)]


def summed(tensor: Tensor) -> Summed:
    """The part of a checksum that is computed where the tensor is, without waiting for it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        padded = torch.zeros((data.numel() + 3) // 4 * 4, dtype=torch.uint8, device=data.device)
        padded[: data.numel()].copy_(data)
        data = padded
    return Summed(_row_sums(data.view(torch.int32)), f"{tensor.dtype}{list(tensor.shape)}")


def _total(sums: np.ndarray, form: str) -> int:
    with np.errstate(over="ignore"):
        numbered = sums + np.arange(1, len(sums) + 1, dtype=np.uint64) * _STEP
        total = int(_mixed(numbered).sum(dtype=np.uint64))
    return total ^ int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), "little")


def _row_sums(words: Tensor) -> Tensor:
    """int64 [rows]; words: int32 [n], the last row may be short."""
    multipliers = _multipliers(words.device)
    whole = len(words) // ROW
    sums = torch.empty(-(-len(words) // ROW), dtype=torch.int64, device=words.device)
    if whole:
        rows = words[: whole * ROW].view(whole, ROW)
        step = min(whole, _ROWS.get(words.device.type, _ROWS_ELSEWHERE))
        products = torch.empty(step, ROW, dtype=torch.int64, device=words.device)
        for start in range(0, whole, step):
            count = min(step, whole - start)
            torch.mul(rows[start : start + count], multipliers, out=products[:count])
            sums[start : start + count] = products[:count].sum(1)
    if whole < len(sums):
        rest = words[whole * ROW :]
        sums[whole] = (rest * multipliers[: len(rest)]).sum()
    return sums


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
