"""Buckets, deltas, files and shared memory: what goes in comes out, and what cannot be is refused."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Counted, Tensors
from torch import Tensor

from strop.errors import RunFailure
from strop.publishing import deltas
from strop.publishing.buckets import Filled, Piece, fill, make_slots, unpack
from strop.publishing.manifest import Manifest, Recording
from strop.publishing.receiver import Receiver
from strop.publishing.transports import broadcast
from strop.publishing.transports.delta import DeltaSender, DeltaTaker
from strop.publishing.transports.disk import DiskSender, DiskTaker, read_manifest, version_folder
from strop.publishing.transports.ipc import IpcSender, IpcTaker
from strop.publishing.transports.protocol import Offer

SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 5), "none": (0, 3), "b": (), "c": (300,), "d": (2, 3, 4), "e": (33, 9)}


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def receiver(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Receiver]:
    into = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return into, Receiver(into)


def recorded(version: int, tensors: Tensors) -> tuple[Recording, Iterator[tuple[str, Tensor]]]:
    recording = Recording(version)
    return recording, recording.over(tensors)


@pytest.mark.parametrize("size", [128, 512, 100_000])
@pytest.mark.parametrize("names", [None, 400])
@pytest.mark.parametrize(
    ("sent", "held"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_buckets_carry_everything(size: int, names: int | None, sent: torch.dtype, held: torch.dtype) -> None:
    source = weights(1, sent)
    source["a"] = source["a"].t().contiguous().t()
    into, receiving = receiver(held)
    recording, tensors = recorded(3, source.items())
    slots, order = make_slots(size), list[int]()
    receiving.begin(3)
    buckets = 0
    for filled in fill(3, tensors, slots, order.append, names_bytes=names):
        unpack(filled, slots[filled.slot], receiving)
        slots[filled.slot].fill_(255)
        buckets += 1
    assert receiving.verify(recording.manifest()) == []
    assert receiving.version is None
    receiving.commit(3)
    assert receiving.version == 3
    assert all(torch.equal(into[name], source[name].to(held)) for name in SHAPES)
    assert order[: buckets - 1] == [at % 2 for at in range(buckets - 1)]
    assert buckets > 3 or size > 10_000


def test_what_a_bucket_holds_is_read_as_it_was_written() -> None:
    piece = Piece("modèle.层\0.weight", "bfloat16", (7, 0, 3), 1 << 40, 12, 128)
    size = len(json.dumps(piece)) + 2
    for filled in (
        Filled(3, 1, (piece,), 140, last=False),
        Filled(0, 0, (), 0, last=True),
        Filled(-1, 0, (piece,) * ((broadcast.HEADER - 40) // size), 5, last=True),
    ):
        header = broadcast._written(filled)
        assert (header.shape, header.dtype) == ((broadcast.HEADER,), torch.uint8)
        assert broadcast._read(header) == filled


def test_a_tensor_that_fits_a_bucket_takes_few_calls() -> None:
    source = {f"t{at}": torch.randn(at + 1) for at in range(50)}
    receiving = Receiver({name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in source.items()})
    slots = make_slots(1 << 20)
    receiving.begin(1)
    with Counted() as counted:
        (filled,) = fill(1, source.items(), slots, lambda slot: None)
    assert counted.calls.total() < 7 * 50
    with Counted() as counted:
        unpack(filled, slots[0], receiving)
    assert counted.calls.total() < 7 * 50


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_what_is_changed_after_it_arrived_is_a_fault(held: torch.dtype) -> None:
    into, receiving = receiver(held)
    recording, tensors = recorded(1, weights(0).items())
    receiving.begin(1)
    for name, tensor in tensors:
        receiving.put(name, tensor)
    assert receiving.verify(recording.manifest()) == []
    into["c"][7] += 1.0
    what = "holds other values than were sent"
    if held == torch.bfloat16:
        what = "was changed after it was converted to bfloat16"
    assert [str(fault) for fault in receiving.verify(recording.manifest())] == [f"c ({what})"]


def test_only_what_was_proved_can_be_served() -> None:
    _, receiving = receiver()
    receiving.begin(1)
    with pytest.raises(RunFailure, match="version 1 cannot be served: nothing was proved"):
        receiving.commit(1)
    recording, tensors = recorded(1, weights(0).items())
    for name, tensor in tensors:
        receiving.put(name, tensor)
    with pytest.raises(RunFailure, match="manifest of version 2"):
        receiving.verify(Manifest(2, ()))
    assert receiving.verify(recording.manifest()) == []
    with pytest.raises(RunFailure, match="version 2 cannot be served: version 1 was proved"):
        receiving.commit(2)
    receiving.commit(1)
    receiving.begin(2)
    assert receiving.version is None


def test_a_module_that_was_moved_meanwhile_is_still_what_is_written_and_compared() -> None:
    module = torch.nn.Linear(3, 2)
    receiving = Receiver(dict(module.named_parameters()))
    # Other memory under the same parameters, as a move to another device gives them.
    module.double().float()
    source = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    recording, tensors = recorded(1, source.items())
    receiving.begin(1)
    for name, tensor in tensors:
        receiving.put(name, tensor)
    assert receiving.verify(recording.manifest()) == []
    assert torch.equal(module.weight, source["weight"])
    module.weight.data = torch.zeros(2, 3)
    assert [fault.name for fault in receiving.verify(recording.manifest())] == ["weight"]


def test_names_and_shapes_that_do_not_fit_are_faults() -> None:
    _, receiving = receiver()
    odd = {**weights(0), "a": torch.zeros(5, 7), "stranger": torch.zeros(2)}
    recording, tensors = recorded(1, odd.items())
    receiving.begin(1)
    for name, tensor in tensors:
        receiving.put(name, tensor)
    receiving.put("unannounced", torch.zeros(1))
    told = {fault.name: str(fault) for fault in receiving.verify(recording.manifest())}
    assert told == {
        "a": "a ([5, 7] was sent, the engine's is [7, 5])",
        "stranger": "stranger (the engine has no such tensor)",
        "unannounced": "unannounced (the engine has no such tensor)",
    }


def test_a_tensor_that_ends_too_soon_is_a_fault() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, receiving = receiver(dtype)
        source = weights(0)
        recording, tensors = recorded(1, source.items())
        receiving.begin(1)
        for name, tensor in tensors:
            data = tensor.reshape(-1).view(torch.uint8)
            receiving.piece(name, "float32", tuple(tensor.shape), 0, data[: 100 if name == "c" else len(data)])
        assert [str(fault) for fault in receiving.verify(recording.manifest())] == [
            "c (100 of 1200 bytes were delivered)"
        ]


def test_a_piece_that_begins_elsewhere_is_not_taken_for_the_whole() -> None:
    _, receiving = receiver(torch.float32)
    receiving.begin(1)
    tensor = weights(0)["c"]
    with pytest.raises(RuntimeError):
        receiving.piece("c", "float32", tuple(tensor.shape), 8, tensor.reshape(-1).view(torch.uint8))


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    count=st.integers(0, 400),
    share=st.sampled_from([0.0, 0.01, 0.3, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
def test_a_delta_leads_to_the_new_bits(dtype: torch.dtype, count: int, share: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8).view(dtype)
    new = old.clone()
    chosen = torch.rand(count, generator=draw) < share
    deltas.as_integers(new)[chosen] += 1
    form, parts = deltas.encode(deltas.as_integers(new), deltas.as_integers(old))
    assert form["kind"] == ("dense" if 2 * int(chosen.sum()) > count else "sparse")
    deltas.apply(form, parts, deltas.as_integers(old))
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_few_changes_take_few_bytes() -> None:
    old = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    new = old.clone()
    deltas.as_integers(new)[::100] ^= 1
    form, parts = deltas.encode(deltas.as_integers(new), deltas.as_integers(old))
    assert form["kind"] == "sparse"
    assert sum(map(len, parts)) < 1000
    _, unchanged = deltas.encode(deltas.as_integers(old), deltas.as_integers(old))
    assert sum(map(len, unchanged)) == 0


def deliver(sender: Any, taker: Any, receiving: Receiver, version: int, source: dict[str, Tensor]) -> Offer:
    sender.offer(version, takers=1)
    recording, tensors = recorded(version, source.items())
    offer: Offer = sender.send(recording, tensors)
    taker.take(pickle.loads(pickle.dumps(offer)), receiving)
    assert receiving.verify(recording.manifest()) == []
    receiving.commit(version)
    return offer


def test_a_delta_is_refused_by_whoever_holds_another_version() -> None:
    sender, taker, (_, receiving) = DeltaSender(), DeltaTaker(), receiver()
    deliver(sender, taker, receiving, 4, weights(4))
    sender.offer(5, takers=1)
    sender.send(*recorded(5, weights(5).items()))
    late = sender.send(*recorded(6, weights(6).items()))
    with pytest.raises(RunFailure, match="changed since version 5, and the engine holds version 4"):
        taker.take(late, receiving)
    assert receiving.version == 4, "nothing was touched"
    fresh_into, fresh = receiver()
    with pytest.raises(RunFailure, match="changed since version 5, and the engine holds no whole version"):
        DeltaTaker().take(late, fresh)
    sender.offer(7, takers=1, whole=True)
    recording, tensors = recorded(7, weights(7).items())
    offer = sender.send(recording, tensors)
    DeltaTaker().take(offer, fresh)
    assert fresh.verify(recording.manifest()) == []
    assert torch.equal(fresh_into["c"], weights(7)["c"])


def test_the_newest_versions_stay_on_disk(tmp_path: Path) -> None:
    sender, taker, (_, receiving) = DiskSender(tmp_path, keep=2, shard_bytes=1000), DiskTaker(), receiver()
    (tmp_path / "mine.txt").write_text("stays")
    for version in (1, 2, 3, 9):
        deliver(sender, taker, receiving, version, weights(version))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "version-000003", "version-000009"]
    # A run that is resumed from an earlier step writes its versions anew.
    deliver(sender, taker, receiving, 4, weights(40))
    assert sorted(path.name for path in tmp_path.glob("version-*")) == ["version-000003", "version-000004"]
    assert len(list(version_folder(tmp_path, 4).glob("*.safetensors"))) > 1


def test_a_version_that_is_half_written_is_not_there(tmp_path: Path) -> None:
    sender, (_, receiving) = DiskSender(tmp_path), receiver()

    def broken() -> Tensors:
        yield "a", weights(1)["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sender.send(*recorded(1, broken()))
    with pytest.raises(RunFailure, match="no whole version"):
        DiskTaker().take(sender.offer(1, takers=1), receiving)
    deliver(sender, DiskTaker(), receiving, 1, weights(1))
    manifest = version_folder(tmp_path, 1) / "manifest.json"
    assert read_manifest(manifest.parent).entries[0].name == "a"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(RunFailure, match="no whole version"):
        DiskTaker().take(sender.offer(1, takers=1), receiving)


def in_thread(call: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Runs at once; the result waits for the end and gives what was raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> BaseException | None:
        thread.join(60)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return end


def test_several_engines_read_the_same_memory() -> None:
    sender = IpcSender(bucket_bytes=256, timeout=30)
    sides = [(IpcTaker(timeout=30), *receiver()) for _ in range(3)]
    try:
        for version in range(4):
            offer = pickle.loads(pickle.dumps(sender.offer(version, takers=3)))
            ends = [in_thread(partial(taker.take, offer, receiving)) for taker, _, receiving in sides]
            recording, tensors = recorded(version, weights(version).items())
            sender.send(recording, tensors)
            assert [end() for end in ends] == [None] * 3
            for _, into, receiving in sides:
                assert receiving.verify(recording.manifest()) == []
                assert torch.equal(into["e"], weights(version)["e"])
    finally:
        sender.close()
        for taker, *_ in sides:
            taker.close()


def test_an_engine_that_does_not_come_is_missed() -> None:
    sender = IpcSender(bucket_bytes=256, timeout=0.2)
    offer = sender.offer(1, takers=2)
    with pytest.raises(RunFailure, match="0 of 2 engines came"):
        sender.send(*recorded(1, weights(1).items()))
    sender.close()
    with pytest.raises(RunFailure, match="trainer was lost"):
        IpcTaker().take(offer, receiver()[1])


SENDER = """
import pickle, sys, time, torch
from strop.publishing.manifest import Recording
from strop.publishing.transports.ipc import IpcSender
sender = IpcSender(bucket_bytes=4096)
sys.stdout.buffer.write(pickle.dumps(sender.offer(1, takers=1)).hex().encode() + b"\\n")
sys.stdout.flush()
def tensors():
    yield "c", torch.ones(300)
    for at in range(8):
        yield f"x{at}", torch.ones(4096)
    print("half", flush=True)
    time.sleep(600)
