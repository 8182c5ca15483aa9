"""Memory that two processes of one machine share: of the machine on a CPU, of the GPU where the trainer's buffers are.

Two buckets are allocated once, and lent to every engine. Who may touch which one is said over a local socket, which
also shows at once when the other side has died. The memory has no name: it is a descriptor (a CUDA handle on a GPU)
that goes through that socket. So there is nothing in /dev/shm that somebody would have to remove, and the kernel takes
the memory back with the last process that holds it, however that ended.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch
from torch import Tensor

from strop.errors import RunFailure
from strop.publishing.buckets import SLOTS, Filled, fill, make_slots, unpack
from strop.publishing.manifest import Recording
from strop.publishing.receiver import Receiver
from strop.publishing.transports.protocol import Offer

# The other side is gone: it closed the socket, or was killed.
_GONE = (EOFError, ConnectionError, BrokenPipeError)


class IpcSender:
    """Lends two buckets to the engines of its machine.

    Args:
        bucket_bytes: of each. device: where the trainer's tensors are. timeout: seconds to wait for an engine.
    """

    def __init__(self, *, bucket_bytes: int, device: torch.device | str = "cpu", timeout: float = 600.0) -> None:
        self._timeout = timeout
        self._device = torch.device(device)
        self._memory: int | None = None
        if self._device.type == "cuda":
            self._slots = make_slots(bucket_bytes, self._device)
        else:
            self._memory = _nameless(bucket_bytes * SLOTS)
            self._slots = _mapped(self._memory, bucket_bytes)
        self._key = secrets.token_bytes(32)
        # On Linux an address that begins with a zero byte is in no folder: nothing is left behind there either.
        address = f"\0strop-{os.getpid()}-{secrets.token_hex(8)}" if sys.platform == "linux" else None
        self._listener = Listener(address, family="AF_UNIX", backlog=64, authkey=self._key)
        self._fresh: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._engines: list[Connection] = []
        self._takers, self._offered = 0, 0
        self._closed = False
        threading.Thread(target=self._accept, name="strop-ipc", daemon=True).start()

    def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        self._takers, self._offered = takers, version
        return self._offer(version)

    def _offer(self, version: int) -> Offer:
        return Offer("ipc", version, streams=True, details={"address": self._listener.address, "key": self._key})

    def send(self, recording: Recording, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        try:
            self._send(recording.version, tensors)
        except BaseException:
            # Engines that wait for the next bucket must not wait in vain; they come again for the next version.
            for engine in self._engines:
                engine.close()
            self._engines.clear()
            raise
        return self._offer(recording.version)

    def _send(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        engines = self._gather(self._offered)
        reading: list[set[Connection]] = [set() for _ in self._slots]

        def free(slot: int) -> None:
            while reading[slot]:
                engine, done = self._answer(reading, version)
                reading[done].discard(engine)

        for filled in fill(version, tensors, self._slots, free):
            free(filled.slot)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            for engine in engines:
                try:
                    engine.send(filled)
                except _GONE as error:
                    raise self._lost(engine, version) from error
                reading[filled.slot].add(engine)
        for slot in range(SLOTS):
            free(slot)

    def close(self) -> None:
        self._closed = True
        # Wakes the thread that waits for connections.
        with suppress(*_GONE, OSError):
            Client(self._listener.address, family="AF_UNIX", authkey=self._key).close()
        self._listener.close()
        for engine in self._engines:
            engine.close()
        self._engines.clear()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _accept(self) -> None:
        while not self._closed:
            try:
                engine = self._listener.accept()
            except Exception:  # a stranger without the key, or one that hung up, is no matter of ours
                if self._closed:
                    return
                time.sleep(0.01)
                continue
            self._fresh.put(engine)

    def _gather(self, version: int) -> list[Connection]:
        """The engines that are ready to take this version; as many as were announced."""
        ready: list[Connection] = []
        until = time.monotonic() + self._timeout
        while len(ready) < self._takers:
            if self._closed:
                raise RunFailure(f"version {version} of the weights was given up before anybody came for it")
            while not self._fresh.empty():
                self._welcome(self._fresh.get())
            for engine in _waited(self._engines, 0.005):
                try:
                    message = engine.recv()
                except _GONE:
                    self._engines.remove(engine)
                    continue
                if message == ("ready", version) and engine not in ready:
                    ready.append(engine)
            if time.monotonic() > until:
                raise RunFailure(
                    f"{len(ready)} of {self._takers} engines came to take version {version} of the weights",
                    mend="ipc needs all engines on the trainer's machine; elsewhere use cluster.publishing.transport: "
                    "broadcast",
                )
        return ready

    def _welcome(self, engine: Connection) -> None:
        """Hand the buckets to an engine that has just come."""
        try:
            if self._memory is None:
                engine.send(("cuda", gpu_name(self._device), [_cuda_handle(slot) for slot in self._slots]))
            else:
                engine.send(("memory", len(self._slots[0])))
                reduction.send_handle(engine, self._memory, 0)
        except _GONE:
            return
        self._engines.append(engine)

    def _answer(self, reading: list[set[Connection]], version: int) -> tuple[Connection, int]:
        """The next engine that is done with a bucket, and which."""
        waited = [engine for engine in self._engines if any(engine in slot for slot in reading)]
        found = _waited(waited, self._timeout)
        if not found:
            raise RunFailure(f"no engine took version {version} of the weights within {self._timeout:.0f} s")
        engine = found[0]
        try:
            kind, slot = engine.recv()
        except _GONE as error:
            raise self._lost(engine, version) from error
        if kind != "done":
            raise RunFailure(f"an engine left while it took version {version} of the weights")
        return engine, slot

    def _lost(self, engine: Connection, version: int) -> RunFailure:
        if engine in self._engines:
            self._engines.remove(engine)
        return RunFailure(
            f"an engine was lost while it took version {version} of the weights",
            mend="look for what the lost process printed; the run can go on from its last checkpoint",
        )


class IpcTaker:
    """Reads the buckets that an `IpcSender` lends. timeout: seconds to wait for the trainer."""

    def __init__(self, *, timeout: float = 600.0) -> None:
        self._timeout = timeout
        self._address: Any = None
        self._trainer: Connection | None = None
        self._slots: list[Tensor] = []

    def take(self, offer: Offer, receiver: Receiver) -> None:
        receiver.begin(offer.version)
        with closing(self.buckets(offer)) as buckets:
            for filled, data in buckets:
                unpack(filled, data, receiver)

    def buckets(self, offer: Offer) -> Generator[tuple[Filled, Tensor]]:
        """What is in each bucket of a version, and its bytes, uint8, which are the trainer's again with the next one.
        Close it when something goes wrong on the way.

        Raises:
            RunFailure: the trainer was lost, or sent nothing.
        """
        try:
            trainer = self._connected(offer)
            last = False
            while not last:
                if not trainer.poll(self._timeout):
                    raise RunFailure(f"the trainer sent nothing of version {offer.version} for {self._timeout:.0f} s")
                filled: Filled = trainer.recv()
                data = self._slots[filled.slot]
                if filled.version == offer.version:
                    yield filled, data
                if data.is_cuda:
                    torch.cuda.synchronize(data.device)
                trainer.send(("done", filled.slot))
                last = filled.last
        except (*_GONE, OSError) as error:
            self.close()
            raise RunFailure(
                f"the trainer was lost while version {offer.version} of the weights was taken",
                mend="look for what the trainer printed; the run can go on from its last checkpoint",
            ) from error
        except BaseException:
            # Half way through nobody knows which bucket is whose: the next version begins with a new connection.
            self.close()
            raise

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        self._trainer, self._address, self._slots = None, None, []

    def _connected(self, offer: Offer) -> Connection:
        """A connection on which the trainer knows that this engine is ready."""
        address = offer.details["address"]
        if self._trainer is None or self._address != address:
            self.close()
            self._trainer = trainer = Client(address, family="AF_UNIX", authkey=offer.details["key"])
            self._address = address
            trainer.send(("ready", offer.version))
            kind, *rest = trainer.recv()
            if kind == "cuda":
                self._slots = [_cuda_opened(handle, rest[0]) for handle in rest[1]]
            else:
                memory = reduction.recv_handle(trainer)
                self._slots = _mapped(memory, rest[0])
                os.close(memory)
        else:
            self._trainer.send(("ready", offer.version))
        return self._trainer


def _waited(engines: list[Connection], seconds: float) -> list[Connection]:
    """Those that have said something, or are gone; after so many seconds nobody."""
    if not engines:
        time.sleep(seconds)
    return [one for one in wait(engines, timeout=seconds) if isinstance(one, Connection)]


def _nameless(size: int) -> int:
    """Descriptor of shared memory without a name."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("strop-weights")
    else:
        with tempfile.TemporaryFile() as file:  # removed from its folder before anybody could see it
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


