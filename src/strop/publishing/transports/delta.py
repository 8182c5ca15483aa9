"""Only what changed since the last version, compressed; for slow networks, and for updates that change few bits.

The trainer keeps a copy of what it last published, in the memory of the CPU. The bytes are in the offer itself (a numpy
array), so the caller's own channel carries them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.errors import RunFailure
from strop.publishing import deltas
from strop.publishing.manifest import Recording, dtype_name, dtype_named
from strop.publishing.receiver import Receiver
from strop.publishing.transports.protocol import Offer


class DeltaSender:
    """Compares each tensor with the copy of the version before."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._base: int | None = None

    def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        if whole:
            self._copies, self._base = {}, None
        return Offer("delta", version, streams=False, details={"base": self._base})

    def send(self, recording: Recording, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        version, base = recording.version, self._base
        # Until all is encoded, the copies are of two versions, and no delta may be made from them.
        self._base = None
        described, bodies = [], list[bytes]()
        for name, tensor in tensors:
            held = self._copies.get(name) if base is not None else None
            now = deltas.as_integers(tensor.cpu())
            if held is not None and (held.shape != now.shape or held.dtype != now.dtype):
                held = None
            form, parts = deltas.encode(now, held)
            described.append({"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), **form})
            bodies += parts
            if held is None:
                self._copies[name] = now.clone()
            else:
                held.copy_(now)
        self._base = version
        head = zlib.compress(json.dumps(described).encode())
        data = np.frombuffer(b"".join([len(head).to_bytes(8, "little"), head, *bodies]), dtype=np.uint8)
        return Offer("delta", version, streams=False, details={"base": base, "data": data})

    def close(self) -> None:
        self._copies, self._base = {}, None


class DeltaTaker:
    """Applies deltas to what the engine holds.

    Where the engine's number format is another than the trainer's, a copy of what was sent is kept on the CPU: the
    engine's own values are rounded, and no base for a delta.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, offer: Offer, receiver: Receiver) -> None:
        base = offer.details["base"]
        if base is not None and receiver.version != base:
            held = "no whole version" if receiver.version is None else f"version {receiver.version}"
            raise RunFailure(
                f"version {offer.version} of the weights was sent as what changed since version {base}, "
                f"and the engine holds {held}",
                mend="publish the version whole",
            )
        receiver.begin(offer.version)
        data = offer.details["data"]
        at = 8 + int.from_bytes(data[:8].tobytes(), "little")
        described = json.loads(zlib.decompress(data[8:at].tobytes()))
        for form in described:
            parts = []
            for size in form["sizes"]:
                parts.append(data[at : at + size].tobytes())
                at += size
            self._write(form, parts, receiver)

    def close(self) -> None:
        self._copies = {}

    def _write(self, form: dict[str, Any], parts: list[bytes], receiver: Receiver) -> None:
        name, dtype = form["name"], dtype_named(form["dtype"])
        shape = tuple(form["shape"])
        live = receiver.live(name)
        with torch.no_grad():
            if live is not None and live.dtype == dtype and tuple(live.shape) == shape and live.is_contiguous():
                deltas.apply(form, parts, deltas.as_integers(live))
                receiver.patched(name)
                return
            if form["kind"] == "whole":
                self._copies[name] = torch.empty(shape, dtype=dtype)
            if name in self._copies:
                deltas.apply(form, parts, deltas.as_integers(self._copies[name]))
                receiver.put(name, self._copies[name])
