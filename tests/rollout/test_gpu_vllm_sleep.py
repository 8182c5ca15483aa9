"""vLLM on a GPU: what it gives back in a sleep, and that it samples afterwards as if it had never slept.

One process has one vLLM that sleeps at a time, so all tests share it. STROP_TEST_EAGER=1 starts it without compiling
and without CUDA graphs, which takes less time and leaves out that graphs find their memory where it was.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sampled import llama, sample, shake

from strop.models.forward import score_streams
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines import vllm_weights
from strop.rollout.engines.vllm import VllmEngine
from strop.rollout.engines.vllm_core import VllmCore
from strop.rollout.engines.vllm_start import VllmSettings

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

VOCABULARY, CONTEXT, EOS, MEMORY = 96, 256, 1, 0.06
CYCLES = 20
# Of one engine with itself: batches may be put together another way. And of bfloat16 with another implementation.
SAME, CLOSE, MEAN = 0.02, 0.25, 0.03


def model_of() -> Any:
    return llama(VOCABULARY, CONTEXT, eos=EOS, hidden=128).to("cuda", torch.bfloat16)


MODEL = model_of() if torch.cuda.is_available() else None


class Held:
    """The only vLLM of this process."""

    def __init__(self) -> None:
        self.core: VllmCore | None = None

    def start(self, *, eager: bool) -> VllmCore:
        assert self.core is None
        settings = VllmSettings(
            torch.bfloat16, CONTEXT, 16, 512, memory=MEMORY, eager=eager, prefix_caching=True, sleeps=True
        )
        self.core = VllmCore(MODEL.config, type(MODEL).__name__, settings)
        return self.core

    def close(self) -> None:
        if self.core is not None:
            core, self.core = self.core, None
            core.close()


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    made = Held()
    made.start(eager=bool(os.environ.get("STROP_TEST_EAGER")))
    yield made
    made.close()


async def engine_of(held: Held, model: Any, level: Any) -> VllmEngine:
    core = held.core
    assert core is not None
    engine = VllmEngine(model, lambda: core, None, eos_ids=(), seed=3, context=CONTEXT, sleep_level=level)
    await engine.update_weights(WeightUpdate(0))
    return engine


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(3, VOCABULARY, size=length).tolist())


ASKED = [
    SampleRequest(prompt_of(length), SampleSettings(24, temperature=0.0), (at, 0, 0))
    for at, length in enumerate([5, 40, 90, 17])
]


async def look(engine: VllmEngine) -> tuple[list[Sequence[int]], np.ndarray, np.ndarray]:
    """(greedy tokens, their log-probabilities, those of the prompts)."""
    found = await sample(engine, ASKED)
    scored = await engine.score([one.tokens for one in ASKED])
    return (
        [one.tokens for one in found],
        np.concatenate([one.logprobs for one in found]),
        np.concatenate([one[1:] for one in scored]),
    )


def gap(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def as_the_module_says(model: Any, found: tuple[list[Sequence[int]], np.ndarray, np.ndarray]) -> None:
    """What transformers' module, which never slept, says of the same tokens."""
    whole = [[*one.tokens, *tokens] for one, tokens in zip(ASKED, found[0], strict=True)]
    said = score_streams(model, whole)
    prompts = np.concatenate([one[1 : len(asked.tokens)] for one, asked in zip(said, ASKED, strict=True)])
    sampled = np.concatenate([one[len(asked.tokens) :] for one, asked in zip(said, ASKED, strict=True)])
    for ours, theirs in ((found[2], prompts), (found[1], sampled)):
        assert not np.isnan(ours).any()
        assert gap(ours, theirs) < CLOSE
        assert float(np.abs(ours - theirs).mean()) < MEAN