def _mapped(memory: int, bucket_bytes: int) -> list[Tensor]:
    """The buckets in shared memory; it stays mapped as long as one of them is used."""
    whole = torch.frombuffer(mmap.mmap(memory, bucket_bytes * SLOTS), dtype=torch.uint8)
    return [whole[at * bucket_bytes : (at + 1) * bucket_bytes] for at in range(SLOTS)]


def _cuda_handle(slot: Tensor) -> bytes:
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps(reduce_tensor(slot))


def _cuda_opened(handle: bytes, uuid: str) -> Tensor:
    """The trainer's buffer, seen from here, where the same GPU may have another number."""
    torch.cuda.init()
    here = visible_gpus()
    if uuid not in here:
        raise RunFailure(
            "the engine does not see the GPU that holds the trainer's buffers",
            mend="use cluster.publishing.transport: broadcast",
        )
    rebuild, arguments = pickle.loads(handle)
    changed = [here.index(uuid) if at == _DEVICE_ARGUMENT else value for at, value in enumerate(arguments)]
    return rebuild(*changed)


# Place of the device's number among the arguments of torch's rebuild_cuda_tensor.
_DEVICE_ARGUMENT = 6


def gpu_name(device: torch.device) -> str:
    """What a GPU is called in every process, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process sees, by their numbers here."""
    return [gpu_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
