"""An engine in a process of its own, and faults on the way to it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forked_processes import forked
from strop.publishing.manifest import Recording
from strop.publishing.receiver import Receiver
from strop.publishing.sides import EngineSide, TrainerSide
from strop.publishing.transports.broadcast import BroadcastSender, BroadcastTaker, join_group
from strop.publishing.transports.delta import DeltaSender, DeltaTaker
from strop.publishing.transports.disk import DiskSender, DiskTaker
from strop.publishing.transports.ipc import IpcSender, IpcTaker
from strop.publishing.transports.protocol import Offer, SendingHalf

BUCKET = 10_000  # many buckets for a tiny model, and tensors that are larger than one
TIMEOUT = 60.0
TRANSPORTS = ("broadcast", "ipc", "disk", "delta")
Tensors = Iterable[tuple[str, Tensor]]


def make_model(*, lora: bool = False) -> Any:
    """A tiny Llama, the same in every process; with adapters whose B is not zero."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, intermediate_size=64, vocab_size=48, max_position_embeddings=256)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).eval()
        with torch.no_grad():
            for _, parameter in trainable(model):
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def joined(port: int, rank: int, device: str) -> Any:
    backend = "gloo" if device == "cpu" else "nccl"
    return join_group("127.0.0.1", port, rank=rank, size=2, backend=backend, timeout=TIMEOUT, device=device)


def make_taker(transport: str, port: int, device: str) -> Any:
    if transport == "broadcast":
        return BroadcastTaker(joined(port, 1, device), bucket_bytes=BUCKET, device=device)
    return {"ipc": lambda: IpcTaker(timeout=TIMEOUT), "disk": DiskTaker, "delta": DeltaTaker}[transport]()


def make_sender(transport: str, port: int, folder: Path, device: str) -> SendingHalf:
    if transport == "broadcast":
        return BroadcastSender(joined(port, 0, device), bucket_bytes=BUCKET, device=device)
    if transport == "ipc":
        return IpcSender(bucket_bytes=BUCKET, device=device, timeout=TIMEOUT)
    return DiskSender(folder, shard_bytes=50_000) if transport == "disk" else DeltaSender()


class Counted(TorchDispatchMode):
    """How often torch is called; views cost a GPU nothing, but whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Hosted:
    """What runs in the engine's process: an `EngineSide`, and faults that happen there."""

    def __init__(self, transport: str, port: int, *, lora: bool, dtype: torch.dtype, device: str) -> None:
        from strop.rollout.engines import packed_linear
        from strop.rollout.engines.local import LocalEngine

        packed_linear.SMALLEST = 1
        torch.set_num_threads(1)
        self.model = make_model(lora=lora).to(device, dtype)
        pack = dtype == torch.float32 and device == "cpu"
        self.engine = LocalEngine(self.model, None, eos_ids=(1,), seed=0, context=256, pack_weights=pack)
        self.side = EngineSide(self.engine, Receiver(dict(trainable(self.model))), make_taker(transport, port, device))

    async def flip(self, name: str) -> None:
        """One bit of one value changes after it was delivered."""
        dict(self.model.named_parameters())[name].data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    async def ignore_adapters(self, yes: bool) -> None:
        (self.model.disable_adapter_layers if yes else self.model.enable_adapter_layers)()

    async def keep_derived(self, yes: bool) -> None:
        """Weights that were packed before stay in use, under the new version's name."""
        if not yes:
            self.engine.__dict__.pop("update_weights")
            return

        async def update(new: Any) -> int:
            self.engine._version = new.version
            derived = self.engine._derived
            derived.layers = (new.version, derived.layers[1])
            derived.head = (new.version, derived.head[1])
            return new.version

        self.engine.update_weights = update

    async def sample(self) -> list[int]:
        from strop.rollout.engine import SampleRequest, SampleSettings

        return (await self.engine.generate(SampleRequest((3, 4, 5), SampleSettings(4), (1,)))).versions


def serve(pipe: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    hosted = Hosted(*arguments, **options)
    pipe.send("up")
    loop = asyncio.new_event_loop()
    while (order := pipe.recv()) is not None:
        method, args = order
        try:
            owner = hosted if hasattr(hosted, method) else hosted.side
            pipe.send((True, loop.run_until_complete(getattr(owner, method)(*args))))
        except Exception as error:
            pipe.send((False, error))


class RemoteEngine:
    """Every method of `EngineSide` and `Hosted`, called in the other process."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(self._call, method, args)

        return call

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        with self._lock:
            self._pipe.send((method, args))
            if not self._pipe.poll(TIMEOUT):
                raise TimeoutError(method)
            good, value = self._pipe.recv()
        if good:
            return value
        raise value


class Tampering:
    """A transport in which something goes wrong between the trainer's manifest and the wire."""

    def __init__(self, inner: SendingHalf) -> None:
        self.inner = inner
        self.tensors: Callable[[Tensors], Tensors] | None = None
        self.version: int | None = None

    def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        return self.inner.offer(version, takers=takers, whole=whole)

    def send(self, recording: Recording, tensors: Tensors) -> Offer:
        if self.version is not None:
            recording = Recording(self.version)
        return self.inner.send(recording, tensors if self.tensors is None else self.tensors(tensors))

    def close(self) -> None:
        self.inner.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def engine_process(transport: str, port: int, **options: Any) -> Iterator[tuple[RemoteEngine, Any]]:
    context = forked()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, (transport, port), options), daemon=True)
    process.start()
    try:
        yield RemoteEngine(ours), ours
    finally:
        ours.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


class Pair:
    """A trainer here, and an engine in another process."""

    def __init__(self, model: Any, sender: SendingHalf, engine: RemoteEngine, *, floor: float) -> None:
        from strop.config.training import OptimizerSettings
        from strop.publishing.proof import Probe
        from strop.publishing.publisher import Publisher
        from strop.training.single import SingleDeviceTrainer

        self.model = model
        self.transport = Tampering(sender)
        self.weights: Callable[[], Tensors] = lambda: trainable(model)
        scorer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1)
        self.trainer: Any = TrainerSide(lambda: self.weights(), self.transport, scorer)
        self.engine: Any = engine
        self.publisher = Publisher(Probe.make(48, floor=floor), wait=TIMEOUT)
        self.version = -1

    async def publish(self, *, engine: Any = None, whole: bool = False) -> dict[str, float]:
        self.version += 1
        engines = {"one": engine or self.engine}
        return await self.publisher.publish(self.trainer, engines, version=self.version, whole=whole)

    def train(self, size: float = 1e-3) -> None:
        """An update as an optimizer makes it."""
        draw = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for _, parameter in trainable(self.model):
                parameter.add_(((torch.rand(parameter.shape, generator=draw) * 2 - 1) * size).to(parameter.device))

    async def heal(self) -> None:
        """After a fault: everything anew, which must work."""
        self.transport.tensors = self.transport.version = None
        self.weights = lambda: trainable(self.model)
        await self.publish(whole=True)


@contextmanager
def pair_of(
    transport: str,
    folder: Path,
    *,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    engine_device: str | None = None,
) -> Iterator[Pair]:
    port = free_port()
    with engine_process(transport, port, lora=lora, dtype=dtype, device=engine_device or device) as (engine, pipe):
        sender = make_sender(transport, port, folder, device)
        assert pipe.poll(120)
        assert pipe.recv() == "up"
        pair = Pair(make_model(lora=lora).to(device), sender, engine, floor=1e-4 if dtype == torch.float32 else 0.1)
        try:
            yield pair
        finally:
            sender.close()
