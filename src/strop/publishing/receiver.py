"""The engine's end of a publication: pieces go into the live module, and the whole is compared with the manifest.

A version is served only after `begin`, the delivery, `verify` without a fault, and `commit`, in this order. From
`begin` until `commit` the module may hold parts of two versions; `version` is None then, and nobody may sample with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from strop.errors import RunFailure
from strop.publishing.checksums import Summed, checksums, finished, summed
from strop.publishing.manifest import Entry, Fault, Manifest, dtype_name, dtype_named


class Receiver:
    """Writes what is delivered into tensors in place, and finds those that are not what was sent.

    Args:
        into: the module's own parameters by the names that the trainer gives them; all are expected in every version.
    """

    def __init__(self, into: Mapping[str, Tensor]) -> None:
        self._into = into
        self.version: int | None = None
        self._taking: int | None = None
        self._proved: int | None = None
        # Checksums of the last version that was proved, as they were sent, to recognise what is old.
        self._last: dict[str, int] = {}
        self._last_version: int | None = None
        self._start()

    def _start(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._begun: set[str] = set()
        self._odd: dict[str, Fault] = {}
        # Tensors whose number format is another than the engine's: being put together; as they came, and converted.
        self._parts: dict[str, Tensor] = {}
        self._converted: dict[str, Summed] = {}

    def begin(self, version: int) -> None:
        """From now on nothing is served, until `commit`."""
        self.version = self._proved = None
        self._taking = version
        self._start()

    def live(self, name: str) -> Tensor | None:
        """The live tensor of a name."""
        # Taken anew each time: a module that is moved between devices gives its parameters other memory.
        tensor = self._into.get(name)
        return None if tensor is None else tensor.detach()

    def piece(self, name: str, dtype: str, shape: tuple[int, ...], start: int, payload: Tensor) -> None:
        """Bytes `start` and following of a tensor; payload: uint8 [n], on any device, not kept."""
        if not self._expects(name, shape):
            return
        live, sent = self._into[name].detach(), dtype_named(dtype)
        self._begun.add(name)
        self._bytes[name] += len(payload)
        if sent == live.dtype and live.is_contiguous():
            _write(_bytes_of(live), start, payload)
            return
        total = math.prod(shape) * sent.itemsize
        if name not in self._parts:
            self._parts[name] = torch.empty(total, dtype=torch.uint8, device=live.device)
        _write(self._parts[name], start, payload)
        if self._bytes[name] >= total:
            self._convert(name, self._parts.pop(name).view(sent).view(shape))

    def put(self, name: str, tensor: Tensor) -> None:
        """A whole tensor, on any device, not kept."""
        if not self._expects(name, tuple(tensor.shape)):
            return
        live = self._into[name].detach()
        self._begun.add(name)
        self._bytes[name] += tensor.nbytes
        with torch.no_grad():
            if tensor.dtype == live.dtype:
                live.copy_(tensor)
            else:
                self._convert(name, tensor)

    def patched(self, name: str) -> None:
        """A tensor was brought to the new version where it lies."""
        self._begun.add(name)
        self._bytes[name] += self._into[name].nbytes

    def verify(self, manifest: Manifest) -> list[Fault]:
        """Compare what the live module now holds with what was sent; empty when every bit is as it should be.

        A tensor of another number format is compared twice: what arrived with what was sent, and what is held with what
        arrived, converted.

        Raises:
            RunFailure: another version was taken than the manifest is of.
        """
        if self._taking != manifest.version:
            raise RunFailure(f"a manifest of version {manifest.version} came to an engine that took {self._taking}")
        owners = {entry.checksum: entry.name for entry in manifest.entries}
        held = {entry.name: live for entry in manifest.entries if (live := self._into.get(entry.name)) is not None}
        sums = dict(zip(held, checksums(held.values()), strict=True))
        both = finished(self._converted.values())
        converted = dict(zip(self._converted, zip(both[::2], both[1::2], strict=True), strict=True))
        faults = [
            fault for entry in manifest.entries if (fault := self._fault(entry, owners, sums, converted)) is not None
        ]
        named = {entry.name for entry in manifest.entries}
        faults += [Fault(name, "unpublished", "was not published") for name in self._into if name not in named]
        faults += [fault for name, fault in self._odd.items() if name not in named]
        if not faults:
            self._proved = manifest.version
            self._last = {entry.name: entry.checksum for entry in manifest.entries}
            self._last_version = manifest.version
        return faults

    def commit(self, version: int) -> None:
        """Serve the version.

        Raises:
            RunFailure: it is not proved that this version is held.
        """
        if self._proved != version:
            raise RunFailure(f"version {version} cannot be served: {_held(self._proved)} was proved to be held")
        self.version = version
        self._taking = None

    def _fault(
        self,
        entry: Entry,
        owners: Mapping[int, str],
        sums: Mapping[str, int],
        converted: Mapping[str, tuple[int, int]],
    ) -> Fault | None:
        """owners: names by what was sent. sums: what is held. converted: what came, and what was made of it."""
        name = entry.name
        if name in self._odd:
            return self._odd[name]
        live = self.live(name)
        if live is None:
            return Fault(name, "unknown", "the engine has no such tensor")
        if name not in self._begun:
            return Fault(name, "missing", "was not delivered")
        total = math.prod(entry.shape) * dtype_named(entry.dtype).itemsize
        if self._bytes[name] < total:
            return Fault(name, "missing", f"{self._bytes[name]} of {total} bytes were delivered")
        if name in converted:
            found, made = converted[name]
            if found == entry.checksum and sums[name] != made:
                return Fault(name, "corrupted", f"was changed after it was converted to {dtype_name(live.dtype)}")
        else:
            found = sums[name]
        if found == entry.checksum:
            return None
        if found in owners:
            return Fault(name, "swapped", f"holds the values of {owners[found]}")
        if found == self._last.get(name):
            return Fault(name, "old", f"holds the values of version {self._last_version}")
        return Fault(name, "corrupted", "holds other values than were sent")

    def _expects(self, name: str, shape: tuple[int, ...]) -> bool:
        live = self._into.get(name)
        if live is None:
            self._odd[name] = Fault(name, "unknown", "the engine has no such tensor")
        elif tuple(live.shape) != tuple(shape):
            self._odd[name] = Fault(name, "shape", f"{list(shape)} was sent, the engine's is {list(live.shape)}")
        return name not in self._odd

    def _convert(self, name: str, tensor: Tensor) -> None:
        live = self._into[name].detach()
        converted = tensor.to(live.device, live.dtype)
        # A GPU is not waited for here: that would be twice for each tensor.
        self._converted[name] = summed([tensor, converted])
        live.copy_(converted)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _write(into: Tensor, start: int, payload: Tensor) -> None:
    """Both of bytes. Most tensors come in one piece, and every call counts that is made for each of them."""
    whole = start == 0 and len(payload) == len(into)
    (into if whole else into[start : start + len(payload)]).copy_(payload)


def _held(version: int | None) -> str:
    return "nothing" if version is None else f"version {version}"
