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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 16
# Rows that are multiplied at once where the tensors are not on a CPU.
_ROWS_ELSEWHERE = 256
# Bytes of tensors that are put together there, at most: with products of twice that size they take 120 MiB.
_TOGETHER = 40 << 20
# Kinds of devices that sum tensors one by one.
_ALONE = ("cpu",)
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Summed:
    """Checksums on their way: the sums of rows, still on the tensors' devices.

    groups: places of tensors of one form among all, and the sums, int64 [those tensors, rows of each]. forms: of all.
    """

    groups: tuple[tuple[list[int], Tensor], ...]
    forms: tuple[str, ...]


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on the bytes and their order, on dtype and shape, and on nothing else.

    Memory beside the tensor: 0.5 MiB on a CPU, 128 MiB elsewhere; a copy if it is not contiguous. One transfer from the
    device.
    """
    return checksums([tensor])[0]


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """The checksum of each; a GPU is waited for once, not for each of them. Memory: as for one."""
    return finished([summed(list(tensors))])


def finished(parts: Iterable[Summed]) -> list[int]:
    """The checksums of the tensors of all parts in turn, with one transfer from each device."""
    forms = list[str]()
    sums: dict[torch.device, list[Tensor]] = {}
    places: dict[torch.device, list[int]] = {}
    counts: dict[torch.device, list[int]] = {}
    for part in parts:
        for chosen, rows in part.groups:
            sums.setdefault(rows.device, []).append(rows.reshape(-1))
            places.setdefault(rows.device, []).extend(len(forms) + at for at in chosen)
            counts.setdefault(rows.device, []).extend([rows.shape[1]] * len(chosen))
        forms += part.forms
    found = [0] * len(forms)
    for device, some in sums.items():
        together = torch.cat(some).cpu().numpy().view(np.uint64)
        for at, total in zip(places[device], _totals(together, counts[device]), strict=True):
            found[at] = int(total) ^ _of_form(forms[at])
    return found


def summed(tensors: Sequence[Tensor]) -> Summed:
    """The part of checksums that is computed where the tensors are, without waiting for it."""
    return _summed(tensors, alone=_ALONE)


def ahead(
    tensors: Iterable[tuple[str, Tensor]],
    most: int,
    write_down: Callable[[Sequence[tuple[str, Tensor]]], None],
    *,
    alone: Collection[str] = _ALONE,
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; first `write_down` gets them, in the batches in which summing them costs few calls: on a CPU
    each alone, else as many as take `most` bytes. alone: kinds of devices of whose tensors each is a batch.

    A batch is written down before any of it is handed on, so that what is summed is what came, whatever is done with
    it afterwards. So whoever makes the tensors may not use the memory of one for the next. Where it is allocated for
    them, up to `most` bytes are in use beside the last one; each is let go of when it was handed on.
    """
    batch = list[tuple[str, Tensor]]()
    size = 0

    def written() -> Iterator[tuple[str, Tensor]]:
        write_down(batch)
        batch.reverse()
        while batch:
            yield batch.pop()

    for name, tensor in tensors:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= most or tensor.device.type in alone:
            yield from written()
            size = 0
    if batch:
        yield from written()


def _summed(tensors: Sequence[Tensor], *, alone: Collection[str]) -> Summed:
    """alone: kinds of devices whose tensors are summed one by one."""
    groups = list[tuple[list[int], Tensor]]()
    with torch.no_grad():
        for places in _groups(tensors, alone):
            words = _words([tensors[at] for at in places])
            groups.append((places, _row_sums(words, _sums_here if words.device.type in alone else _sums_of_many)))
    return Summed(tuple(groups), tuple(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors))


def _groups(tensors: Sequence[Tensor], alone: Collection[str]) -> Iterator[list[int]]:
    """Places of tensors that are put together: of one device, dtype and shape, within the bound."""
    alike: dict[Any, list[int]] = {}
    for at, tensor in enumerate(tensors):
        key = at if tensor.device.type in alone else (tensor.device, tensor.dtype, tensor.shape)
        alike.setdefault(key, []).append(at)
    for places in alike.values():
        count = max(1, _TOGETHER // max(1, tensors[places[0]].nbytes))
        yield from (places[at : at + count] for at in range(0, len(places), count))


def _words(tensors: Sequence[Tensor]) -> Tensor:
    """int32 [tensors, words of each], filled up with zeros; tensors: of one device, dtype and shape. No copy of a
    single one where it can be read as it lies."""
    count, size = len(tensors), tensors[0].nbytes
    together = tensors[0].contiguous() if count == 1 else torch.stack(tuple(tensors))
    data = together.reshape(-1).view(torch.uint8)
    if size % 4 or data.storage_offset() % 4:
        padded = torch.zeros((count, (size + 3) // 4 * 4), dtype=torch.uint8, device=data.device)
        padded[:, :size].copy_(data.view(count, size))
        data = padded.view(-1)
    return data.view(torch.int32).view(count, (size + 3) // 4)


def _totals(sums: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """uint64 [parts]; sums: uint64, those of the rows of each part, one part after the other; counts: rows of each."""
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    with np.errstate(over="ignore"):
        number = (np.arange(len(sums)) - np.repeat(starts, counts) + 1).astype(np.uint64)
        so_far = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(sums + number * _STEP), dtype=np.uint64)])
        total: np.ndarray = so_far[ends] - so_far[starts]
    return total


@lru_cache(maxsize=4096)
def _of_form(form: str) -> int:
    return int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), "little")


def _row_sums(words: Tensor, sums_of: Callable[[Tensor, Tensor], Iterator[Tensor]]) -> Tensor:
    """int64 [tensors, rows]; words: int32 [tensors, words], the last row may be short. sums_of: whole rows."""
    multipliers = _multipliers(words.device)
    whole, rest = divmod(words.shape[1], ROW)
    sums = list[Tensor]()
    if whole:
        rows = words[:, : whole * ROW].view(len(words), whole, ROW)
        sums += sums_of(rows, multipliers)
    if rest:
        sums.append((words[:, whole * ROW :] * multipliers[:rest]).sum(1, keepdim=True))
    if len(sums) == 1:
        return sums[0]
    return torch.cat(sums, 1) if sums else words.to(torch.int64)


def _sums_here(rows: Tensor, multipliers: Tensor) -> Iterator[Tensor]:
    """int64 [tensors, rows], of int32 [tensors, rows, ROW]. On a CPU, one row after the other: its products take half a
    megabyte, which a core's own cache holds."""
    sums = torch.empty(rows.shape[:2], dtype=torch.int64)
    products = torch.empty(ROW, dtype=torch.int64)
    for tensor, found in zip(rows, sums, strict=True):
        for at, row in enumerate(tensor):
            torch.mul(row, multipliers, out=products)
            found[at] = products.sum()
    yield sums


def _sums_of_many(rows: Tensor, multipliers: Tensor) -> Iterator[Tensor]:
    """Elsewhere as few calls as may be: what they cost is far more than the reading. int64 [tensors, some rows]."""
    for some in rows.split(_ROWS_ELSEWHERE, 1):
        yield (some * multipliers).sum(2)


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
