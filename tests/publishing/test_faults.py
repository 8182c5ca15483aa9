"""Whatever goes wrong on the way to an engine in another process stops that very publication, and is named (P4)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import TRANSPORTS, Pair, Tensors, pair_of, trainable

from strop.errors import RunFailure

A = "model.layers.0.self_attn.q_proj.weight"
B = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(request.param, tmp_path_factory.mktemp(request.param)) as made:
        made.name = request.param
        asyncio.run(made.publish())
        yield made


async def fails(pair: Pair, *, engine: Any = None) -> str:
    """What the publication after an update says; the engine must not go on, and the next publication must mend it."""
    pair.train()
    with pytest.raises(RunFailure) as caught:
        await pair.publish(engine=engine)
    with pytest.raises(RunFailure, match=f"version {pair.version} of the weights was begun"):
        await pair.engine.resume()
    await pair.heal()
    assert await pair.engine.sample() == [pair.version] * 4
    assert f"version {pair.version - 1} of the weights" in caught.value.what
    return caught.value.what


def replaced(**by_name: Any) -> Any:
    """Deliver other values in place of some tensors, or nothing (None)."""

    def tamper(tensors: Tensors) -> Tensors:
        for name, tensor in tensors:
            change = by_name.get(name.replace(".", "_"), lambda same: same)
            if change is not None:
                yield name, change(tensor.detach().clone())

    return tamper


def key(name: str) -> str:
    return name.replace(".", "_")


async def test_clean_publications_change_what_is_served(pair: Pair) -> None:
    for _ in range(3):
        pair.train()
        found = await pair.publish()
        assert found["publish/probe_gap"] < 1e-4
        assert await pair.engine.sample() == [pair.version] * 4
    total = sum(parameter.nbytes for _, parameter in trainable(pair.model))
    if pair.name == "delta":
        assert 0 < found["publish/bytes"] < total
    else:
        assert found["publish/bytes"] == total
    assert 0 < found["publish/checksum_seconds"] + found["publish/probe_seconds"] < found["publish/seconds"]


@pytest.mark.parametrize("bit", [0, 31])
async def test_one_corrupted_value_is_named(pair: Pair, bit: int) -> None:
    def corrupt(tensor: torch.Tensor) -> torch.Tensor:
        words = tensor.view(-1).view(torch.int32)
        words[700] ^= torch.tensor(1 << bit).to(torch.int32)
        return tensor

    pair.transport.tensors = replaced(**{key(A): corrupt})
    assert f"engine one: 1 of 21 tensors: {A} (holds other values than were sent)" in await fails(pair)


async def test_a_tensor_that_is_not_delivered_is_named(pair: Pair) -> None:
    pair.transport.tensors = replaced(**{key(B): None})
    assert f"1 of 21 tensors: {B} (was not delivered)" in await fails(pair)


async def test_two_layers_in_each_others_place_are_named(pair: Pair) -> None:
    def swapped(tensors: Tensors) -> Tensors:
        held = {name: tensor.detach().clone() for name, tensor in tensors}
        held[A], held[B] = held[B], held[A]
        return iter(held.items())

    pair.transport.tensors = swapped
    what = await fails(pair)
    assert f"2 of 21 tensors: {A} (holds the values of {B}); {B} (holds the values of {A})" in what


async def test_an_old_version_is_named(pair: Pair) -> None:
    old = [(name, tensor.detach().clone()) for name, tensor in trainable(pair.model)]
    before = pair.version

    def stale(tensors: Tensors) -> Tensors:
        for _ in tensors:
            pass
        return iter(old)

    pair.transport.tensors = stale
    what = await fails(pair)
    assert f"21 of 21 tensors: {old[0][0]} (holds the values of version {before})" in what
    assert what.endswith("; and 16 more")


async def test_buckets_that_are_of_another_version_are_not_taken(pair: Pair) -> None:
    if pair.name in ("broadcast", "ipc"):
        pair.transport.version = pair.version
        assert "21 of 21 tensors: model.embed_tokens.weight (was not delivered)" in await fails(pair)
    else:
        # There the offer itself says which version it is.
        pair.train()
        await pair.trainer.offer(pair.version + 1, takers=1)
        delivered = await pair.trainer.deliver()
        await pair.engine.take(delivered.offer)
        with pytest.raises(RunFailure, match=f"a manifest of version {pair.version} came"):
            await pair.engine.verify(type(delivered.manifest)(pair.version, delivered.manifest.entries))
        pair.version += 1
        await pair.heal()


async def test_a_trainer_that_fails_while_it_gathers_leaves_nobody_waiting(pair: Pair) -> None:
    def broken() -> Tensors:
        yield from trainable(pair.model)[:15]
        raise RuntimeError("a rank was lost")

    pair.weights = broken
    pair.train()
    with pytest.raises(RunFailure, match=r"failed at (moving|writing)\. In the trainer: RuntimeError: a rank was lost"):
        await pair.publish()
    await pair.heal()
    pair.train()
    await pair.publish()


class Spoiled:
    """An engine whose module changes between delivery and proof."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, manifest: Any) -> Any:
        await self._engine.flip(B)
        return await self._engine.verify(manifest)


