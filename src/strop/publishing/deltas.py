"""What changed between two copies of a tensor, bit by bit, in few bytes.

Values are compared and combined as whole numbers: old XOR new is nothing where nothing changed, and begins with zeros
where little did. After a step of reinforcement learning most weights in bfloat16 are bit for bit what they were.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A part that does not shrink by a tenth in a sample is not compressed: it would cost seconds and save nothing.
_SAMPLE = 1 << 16
_WORTH = 0.9
_LEVEL = 1


def as_integers(tensor: Tensor) -> Tensor:
    """Flat view of the bits as integers of the same width; of a copy where the tensor is not contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_WHOLE[min(tensor.element_size(), 8)])


def encode(new: Tensor, old: Tensor | None) -> tuple[dict[str, Any], list[bytes]]:
    """How to get from old to new: a description (JSON) and the parts that belong to it, in order.

    Args:
        new, old: integers [n] on the CPU, of `as_integers`. Without an old one everything is sent.
    """
    now = _unsigned(new)
    if old is None:
        return _packed({"kind": "whole"}, _planes(now))
    before = _unsigned(old)
    places = np.flatnonzero(now != before)
    if 2 * len(places) > len(now):
        return _packed({"kind": "dense"}, _planes(now ^ before))
    steps = np.diff(places, prepend=0)
    narrow = steps.astype(np.min_scalar_type(int(steps.max()) if len(steps) else 0))
    form = {"kind": "sparse", "count": len(places), "steps": narrow.dtype.str}
    return _packed(form, [narrow.tobytes(), *_planes(now[places] ^ before[places])])


def apply(form: dict[str, Any], parts: list[bytes], onto: Tensor) -> None:
    """Bring a tensor to the new values in place; onto: integers [n] of `as_integers`, on any device."""
    plain = [zlib.decompress(part) if small else part for part, small in zip(parts, form["small"], strict=True)]
    width = onto.element_size()
    if form["kind"] == "sparse":
        steps = np.frombuffer(plain.pop(0), dtype=form["steps"])
        places = torch.from_numpy(np.cumsum(steps, dtype=np.int64)).to(onto.device)
        values = _joined(plain, width, form["count"]).to(onto.device)
        onto[places] = onto[places] ^ values
    elif form["kind"] == "dense":
        onto ^= _joined(plain, width, len(onto)).to(onto.device)
    else:
        onto.copy_(_joined(plain, width, len(onto)))


def _planes(values: np.ndarray) -> list[bytes]:
    """The first bytes of all values, then the second ones, and so on: each kind is like its neighbours."""
    columns = values.view(np.uint8).reshape(len(values), values.itemsize)
    return [np.ascontiguousarray(columns[:, at]).tobytes() for at in range(values.itemsize)]


def _joined(planes: list[bytes], width: int, count: int) -> Tensor:
    """Integers [count] of so many bytes."""
    columns = np.empty((count, width), dtype=np.uint8)
    for at, plane in enumerate(planes):
        columns[:, at] = np.frombuffer(plane, dtype=np.uint8)
    return torch.from_numpy(columns.reshape(-1).view(f"i{width}"))


def _packed(form: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    small = []
    for at, part in enumerate(parts):
        sample = part[:_SAMPLE]
        small.append(len(sample) > 0 and len(zlib.compress(sample, _LEVEL)) < _WORTH * len(sample))
        if small[-1]:
            parts[at] = zlib.compress(part, _LEVEL)
    return {**form, "small": small, "sizes": [len(part) for part in parts]}, parts


def _unsigned(integers: Tensor) -> np.ndarray:
    array = integers.numpy()
    return array.view(f"u{array.itemsize}")
