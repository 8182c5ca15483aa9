"""Time and bytes of each way of moving weights between two processes, and what the proof of delivery costs.

A trainer and an engine, each a process of its own, publish random tensors with the names and shapes of a model. `move`
is from the offer until the engine holds everything, the trainer's checksums included; `verify` is the engine's
comparison. Every repeat changes the weights first. On a CPU: the 272 tensors of SmolLM2-135M through every transport.
Where there is a GPU, also through its memory (`ipc`), and where there are two, through NCCL; there also with the shapes
of a model of 7.6 billion numbers.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure

MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. key: width of the keys of all heads. tied: no output head of its own. bias: in q, k and v.
    query: width of the queries of all heads, where it is not that of the model. head: width of a head's key, where
    queries and keys have a norm of their own."""

    hidden: int
    inner: int
    key: int
    layers: int
    vocabulary: int
    tied: bool = True
    bias: bool = False
    query: int | None = None
    head: int | None = None


TINY = Shape(32, 64, 16, 2, 100)
SMOLLM2 = Shape(576, 1536, 192, 30, 49152)
QWEN3_06B = Shape(1024, 3072, 1024, 28, 151936, query=2048, head=128)
LARGE = Shape(3584, 18944, 512, 28, 152064, tied=False, bias=True)


@dataclass(frozen=True)
class Case:
    """What is published, and how. changed: share of the values that every update changes."""

    transport: str
    shape: Shape
    dtype: str
    device: str = "cpu"
    engine_device: str = "cpu"
    changed: float = 1.0
    bucket_mib: int = 128


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=5)
    parser.add_argument("--bucket-mib", type=int, default=128, help="cluster.publishing.bucket_mb")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--gpu", action="store_true", help="only the cases of GPUs")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.bucket_mib = 1, 1
    measure.use_threads(options.threads)
    import torch

    cases = {name: case for name, case in all_cases(options).items() if not options.only or name in options.only}
    if options.gpu:
        cases = {name: case for name, case in cases.items() if not name.startswith("cpu")}
    numbers: dict[str, Any] = {
        "devices": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
        "bucket_mib": options.bucket_mib,
        "moving": {name: moving(case, options) for name, case in cases.items()},
        "proof": proof(options),
    }
    measure.write("publishing", numbers, options)
    return numbers


def all_cases(options: argparse.Namespace) -> dict[str, Case]:
    """The cases that this machine can run."""
    import torch

    bucket = {"bucket_mib": options.bucket_mib}
    shape = TINY if options.smoke else SMOLLM2
    cases = {f"cpu {way}": Case(way, shape, "float32", **bucket) for way in ("broadcast", "ipc", "disk", "delta")}
    cases["cpu delta, 1% of bfloat16"] = Case("delta", shape, "bfloat16", changed=0.01, **bucket)
    gpus = torch.cuda.device_count()
    sizes = {"": (shape, "float32")}
    if not options.smoke:
        sizes |= {", 0.6B bfloat16": (QWEN3_06B, "bfloat16"), ", 7.6B bfloat16": (LARGE, "bfloat16")}
    for label, (size, dtype) in sizes.items():
        if gpus:
            cases[f"one GPU ipc{label}"] = Case("ipc", size, dtype, "cuda:0", "cuda:0", **bucket)
        if gpus > 1:
            cases[f"two GPUs nccl{label}"] = Case("broadcast", size, dtype, "cuda:0", "cuda:1", **bucket)
    return cases