async def test_the_live_module_is_what_is_compared(pair: Pair) -> None:
    assert f"1 of 21 tensors: {B} (holds other values than were sent)" in await fails(pair, engine=Spoiled(pair.engine))


async def test_what_was_derived_from_old_weights_is_told_apart(pair: Pair) -> None:
    await pair.engine.keep_derived(True)
    pair.train(1e-2)
    with pytest.raises(RunFailure, match="engine one: the engine does not serve the weights of version") as caught:
        await pair.publish()
    assert "All tensors are what was sent, so something that was derived from older weights is stale" in str(
        caught.value
    )
    await pair.engine.keep_derived(False)
    await pair.heal()


@pytest.fixture(scope="module", params=TRANSPORTS)
def adapters(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(request.param, tmp_path_factory.mktemp(request.param), lora=True) as made:
        asyncio.run(made.publish())
        yield made


async def test_only_adapters_are_moved_and_a_lost_one_is_named(adapters: Pair) -> None:
    adapters.train()
    names = [name for name, _ in trainable(adapters.model)]
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    found = await adapters.publish(whole=True)
    size = sum(parameter.nbytes for _, parameter in trainable(adapters.model))
    assert found["publish/bytes"] <= size + 2000

    first = [name for name in names if ".layers.0." in name and "q_proj" in name]
    adapters.transport.tensors = replaced(**{key(name): None for name in first})
    what = await fails(adapters)
    assert f"2 of 8 tensors: {first[0]} (was not delivered); {first[1]} (was not delivered)" in what

    adapters.weights = lambda: [(n, t) for n, t in trainable(adapters.model) if n not in first]
    what = await fails(adapters)
    assert f"{first[0]} (was not published)" in what


async def test_an_engine_that_samples_without_its_adapters_is_caught(adapters: Pair) -> None:
    await adapters.engine.ignore_adapters(True)
    adapters.train()
    with pytest.raises(RunFailure, match="merged adapters"):
        await adapters.publish()
    await adapters.engine.ignore_adapters(False)
    await adapters.heal()


@pytest.mark.parametrize("transport", ["broadcast", "delta"])
async def test_another_number_format_is_compared_exactly(transport: str, tmp_path: Any) -> None:
    with pair_of(transport, tmp_path, dtype=torch.bfloat16) as pair:
        await pair.publish()
        for _ in range(3):
            pair.train(1e-5)  # less than what bfloat16 can show
            await pair.publish()

        def corrupt(tensor: torch.Tensor) -> torch.Tensor:
            tensor.view(-1).view(torch.int32)[5] ^= 1  # rounded away in bfloat16, and found all the same
            return tensor

        pair.transport.tensors = replaced(**{key(A): corrupt})
        assert f"1 of 21 tensors: {A}" in await fails(pair)


async def test_two_hundred_clean_publications_raise_no_alarm(tmp_path: Any) -> None:
    with pair_of("broadcast", tmp_path) as pair:
        gaps = []
        for step in range(200):
            gaps.append((await pair.publish())["publish/probe_gap"])
            pair.train(1e-4 if step % 2 else 3e-3)
        assert max(gaps) < 1e-4


def gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


ON_GPUS = [
    *(pytest.param(way, "cuda:0", "cuda:0", marks=[pytest.mark.gpu, gpus(1)]) for way in ("ipc", "disk", "delta")),
    pytest.param("ipc", "cpu", "cuda:0", marks=[pytest.mark.gpu, gpus(1)]),
    pytest.param("ipc", "cuda:0", "cuda:1", marks=[pytest.mark.multi_gpu, gpus(2)]),
    pytest.param("broadcast", "cuda:0", "cuda:1", marks=[pytest.mark.multi_gpu, gpus(2)]),
]


@pytest.mark.parametrize(("transport", "device", "engine_device"), ON_GPUS)
async def test_gpus_get_the_same_and_faults_are_named(
    transport: str, device: str, engine_device: str, tmp_path: Any
) -> None:
    def corrupt(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1).view(torch.int32)[700] ^= 1
        return tensor

    def swapped(tensors: Tensors) -> Tensors:
        held = {name: tensor.detach().clone() for name, tensor in tensors}
        held[A], held[B] = held[B], held[A]
        return iter(held.items())

    with pair_of(transport, tmp_path, device=device, engine_device=engine_device) as pair:
        for _ in range(5):
            await pair.publish()
            pair.train()
        pair.transport.tensors = replaced(**{key(A): corrupt})
        assert f"1 of 21 tensors: {A} (holds other values than were sent)" in await fails(pair)
        pair.transport.tensors = replaced(**{key(B): None})
        assert f"1 of 21 tensors: {B} (was not delivered)" in await fails(pair)
        pair.transport.tensors = swapped
        assert f"2 of 21 tensors: {A} (holds the values of {B})" in await fails(pair)
