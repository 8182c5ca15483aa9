"""The engine `vllm` with its layers divided among two GPUs, a model of bfloat16 on the first of them.

STROP_TEST_EAGER=1 starts it without compiling and without CUDA graphs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from forgetful_worker import IntoForgetful
from sampled import llama, sample, shake, told_of_a_killed_rank, updated_half_way
from test_vllm_over_ranks import all_end, workers_of

from strop.config.model import LoraConfig
from strop.errors import RunFailure
from strop.models.forward import score_streams
from strop.models.load import add_lora
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.vllm import VllmEngine
from strop.rollout.engines.vllm_core import VllmCore
from strop.rollout.engines.vllm_start import VllmSettings

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]
in_one_loop = pytest.mark.asyncio(loop_scope="module")

VOCABULARY, CONTEXT, MEMORY = 96, 256, 0.06
# Of bfloat16 with another implementation, largest and mean; and of other weights.
CLOSE, MEAN, OTHER = 0.3, 0.03, 0.2


def model_of(seed: int) -> Any:
    model = llama(VOCABULARY, CONTEXT, eos=1, hidden=128, heads=4, key_value_heads=2)
    shake(model, seed)
    return model.to("cuda:0", torch.bfloat16)


def core_of(model: Any, **changes: Any) -> VllmCore:
    eager = bool(os.environ.get("STROP_TEST_EAGER"))
    settings = VllmSettings(
        torch.bfloat16, CONTEXT, 16, 512, memory=MEMORY, eager=eager, prefix_caching=True, tensor=2, **changes
    )
    # Buckets that are smaller than the embeddings.
    workers = IntoForgetful(2, bucket_bytes=20_000, device="cuda:0")
    core = VllmCore(model.config, type(model).__name__, settings, workers)
    # Nothing goes through the machine's memory.
    assert workers._device.type == "cuda"
    return core


@pytest.fixture(scope="module")
def core() -> Iterator[VllmCore]:
    made = core_of(model_of(0))
    yield made
    mine = workers_of(made)
    made.close()
    assert all_end(mine)


async def engine_of(core: VllmCore, model: Any, **settings: Any) -> VllmEngine:
    engine = VllmEngine(model, lambda: core, None, eos_ids=(1,), seed=3, context=CONTEXT, **settings)
    await engine.update_weights(WeightUpdate(0))
    return engine


def request(stream: int, new: int) -> SampleRequest:
    prompt = np.random.default_rng(stream).integers(3, VOCABULARY, size=6 + stream)
    return SampleRequest(tuple(prompt.tolist()), SampleSettings(new), (stream, 0, 0))


def apart(model: Any, asked: SampleRequest, tokens: Any, logprobs: Any) -> np.ndarray:
    """Distances of the log-probabilities to those of the module."""
    (said,) = score_streams(model, [[*asked.tokens, *tokens]])
    return np.abs(said[len(asked.tokens) :] - np.asarray(logprobs))


@in_one_loop
async def test_it_samples_from_the_model_and_the_same_again(core: VllmCore) -> None:
    model = model_of(1)
    engine = await engine_of(core, model)
    asked = [request(number, 40) for number in range(6)]
    found = await sample(engine, asked)
    differ = np.concatenate(
        [apart(model, one, other.tokens, other.logprobs) for one, other in zip(asked, found, strict=True)]
    )
    assert differ.max() < CLOSE
    assert differ.mean() < MEAN
    others = model_of(2)
    differ = np.concatenate(
        [apart(others, one, other.tokens, other.logprobs) for one, other in zip(asked, found, strict=True)]
    )
    assert differ.mean() > OTHER


@in_one_loop
async def test_new_weights_reach_both_gpus_in_the_middle_of_completions(core: VllmCore) -> None:
    model = model_of(3)
    engine = await engine_of(core, model)
    old = copy.deepcopy(model)
    asked = [request(number, 120) for number in range(4)]
    found = await updated_half_way(engine, asked, lambda: shake(model, 4), after=40)
    for one, other in zip(asked, found, strict=True):
        count = list(other.versions).count(0)
        assert list(other.versions) == sorted(other.versions)
        before = apart(old, one, other.tokens, other.logprobs)[:count]
        after = apart(model, one, other.tokens, other.logprobs)[count:]
        assert before.max(initial=0) < CLOSE
        assert after.max(initial=0) < CLOSE
        assert np.concatenate([before, after]).mean() < MEAN


@in_one_loop
@pytest.mark.parametrize("rank", [0, 1])
async def test_what_a_gpu_does_not_keep_is_named(core: VllmCore, rank: int) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    model = model_of(5)
    engine = await engine_of(core, model)
    shake(model, 6)
    core._call("forget", (rank, name))
    with pytest.raises(RunFailure, match=rf"other values than it was given, in 1 of 21 tensors: {name}"):
        await engine.update_weights(WeightUpdate(1))
    await engine.update_weights(WeightUpdate(2))
    (found,) = await sample(engine, [request(0, 40)])
    assert apart(model, request(0, 40), found.tokens, found.logprobs).mean() < MEAN


@in_one_loop
@pytest.mark.parametrize("rank", [5])
async def test_adapters_beside_the_weights_reach_both_gpus(rank: int) -> None:
    base = model_of(6)
    core = core_of(base, adapter_rank=rank)
    try:
        model = add_lora(copy.deepcopy(base), LoraConfig(rank=rank), 0, updates=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        engine = await engine_of(core, model, merges=False)
        asked = [request(number, 40) for number in range(4)]
        found = await sample(engine, asked)
        for judge, low, high in ((model, 0.0, MEAN), (base, OTHER, np.inf)):
            differ = [apart(judge, one, other.tokens, other.logprobs) for one, other in zip(asked, found, strict=True)]
            assert low <= np.concatenate(differ).mean() < high
    finally:
        core.close()


@in_one_loop
async def test_a_killed_rank_is_told_and_none_is_left() -> None:
    core = core_of(model_of(7))
    mine = workers_of(core)
    try:
        await told_of_a_killed_rank(await engine_of(core, model_of(7)), request(0, 200), mine, hangs=False)
    finally:
        core.close()
    assert all_end(mine)