sender.send(Recording(1), tensors())
"""

TAKER = """
import os, pickle, signal, sys
from strop.publishing.receiver import Receiver
from strop.publishing.transports.ipc import IpcTaker
class Dies(Receiver):
    def piece(self, *_):
        os.kill(os.getpid(), signal.SIGKILL)
IpcTaker().take(pickle.loads(bytes.fromhex(sys.argv[1])), Dies({}))
"""


def traces() -> set[str]:
    """What processes may leave behind: named shared memory, sockets of this transport, and memory mapped here."""
    gc.collect()
    shared = Path("/dev/shm")
    sockets = Path("/proc/net/unix").read_text().split()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        *(path.name for path in shared.iterdir()),
        *(word for word in sockets if word.startswith("@strop-")),
        *(line for line in maps if "strop-weights" in line),
    }


def left_after(before: set[str]) -> set[str]:
    """What is there more than before. The system clears away the sockets of a killed process a moment after it."""
    for _ in range(100):
        if not (left := traces() - before):
            break
        time.sleep(0.1)
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_trainer_leaves_nothing_behind_and_is_missed_at_once() -> None:
    before = traces()
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, env=os.environ.copy())
    assert process.stdout is not None
    offer = pickle.loads(bytes.fromhex(process.stdout.readline().decode()))
    into, receiving = receiver()
    taker = IpcTaker(timeout=300)
    end = in_thread(partial(taker.take, offer, receiving))
    assert process.stdout.readline() == b"half\n"
    assert any("strop-weights" in line for line in traces() - before), "the memory is shared while both live"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert "the trainer was lost while version 1" in str(end())
    assert torch.equal(into["c"], torch.ones(300)), "it had begun"
    assert receiving.version is None
    with pytest.raises(RunFailure):
        receiving.commit(1)
    del end, taker  # the error holds the frames that held the memory
    assert left_after(before) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_engine_is_missed_at_once_and_another_takes_its_place() -> None:
    before = traces()
    sender = IpcSender(bucket_bytes=256, timeout=300)
    offer = sender.offer(1, takers=1)
    dying = subprocess.Popen([sys.executable, "-c", TAKER, pickle.dumps(offer).hex()], env=os.environ.copy())
    with pytest.raises(RunFailure, match="an engine was lost while it took version 1"):
        sender.send(*recorded(1, weights(1).items()))
    assert dying.wait() == -signal.SIGKILL
    _, receiving = receiver()
    taker = IpcTaker(timeout=30)
    offer = sender.offer(1, takers=1)
    end = in_thread(partial(taker.take, offer, receiving))
    recording, tensors = recorded(1, weights(1).items())
    sender.send(recording, tensors)
    assert end() is None
    assert receiving.verify(recording.manifest()) == []
    sender.close()
    taker.close()
    del sender, taker, end
    assert left_after(before) == set()