def weights(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, in a model's order."""
    hidden, inner, key = shape.hidden, shape.inner, shape.key
    query = shape.query or hidden
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", query), ("k", key), ("v", key)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if shape.bias:
                found[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        found[f"{at}self_attn.o_proj.weight"] = (hidden, query)
        if shape.head:
            found |= {f"{at}self_attn.{name}_norm.weight": (shape.head,) for name in "qk"}
        found |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        found |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    found["model.norm.weight"] = (hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocabulary, hidden)
    return found


def moving(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Publications in a row, from this process to another; the first one is told apart."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        port = free_port()
        process = context.Process(target=engine, args=(theirs, case, port, options.threads), daemon=True)
        process.start()
        try:
            found = list(publications(case, ours, port, Path(folder), options.repeats))
        finally:
            ours.send(None)
            process.join(60)
            if process.is_alive():
                process.kill()
    first, *later = found
    size = first["bytes"]
    summary = {key: measure.median([run[key] for run in later]) for key in ("move", "checksums", "verify")}
    print(f"{case.transport} {case.device}: {summary}", flush=True)
    return {
        "case": {key: value for key, value in asdict(case).items() if key != "shape"},
        "tensors": first["tensors"],
        "bytes": size,
        "bytes_moved": later[-1]["moved"],
        "seconds": summary,
        "first_seconds": {key: first[key] for key in ("move", "checksums", "verify")},
        "gigabytes_per_second": size / summary["move"] / 1e9,
        "seconds_of_each_repeat": {key: [run[key] for run in later] for key in ("move", "checksums", "verify")},
    }


def publications(case: Case, pipe: Any, port: int, folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """The trainer: 1 + repeats publications."""
    import torch

    from strop.publishing.manifest import Recording
    from strop.publishing.transports.broadcast import BroadcastSender, join_group
    from strop.publishing.transports.delta import DeltaSender
    from strop.publishing.transports.disk import DiskSender
    from strop.publishing.transports.ipc import IpcSender

    sender: Any
    size = case.bucket_mib * MIB
    if case.transport == "broadcast":
        backend = "nccl" if case.device.startswith("cuda") else "gloo"
        group = join_group("127.0.0.1", port, rank=0, size=2, backend=backend, timeout=300, device=case.device)
        sender = BroadcastSender(group, bucket_bytes=size, device=case.device)
    elif case.transport == "ipc":
        sender = IpcSender(bucket_bytes=size, device=case.device)
    else:
        sender = DiskSender(folder) if case.transport == "disk" else DeltaSender()
    draw = torch.Generator(case.device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    tensors = {
        name: torch.randn(shape, generator=draw, device=case.device, dtype=dtype).mul_(0.02)
        for name, shape in weights(case.shape).items()
    }
    assert answer(pipe) == "up"
    for version in range(1 + repeats):
        change(tensors, case, draw)
        finish(case.device)
        started = time.perf_counter()
        offer = sender.offer(version, takers=1)
        recording = Recording(version)
        if offer.streams:
            pipe.send(("take", offer))
        offer = sender.send(recording, recording.over(tensors.items()))
        if not offer.streams:
            pipe.send(("take", offer))
        # Some sums are still on their way.
        manifest = recording.manifest()
        answer(pipe)
        moved = time.perf_counter() - started
        started = time.perf_counter()
        pipe.send(("verify", manifest))
        faults = answer(pipe)
        verified = time.perf_counter() - started
        if faults:
            raise RuntimeError(f"{case}: {faults[:3]}")
        data = offer.details.get("data")
        yield {
            "move": moved,
            "checksums": manifest.checksum_seconds,
            "verify": verified,
            "bytes": manifest.bytes,
            "tensors": len(manifest.entries),
            "moved": manifest.bytes if data is None else data.nbytes,
        }
    sender.close()


def engine(pipe: Any, case: Case, port: int, threads: int) -> None:
    """The other process: takes and compares until it is told to end."""
    measure.use_threads(threads)
    import torch

    from strop.publishing.receiver import Receiver
    from strop.publishing.transports.broadcast import BroadcastTaker, join_group
    from strop.publishing.transports.delta import DeltaTaker
    from strop.publishing.transports.disk import DiskTaker
    from strop.publishing.transports.ipc import IpcTaker

    taker: Any
    device = case.engine_device
    if case.transport == "broadcast":
        backend = "nccl" if device.startswith("cuda") else "gloo"
        group = join_group("127.0.0.1", port, rank=1, size=2, backend=backend, timeout=300, device=device)
        taker = BroadcastTaker(group, bucket_bytes=case.bucket_mib * MIB, device=device)
    else:
        taker = {"ipc": IpcTaker, "disk": DiskTaker, "delta": DeltaTaker}[case.transport]()
    dtype = getattr(torch, case.dtype)
    into = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in weights(case.shape).items()}
    receiver = Receiver(into)
    pipe.send((True, "up"))
    while (order := pipe.recv()) is not None:
        try:
            verb, value = order
            if verb == "take":
                pipe.send((True, taker.take(value, receiver)))
                continue
            faults = receiver.verify(value)
            if not faults:
                receiver.commit(value.version)
            pipe.send((True, faults))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
    taker.close()


def proof(options: argparse.Namespace) -> dict[str, Any]:
    """Checksums of one thread and of a GPU, and the probe on both sides of a model with SmolLM2's shape."""
    import torch

    from strop.publishing.checksums import checksum

    found: dict[str, Any] = {"checksum_gigabytes_per_second": {}}
    for device in ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]:
        tensor = torch.randn((1 << 16) if options.smoke else (1 << 28 if device != "cpu" else 1 << 25), device=device)
        torch.set_num_threads(1)
        checksum(tensor)
        seconds = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            checksum(tensor)
            seconds.append(time.perf_counter() - started)
        found["checksum_gigabytes_per_second"][device] = tensor.nbytes / measure.median(seconds) / 1e9
        torch.set_num_threads(options.threads)
        del tensor
        found[f"probe {device}"] = probe(device, options)
    found["one process"] = in_one_process(options)
    return found


def probed(device: str, options: argparse.Namespace, *, rank: int = 0) -> tuple[Any, Any, Any]:
    """Trainer and engine of one model with SmolLM2's shape, and the probe. rank: of adapters, 0 for all weights."""
    import torch
    import transformers

    from strop.config.model import LoraConfig
    from strop.config.training import OptimizerSettings
    from strop.models.load import add_lora
    from strop.publishing.proof import Probe
    from strop.rollout.engines.local import LocalEngine
    from strop.training.single import SingleDeviceTrainer

    shape = TINY if options.smoke else SMOLLM2
    heads = {"num_attention_heads": shape.hidden // (8 if options.smoke else 64)}
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        vocab_size=shape.vocabulary, num_key_value_heads=shape.key // (8 if options.smoke else 64),
        tie_word_embeddings=True, **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).to(device).eval()
    if rank:
        model = add_lora(model, LoraConfig(rank=rank), 0, updates=1)
    trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1)
    return trainer, LocalEngine(model, None, eos_ids=(), seed=0, context=256), Probe.make(shape.vocabulary, floor=1e-4)


def in_one_process(options: argparse.Namespace) -> dict[str, Any]:
    """What the probe adds to a publication within one process, adapters on SmolLM2's shape, on a CPU.

    The engine packs each weight when it first uses it, in the probe or else in the first tokens of its samples: with
    the probe and without it, in turn, from the new version to the second token of a sample. Their difference is taken
    for each pair.
    """
    import asyncio

    from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate

    trainer, engine, check = probed("cpu", options, rank=16)
    versions = iter(range(1, 1000))

    async def publication(*, proved: bool) -> float:
        version = next(versions)
        started = time.perf_counter()
        await engine.update_weights(WeightUpdate(version))
        if proved:
            await check.prove(trainer, engine, version=version)
        await engine.generate(SampleRequest((1, 2, 3, 4), SampleSettings(2), (version,)))
        return time.perf_counter() - started

    async def all_of_them() -> list[tuple[float, float]]:
        pairs = [(await publication(proved=False), await publication(proved=True)) for _ in range(2 + options.repeats)]
        await engine.close()
        return pairs[2:]

    pairs = asyncio.run(all_of_them())
    return {
        "without_seconds": measure.median([without for without, _ in pairs]),
        "with_seconds": measure.median([proved for _, proved in pairs]),
        "proof_seconds": measure.median([proved - without for without, proved in pairs]),
        "proof_seconds_each": [proved - without for without, proved in pairs],
    }


def probe(device: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds in which each side scores the probe, after an update; the engine packs its weights anew on a CPU."""
    import asyncio

    from strop.rollout.engine import WeightUpdate

    trainer, engine, check = probed(device, options)
    lists = check.token_lists
    seconds: dict[str, list[float]] = {"trainer": [], "engine": []}
    for repeat in range(1 + options.repeats):
        asyncio.run(engine.update_weights(WeightUpdate(repeat)))
        started = time.perf_counter()
        trainer.score(lists)
        seconds["trainer"].append(time.perf_counter() - started)
        started = time.perf_counter()
        asyncio.run(engine.score(lists))
        seconds["engine"].append(time.perf_counter() - started)
    return {f"{side}_seconds": measure.median(values[1:]) for side, values in seconds.items()}


def change(tensors: dict[str, Any], case: Case, draw: Any) -> None:
    """Every tensor, at so large a share of its values, by about a thousandth."""
    import torch

    for tensor in tensors.values():
        if case.changed < 1:
            # At least one unit in the last place, or the number format would hide the update.
            flat = tensor.view(-1).view(torch.int16)
            chosen = torch.rand(len(flat), generator=draw, device=tensor.device) < case.changed
            flat += chosen.to(torch.int16)
        else:
            step = torch.randn(tensor.shape, generator=draw, device=tensor.device, dtype=tensor.dtype)
            tensor.add_(step, alpha=2e-5)


def answer(pipe: Any) -> Any:
    if not pipe.poll(600):
        raise RuntimeError("the engine's process does not answer")
    good, value = pipe.recv()
    if not good:
        raise RuntimeError(value)
    return value


def finish(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