def driver_used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("level", [1, 2])
async def test_twenty_sleeps_with_other_weights_in_between(held: Held, level: Any) -> None:
    model = copy.deepcopy(MODEL)
    shake(model, 1000)
    engine = await engine_of(held, model, level)
    allocated, used, before = [], [], None
    for cycle in range(CYCLES):
        # The same weights, before the sleep and after it.
        expected = await look(engine)
        if before is not None:
            assert gap(before[2], expected[2]) > 10 * SAME, "the weights of two cycles cannot be told apart"
        before = expected
        torch.cuda.empty_cache()
        awake = driver_used()
        await engine.sleep()
        freed = awake - driver_used()
        # Nearly all of it is the KV cache.
        assert freed > 0.3 * MEMORY * torch.cuda.mem_get_info()[1]
        assert held.core is not None
        kept = {tag: one.nbytes for tag, one in held.core._kept.items()}
        assert set(kept) == ({"kv_cache"} if level == 1 else {"kv_cache", "weights"})
        assert sum(kept.values()) < 256 << 20, kept
        # As a trainer would fill what was freed: nothing of it may come back as weights.
        filled = torch.full((int(freed * 0.8) // 2,), float("nan"), dtype=torch.bfloat16, device="cuda")
        del filled
        waiting = asyncio.create_task(engine.generate(ASKED[1]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.wake()
        if level == 2:
            await engine.update_weights(WeightUpdate(cycle))
        assert (await waiting).plain().tokens == expected[0][1]
        found = await look(engine)
        assert found[0] == expected[0]
        assert gap(found[1], expected[1]) < SAME
        assert gap(found[2], expected[2]) < SAME
        as_the_module_says(model, found)
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_allocated())
        used.append(driver_used())
        shake(model, cycle)
        await engine.update_weights(WeightUpdate(cycle + 1))
    assert abs(allocated[-1] - allocated[0]) <= 0.01 * allocated[0], allocated
    assert used[-1] <= used[0] + 0.01 * MEMORY * torch.cuda.mem_get_info()[1] + (64 << 20), used


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_that_run_go_on_after_a_sleep(held: Held, level: Any) -> None:
    model = copy.deepcopy(MODEL)
    shake(model, 7)
    engine = await engine_of(held, model, level)
    asked = [SampleRequest(prompt_of(9 + at), SampleSettings(120), (at, 0, 0)) for at in range(8)]
    tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
    for more in (40, 200, 500):
        async with asyncio.timeout(120):
            while engine._stats.sampled_tokens < more:
                await asyncio.sleep(0)
        await engine.sleep()
        there = engine._stats.sampled_tokens
        await asyncio.sleep(0.02)
        assert engine._stats.sampled_tokens == there
        await engine.wake()
        if level == 2:
            await engine.update_weights(WeightUpdate(0))
    async with asyncio.timeout(120):
        found = [(await task).plain() for task in tasks]
    assert [len(one.tokens) for one in found] == [120] * 8
    said = score_streams(model, [[*one.tokens, *result.tokens] for one, result in zip(asked, found, strict=True)])
    ours = np.concatenate([result.logprobs for result in found])
    theirs = np.concatenate([one[-120:] for one in said])
    assert gap(ours, theirs) < CLOSE
    assert float(np.abs(ours - theirs).mean()) < MEAN


async def test_a_weight_that_nobody_brings_is_seen(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of level 2 nothing is left of the old weights, so one that is missing cannot pass for itself."""
    model = copy.deepcopy(MODEL)
    shake(model, 11)
    engine = await engine_of(held, model, 2)
    core = held.core
    assert core is not None
    load = core._model.load_weights
    name = "model.layers.1.mlp.down_proj.weight"

    def without(weights: Any) -> Any:
        return load((key, value) for key, value in weights if key != name)

    await engine.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(core._model, "load_weights", without)
        patch.setattr(vllm_weights, "stale", lambda model, weights: [])
        await engine.update_weights(WeightUpdate(1))
    (scored,) = await engine.score([ASKED[1].tokens])
    assert np.isnan(scored[1:]).any()
    # A sleep takes the NaN out of keys and values too.
    await engine.sleep()
    await engine.update_weights(WeightUpdate(2))
    as_the_module_says(model, await look(engine))


async def test_another_engine_is_started_after_this_one_was_closed_asleep(held: Held) -> None:
    model = copy.deepcopy(MODEL)
    shake(model, 5)
    engine = await engine_of(held, model, 2)
    await engine.sleep()
    core, held.core = held.core, None
    await engine.close()
    del core, engine
    held.start(eager=True)
    again = await engine_of(held, model, 2)
    expected = await look(again)
    await again.sleep()
    await again.update_weights(WeightUpdate(1))
    found = await look(again)
    assert found[0] == expected[0]
    as_the_module_says(model, found)
