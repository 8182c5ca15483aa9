"""Through a process group of torch.distributed (gloo or NCCL): one broadcast reaches all engines.

Before each bucket goes its description, in a tensor of fixed size; so the trainer can send any tensors, and engines
need to know nothing beforehand. While a bucket is on its way the next one is filled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.errors import RunFailure
from strop.publishing.buckets import Filled, Piece, fill, make_slots, unpack
from strop.publishing.manifest import Recording
from strop.publishing.receiver import Receiver
from strop.publishing.transports.protocol import Offer

HEADER = 1 << 16
_NAMES = HEADER - 256
ROOT = 0
_NO_VERSION = -1


def join_group(
    host: str, port: int, *, rank: int, size: int, backend: str, timeout: float, device: torch.device | str = "cpu"
) -> Any:
    """A process group of its own, beside whatever group the process has already. All `size` processes call it at once.

    Args:
        host, port: where rank 0 listens. rank: 0 is the trainer. backend: `gloo` or `nccl`.
        timeout: seconds that joining and each transfer may take.

    Raises:
        RunFailure: the others did not come.
    """
    limit = timedelta(seconds=timeout)
    try:
        listening = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, rank == ROOT, timeout=limit, wait_for_workers=False
        )
        store = dist.PrefixStore("publishing", listening)  # type: ignore[attr-defined]
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, timeout=limit)
        if backend != "nccl":
            raise ValueError(f"there is no backend {backend}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    except RuntimeError as error:
        raise RunFailure(
            f"process {rank} of {size} could not join the group that weights are published through: {error}",
            where=f"{host}:{port}",
            mend="look for what the processes that are missing printed; the address must be reachable from all nodes",
        ) from error


class BroadcastSender:
    """Sends to all other ranks of a group.

    Args:
        group: of `join_group`. bucket_bytes: bytes of each of the two buffers. device: that the group moves from.
    """

    def __init__(self, group: Any, *, bucket_bytes: int, device: torch.device | str = "cpu") -> None:
        self._group = group
        self._slots = make_slots(bucket_bytes, device)
        self._headers = make_slots(HEADER, device)
        self._works: list[list[Any]] = [[] for _ in self._slots]

    def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        if takers != self._group.size() - 1:
            raise RunFailure(f"{takers} engines are to get version {version}; the group has {self._group.size() - 1}")
        return Offer("broadcast", version, streams=True)

    def send(self, recording: Recording, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        version = recording.version
        failure: list[BaseException] = []

        def watched() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from tensors
            except BaseException as error:
                failure.append(error)
                raise

        try:
            for filled in fill(version, watched(), self._slots, self._free, names_bytes=_NAMES):
                self._start(filled)
            self._finish()
        except RuntimeError as error:
            if not failure:
                raise _lost(version, "an engine", error) from error
            raise
        finally:
            if failure:
                # Engines that wait for the next bucket must not wait in vain, and the group stays of use.
                self._start(Filled(_NO_VERSION, 0, (), 0, last=True))
                self._finish()
        return Offer("broadcast", version, streams=True)

    def close(self) -> None:
        _close(self._group)

    def _start(self, filled: Filled) -> None:
        """Put a bucket, after its description, on its way."""
        self._free(filled.slot)
        header = self._headers[filled.slot]
        header.copy_(_written(filled))
        parts = [header] + ([self._slots[filled.slot][: filled.used]] if filled.used else [])
        self._works[filled.slot] = [_broadcast(self._group, part) for part in parts]

    def _finish(self) -> None:
        for slot in range(len(self._slots)):
            self._free(slot)
        _synchronize(self._slots[0])

    def _free(self, slot: int) -> None:
        works, self._works[slot] = self._works[slot], []
        for work in works:
            work.wait()


class BroadcastTaker:
    """Takes what rank 0 of the group sends. Arguments as for `BroadcastSender`, with the same `bucket_bytes`."""

    def __init__(self, group: Any, *, bucket_bytes: int, device: torch.device | str = "cpu") -> None:
        self._group = group
        self._bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._header = torch.empty(HEADER, dtype=torch.uint8, device=device)

    def take(self, offer: Offer, receiver: Receiver) -> None:
        receiver.begin(offer.version)
        last = False
        while not last:
            try:
                _broadcast(self._group, self._header).wait()
                filled = _read(self._header)
                if filled.used:
                    _broadcast(self._group, self._bucket[: filled.used]).wait()
            except RuntimeError as error:
                raise _lost(offer.version, "the trainer", error) from error
            if filled.version == offer.version:
                unpack(filled, self._bucket, receiver)
            # Of another version: nothing of it is kept, and what is missing will be named.
            last = filled.last
        _synchronize(self._bucket)

    def close(self) -> None:
        _close(self._group)


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = ROOT
    options.asyncOp = True  # or NCCL would keep the next bucket from being filled meanwhile
    return group.broadcast([tensor], options)


def _written(filled: Filled) -> Tensor:
    """uint8 [HEADER]; zeros, of which JSON has none, fill it up."""
    text = json.dumps([filled.version, filled.slot, filled.pieces, filled.used, filled.last]).encode()
    return torch.frombuffer(bytearray(text.ljust(HEADER, b"\0")), dtype=torch.uint8)


def _read(header: Tensor) -> Filled:
    version, slot, pieces, used, last = json.loads(header.cpu().numpy().tobytes().split(b"\0", 1)[0])
    return Filled(version, slot, tuple(Piece(p[0], p[1], tuple(p[2]), *p[3:]) for p in pieces), used, last)


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _lost(version: int, who: str, error: Exception) -> RunFailure:
    return RunFailure(
        f"{who} was lost while version {version} of the weights was broadcast: {str(error).splitlines()[0]}",
        mend="look for what the lost process printed; the run can go on from its last checkpoint",
    )


def _close(group: Any) -> None:
    # Not `shutdown`: with NCCL it waits for the other side, which may be gone or close later.
    for way in ("abort", "shutdown"):
        if hasattr(group, way):
            getattr(group, way)()
            return
