"""An engine that sleeps between pieces of work gives what one that never slept gives, and holds no more each time."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sampled import sample

from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.local import LocalEngine
from strop.rollout.engines.vllm_sleep import Kept, blank, caches, gaps, spans_of, spoil

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


@pytest.fixture
def nobody_else() -> None:
    """What was there before the test is left out of `tensors_alive`: looking through millions of objects that other
    tests of this process have made takes longer than all else."""
    gc.collect()
    gc.freeze()


def tensors_alive() -> int:
    """Bytes of all tensors that anybody holds and that were made since the test began."""
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
    nobody_else: None, tiny_model: Make, monkeypatch: pytest.MonkeyPatch, pack: bool
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


# What of vLLM's pool is neither a weight nor a key or value.


def test_every_byte_of_the_pool_is_kept_but_for_what_is_named() -> None:
    pool = torch.arange(256, dtype=torch.uint8)
    start = pool.data_ptr()
    pages = [(start + 128, 128), (start, 64)]
    held = [pool[8:24], pool[200:256]]
    spans = [(one.data_ptr(), one.nbytes) for one in held]
    # Over the edge of a page, and in no page.
    spans += [(start + 120, 12), (start + 70, 4)]
    parts = gaps(pages, spans)
    assert [(address - start, size) for address, size in parts] == [(0, 8), (24, 40), (132, 68)]
    kept = Kept(parts, ctypes.memmove)
    assert kept.nbytes == 8 + 40 + 68
    before = pool.clone()
    pool.fill_(7)
    kept.restore()
    lost = torch.ones(256, dtype=torch.bool)
    for first, size in ((0, 8), (24, 40), (132, 68)):
        lost[first : first + size] = False
    assert torch.equal(pool, torch.where(lost, torch.full_like(pool, 7), before))
    assert gaps(pages, []) == sorted(pages)
    assert gaps(pages, pages) == []


def test_the_memory_behind_a_view_is_all_of_it() -> None:
    whole = torch.zeros(10, 4)
    assert spans_of([whole[2:3]]) == [(whole.data_ptr(), 160)]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.kv_cache = [torch.ones(4)]


class Runner:
    """As vLLM's model runners are."""

    def __init__(self) -> None:
        self.kv_caches = [torch.ones(4), [torch.ones(2), torch.ones(3)]]
        self.model = torch.nn.ModuleList([Layer()])

    def get_model(self) -> torch.nn.Module:
        return self.model


def test_keys_and_values_begin_as_zeros_and_weights_that_nobody_brings_are_seen() -> None:
    runner = Runner()
    found = caches(runner)
    assert [len(one) for one in found] == [4, 2, 3, 4]
    with torch.inference_mode():
        found.append(torch.ones(2))
    blank(found)
    assert not any(one.any() for one in found)
    spoil(runner.model)
    assert torch.isnan(runner.model[0].weight).all()
    assert not torch.isnan(runner.model[0].cache).any()
