"""An engine that sleeps between pieces of work gives what one that never slept gives, and holds no more each time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sampled import sample

from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.local import LocalEngine
from strop.rollout.engines.vllm_sleep import Loose, loose_tensors, spoil

Make = Callable[..., Any]


def work(number: int) -> list[SampleRequest]:
    """A piece: three completions of each of two ragged prompts."""
    random = np.random.default_rng(number)
    prompts = [tuple(random.integers(3, 45, size=size).tolist()) for size in (4 + number % 5, 11)]
    return [
        SampleRequest(prompt, SampleSettings(9), (number, at, sample))
        for at, prompt in enumerate(prompts)
        for sample in range(3)
    ]


def engine_of(model: Any, **options: Any) -> LocalEngine:
    return LocalEngine(model, None, eos_ids=(1,), seed=5, context=64, max_sequences=4, **options)


def tensors_alive() -> int:
    """Bytes of all tensors that anybody holds."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            # Packed weights show no storage.
            packed = thing.is_mkldnn
            place = ("packed", id(thing)) if packed else ("plain", thing.untyped_storage().data_ptr())
            storages[place] = thing.numel() * thing.element_size() if packed else thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("pack", [False, True])
async def test_twenty_sleeps_between_pieces_of_work(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, pack: bool
) -> None:
    from strop.rollout.engines import packed_linear

    monkeypatch.setattr(packed_linear, "SMALLEST", 1)
    model = tiny_model()
    unslept, engine = (engine_of(model, pack_weights=pack) for _ in range(2))
    asleep = []
    for number in range(20):
        if number % 4 == 3:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.01)
            for one in (unslept, engine):
                await one.update_weights(WeightUpdate(number))
        assert await sample(engine, work(number)) == await sample(unslept, work(number))
        # Also in the middle of one.
        task = asyncio.create_task(sample(engine, work(100 + number)))
        async with asyncio.timeout(60):
            while engine._stats.sampled_tokens < 70 + 90 * number and not task.done():
                await asyncio.sleep(0)
        await engine.sleep()
        await engine.wake()
        found, expected = await task, await sample(unslept, work(100 + number))
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        awake = tensors_alive()
        await engine.sleep()
        asleep.append(tensors_alive())
        assert asleep[-1] < awake
        await engine.wake()
    # The other engine's cache has the longest prompt after five pieces.
    assert set(asleep[6:]) == {asleep[6]}
    for one in (unslept, engine):
        await one.close()


# What of vLLM's model is neither parameter nor buffer.


class Backend:
    """As an attention backend, which is no module."""

    def __init__(self, slopes: torch.Tensor) -> None:
        self.slopes = slopes


Backend.__module__ = "vllm.v1.attention"


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.range = torch.tensor(7.0)
        self.view = self.weight.data
        self.several = [torch.arange(3.0), {"inner": torch.ones(2)}]
        self.impl = Backend(torch.tensor([1.0, 2.0]))
        self.kv = torch.zeros(4)


def test_loose_tensors_are_kept_where_their_memory_is_lost() -> None:
    model = torch.nn.ModuleList([Layer(), Layer()])
    model[1].range = model[0].range
    found = list(loose_tensors(model))
    assert len(found) == 9
    lost = {one.data_ptr() for one in found} - {layer.kv.data_ptr() for layer in model}
    kept = Loose(model, lambda address: address in lost)
    assert len(kept) == 7
    before = [one.clone() for one in found]
    for one in found:
        one.fill_(-1.0)
    kept.restore()
    for one, old in zip(found, before, strict=True):
        changed = one.data_ptr() not in lost
        assert torch.equal(one, torch.full_like(old, -1.0) if changed else old)


def test_weights_that_nobody_brings_are_seen() -> None:
    model = Layer()
    spoil(model)
    assert torch.isnan(model.weight).all()
    assert not torch.isnan(model.cache).any()
