"""Weights on their way into the processes of a vLLM whose layers are divided among several GPUs.

vLLM's workers are processes of its own, so nothing can be handed to them as tensors. The process that drives them lends
them two buckets, as it is done between trainer and engine, of its GPU's memory where all of them see that GPU, else of
the machine's; each worker puts whole tensors together on its own device, keeps its share by vLLM's own loaders, and
compares what it then holds with what came.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from strop.publishing.checksums import Summed, ahead, checksums, finished, summed
from strop.publishing.manifest import Recording, dtype_named
from strop.publishing.transports.ipc import IpcSender, IpcTaker, gpu_name, visible_gpus
from strop.publishing.transports.protocol import Offer
from strop.rollout.engines.vllm_core import Call
from strop.rollout.engines.vllm_weights import Place, Sent, adapters_aside, load, places

_BUCKET = 64 << 20
_MACHINE = "cpu"
# Bytes of tensors that a worker sums in one go. vLLM leaves little of a GPU's memory free.
_BATCH = 64 << 20


class WorkerExtension:
    """What each of vLLM's workers can do beside what vLLM lets it; vLLM mixes it into its class of workers."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    def strop_begin(self) -> None:
        """Leave what asks a run to stop to the process that drives it: it ends its step, saves, and then ends this one.
        A terminal and Slurm send these signals to every process of a run."""
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)

    def strop_visible_gpus(self) -> list[str]:
        """Names of the GPUs whose memory this worker can be lent."""
        return visible_gpus()

    def strop_end(self) -> None:
        """Be stopped by signals again: vLLM ends its workers by one."""
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)

    def strop_take(self, offer: Offer, sent: Sent) -> list[str]:
        """Take a version of the weights into the model of this worker.

        Returns:
            Names of tensors whose values are then others than those that came, of those that vLLM keeps in their own
            form.

        Raises:
            RunFailure: the weights stopped coming. Whatever vLLM raises where it cannot take them.
        """
        # vLLM makes no instance of this class, so there is no place to begin one.
        taker: IpcTaker = self.__dict__.setdefault("_strop_taker", IpcTaker())
        rank, size = self.rank, self.vllm_config.parallel_config.tensor_parallel_size

        def found() -> dict[str, Place]:
            with adapters_aside(self.model_runner.get_model()) as model:
                return places(model, sent.shapes, rank=rank, size=size)

        before = found()
        expected = list[str]()
        came = list[Summed]()

        def write_down(batch: Sequence[tuple[str, Tensor]]) -> None:
            known = [(name, tensor, before[name]) for name, tensor in batch if name in before]
            expected.extend(name for name, *_ in known)
            came.append(summed([tensor[place.part].to(place.live.dtype) for _, tensor, place in known]))

        def coming() -> Generator[tuple[str, Tensor]]:
            with closing(whole_tensors(taker, offer, self.device)) as tensors:
                # vLLM may change what it loads.
                yield from ahead(tensors, _BATCH, write_down)

        with closing(coming()) as weights:
            load(self, weights, sent, rank=rank, size=size)
        # Building the model anew may have given it other memory.
        after = found()
        sent_sums = dict(zip(expected, finished(came), strict=True))
        common = [name for name in expected if name in after]
        held = checksums(after[name].live for name in common)
        if self.device.type == "cuda":
            # What the tensors were put together in; the GPU may be somebody else's too.
            torch.cuda.empty_cache()
        return [name for name, sums in zip(common, held, strict=True) if sums != sent_sums[name]]


class IntoWorkers:
    """The end of the process that drives vLLM.

    Args:
        workers: how many processes share the layers.
        bucket_bytes: of each of the two buckets.
        device: where the buckets are; the machine's memory where a worker does not see that GPU.
    """

    extension = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"

    def __init__(self, workers: int, *, bucket_bytes: int = _BUCKET, device: torch.device | str = _MACHINE) -> None:
        self._workers = workers
        self._bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._sender: IpcSender | None = None
        self._number = 0

    def begin(self, call: Call) -> None:
        """What is to be done once in each worker. call: see `push`."""
        call("strop_begin", ())
        if self._device.type == "cuda":
            lent = gpu_name(self._device)
            if not all(lent in seen for seen in call("strop_visible_gpus", ())):
                self._device = torch.device(_MACHINE)

    def end(self, call: Call) -> None:
        """What is to be done in each worker before vLLM ends it. call: see `push`."""
        call("strop_end", ())

    def push(self, call: Call, weights: Mapping[str, Tensor]) -> list[str]:
        """Bring weights to all workers.

        Args:
            call: calls a method of every worker with arguments, and gives what each returned.
            weights: by the names of Hugging Face, on any device.

        Returns:
            Names of tensors of which a worker holds other values than it was given.

        Raises:
            RunFailure: a worker was lost, or did not come for them. What `call` raises.
        """
        if self._sender is None:
            self._sender = IpcSender(bucket_bytes=self._bucket_bytes, device=self._device)
        sender, self._number = self._sender, self._number + 1
        offer = sender.offer(self._number, takers=self._workers)
        with ThreadPoolExecutor(1, "strop-into-vllm") as aside:
            sending = aside.submit(sender.send, Recording(self._number), weights.items())
            try:
                told = call("strop_take", (offer, Sent.of(weights)))
            except BaseException as error:
                # Whoever sends may wait for workers that will not come.
                self.close()
                if sending.done() and (cause := sending.exception()) is not None:
                    raise cause from error
                raise
            sending.result()
        return sorted({name for names in told for name in names})

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def whole_tensors(taker: IpcTaker, offer: Offer, device: torch.device | str) -> Generator[tuple[str, Tensor]]:
    """(name, tensor on the device) of a version, each as soon as all of it is there; it is the caller's."""
    parts: dict[str, Tensor] = {}
    arrived: dict[str, int] = {}
    with closing(taker.buckets(offer)) as buckets:
        for filled, data in buckets:
            for piece in filled.pieces:
                dtype = dtype_named(piece.dtype)
                total = math.prod(piece.shape) * dtype.itemsize
                if piece.name not in parts:
                    parts[piece.name] = torch.empty(total, dtype=torch.uint8, device=device)
                    arrived[piece.name] = 0
                span = data[piece.offset : piece.offset + piece.length]
                parts[piece.name][piece.start : piece.start + piece.length].copy_(span)
                arrived[piece.name] += piece.length
                if arrived[piece.name] >= total:
                    del arrived[piece.name]
                    yield piece.name, parts.pop(piece.name).view(dtype).view(piece.shape)


__all__ = ["IntoWorkers", "WorkerExtension", "whole_tensors"]
