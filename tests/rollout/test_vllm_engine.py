"""The engine `vllm` with the real vLLM, on a tiny model; skipped where vLLM is not installed (`.ci/run` has it)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sampled import Scores, logprobs_of, model_for_vllm, sample, until_sampled, updated_half_way, went_on

from strop.config.model import LoraConfig
from strop.errors import RunFailure
from strop.models.forward import score_streams
from strop.models.load import add_lora
from strop.publishing.proof import Probe
from strop.publishing.shared import SharedPublisher
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.vllm import VllmEngine
from strop.rollout.engines.vllm_core import VllmCore
from strop.rollout.engines.vllm_start import VllmSettings
from strop.rollout.engines.vllm_weights import Sent, places, stale

pytest.importorskip("vllm")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SEED, EOS, CONTEXT = 11, 1, 128


MODEL = model_for_vllm(96, CONTEXT, eos=EOS)


@pytest.fixture(scope="module")
def core() -> Iterator[VllmCore]:
    before = torch.get_rng_state()
    settings = VllmSettings(torch.float32, CONTEXT, 16, 512, memory=0.3, eager=True, prefix_caching=True)
    made = VllmCore(MODEL.config, type(MODEL).__name__, settings)
    assert torch.equal(torch.get_rng_state(), before), "vLLM must leave the global generators alone"
    yield made
    made.close()


async def engine_of(core: VllmCore, model: Any = MODEL, tokenizer: Any = None, *, version: int = 0) -> VllmEngine:
    engine = VllmEngine(model, lambda: core, tokenizer, eos_ids=(EOS,), seed=SEED, context=CONTEXT)
    await engine.update_weights(WeightUpdate(version))
    return engine


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(3, 95, size=length).tolist())


def request(
    prompt: Sequence[int] = prompt_of(6), stream: tuple[int, ...] = (0, 0, 0), new: int = 8, **settings: Any
) -> SampleRequest:
    return SampleRequest(tuple(prompt), SampleSettings(new, **settings), stream)


async def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(core: VllmCore) -> None:
    engine = await engine_of(core, version=3)
    asked = [
        request(prompt_of(length, number), (number, at, 0), new=4 + 5 * at, temperature=temperature)
        for number, (length, temperature) in enumerate([(5, 1.0), (33, 0.7), (1, 1.3)])
        for at in range(3)
    ]
    for one, found in zip(asked, await sample(engine, asked), strict=True):
        assert len(found.tokens) == len(found.logprobs) == len(found.versions)
        assert set(found.versions) == {3}
        assert found.finish == ("stop" if found.tokens[-1] == EOS else "length")
        assert EOS not in found.tokens[:-1]
        if found.finish == "length":
            assert len(found.tokens) == one.settings.max_new_tokens
        assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, one, found)).max() < 1e-4
    stats = engine.take_stats()
    assert stats.sequences == 9
    assert stats.sampled_tokens >= 9


async def test_a_draw_does_not_depend_on_its_neighbours(core: VllmCore) -> None:
    engine = await engine_of(core)
    asked = [request(stream=(0, sample, 0)) for sample in range(6)]
    together = await sample(engine, asked)
    alone = [(await sample(engine, [one]))[0] for one in reversed(asked)][::-1]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({tuple(one.tokens) for one in together}) > 1


async def test_greedy_takes_the_likeliest_token_and_leaves_global_randomness_alone(core: VllmCore) -> None:
    engine = await engine_of(core)
    before = torch.get_rng_state()
    asked = [request(temperature=0.0), request(stream=(1, 0, 0))]
    found, _ = await sample(engine, asked)
    assert torch.equal(torch.get_rng_state(), before)
    ids = list(asked[0].tokens)
    for token in found.tokens:
        with torch.no_grad():
            assert token == int(MODEL(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, asked[0], found)).max() < 1e-4


async def test_new_weights_are_served_and_nothing_of_the_old_ones(core: VllmCore) -> None:
    model = copy.deepcopy(MODEL)
    engine = await engine_of(core, model)
    # Longer than a block of vLLM's cache, or nothing of it would be kept.
    asked = request(prompt_of(70), new=4)
    await sample(engine, [asked])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    assert await engine.update_weights(WeightUpdate(7)) == 7
    (found,) = await sample(engine, [asked])
    assert set(found.versions) == {7}
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(model, asked, found)).max() < 1e-4
    (scored,) = await engine.score([asked.tokens])
    assert np.isnan(scored[0])
    assert np.abs(scored[1:] - score_streams(model, [asked.tokens])[0][1:]).max() < 1e-4


async def test_new_weights_between_the_tokens_of_a_completion(core: VllmCore) -> None:
    model = copy.deepcopy(MODEL)
    engine = await engine_of(core, model)
    asked = request(new=40)
    task = asyncio.create_task(engine.generate(asked))
    await until_sampled(engine, 5)
    await engine.pause()
    there = engine._stats.sampled_tokens
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    await engine.update_weights(WeightUpdate(1))
    await asyncio.sleep(0.05)
    assert engine._stats.sampled_tokens == there
    await engine.resume()
    found = (await task).plain()
    assert found.versions[:there] == [0] * there
    assert set(found.versions[there:]) <= {1}
    assert len(found.tokens) > there
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(model, asked, found))[there:].max() < 1e-4


async def test_adapters_are_merged(core: VllmCore) -> None:
    model = add_lora(copy.deepcopy(MODEL), LoraConfig(rank=4), 0, updates=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    engine = await engine_of(core, model)
    (scored,) = await engine.score([prompt_of(20)])
    assert np.abs(scored[1:] - score_streams(model, [prompt_of(20)])[0][1:]).max() < 1e-4
    assert np.abs(scored[1:] - score_streams(MODEL, [prompt_of(20)])[0][1:]).max() > 1e-2


@pytest.fixture(scope="module")
def beside() -> Iterator[VllmCore]:
    """A vLLM that has adapters beside the weights."""
    settings = VllmSettings(torch.float32, CONTEXT, 16, 512, 0.3, eager=True, prefix_caching=True, adapter_rank=5)
    made = VllmCore(MODEL.config, type(MODEL).__name__, settings)
    yield made
    made.close()


def with_adapters(*, rank_stabilised: bool = False) -> Any:
    lora = LoraConfig(rank=5, alpha=7, rank_stabilised=rank_stabilised)
    model = add_lora(copy.deepcopy(MODEL), lora, 0, updates=1)
    change_adapters(model, 0)
    return model


def change_adapters(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


async def with_them_beside(core: VllmCore, model: Any) -> VllmEngine:
    engine = VllmEngine(model, lambda: core, None, eos_ids=(EOS,), seed=SEED, context=CONTEXT, merges=False)
    await engine.update_weights(WeightUpdate(0))
    return engine


@pytest.mark.parametrize("rank_stabilised", [False, True])
async def test_adapters_are_kept_beside_the_weights(beside: VllmCore, rank_stabilised: bool) -> None:
    model = with_adapters(rank_stabilised=rank_stabilised)
    engine = await with_them_beside(beside, model)
    for seed in range(3):
        change_adapters(model, seed)
        await engine.update_weights(WeightUpdate(1 + seed))
        asked = [request(prompt_of(70), (number, 0, 0)) for number in range(3)]
        for one, found in zip(asked, await sample(engine, asked), strict=True):
            assert set(found.versions) == {1 + seed}
            assert np.abs(np.asarray(found.logprobs) - logprobs_of(model, one, found)).max() < 1e-4
        (scored,) = await engine.score([prompt_of(70)])
        assert np.abs(scored[1:] - score_streams(model, [prompt_of(70)])[0][1:]).max() < 1e-4
        assert np.abs(scored[1:] - score_streams(MODEL, [prompt_of(70)])[0][1:]).max() > 1e-2


async def test_weights_beside_adapters_are_brought_when_they_change_and_not_otherwise(
    beside: VllmCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pushed = with_adapters(), list[int]()
    push = beside.push

    def counted(weights: Any, adapters: Any = None) -> None:
        pushed.append(len(weights))
        push(weights, adapters)

    monkeypatch.setattr(beside, "push", counted)
    engine = await with_them_beside(beside, model)
    await engine.update_weights(WeightUpdate(1))
    assert pushed == [21, 0, 0]
    with torch.no_grad():
        model.get_base_model().model.norm.weight.mul_(1.5)
    await engine.update_weights(WeightUpdate(2))
    assert pushed == [21, 0, 0, 21]
    (scored,) = await engine.score([prompt_of(20)])
    assert np.abs(scored[1:] - score_streams(model, [prompt_of(20)])[0][1:]).max() < 1e-4
    # Level 2 drops weights, so that all are brought again.
    engine._sleep_level = 2
    await engine.sleep()
    await engine.update_weights(WeightUpdate(3))
    assert pushed[-1] == 21


async def test_new_adapters_between_the_tokens_of_a_completion(beside: VllmCore) -> None:
    model = with_adapters()
    engine = await with_them_beside(beside, model)
    old = copy.deepcopy(model)
    asked = [request(stream=(number, 0, 0), new=40) for number in range(4)]
    found = await updated_half_way(engine, asked, lambda: change_adapters(model, 5), after=10)
    for one, other in zip(asked, found, strict=True):
        went_on(one, other, old, model)


async def test_an_old_adapter_does_not_pass_the_proof(beside: VllmCore, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters()
    engine = await with_them_beside(beside, model)
    publisher = SharedPublisher(engine, Probe.make(96, floor=1e-4))
    for version in (1, 2):
        change_adapters(model, version)
        assert (await publisher.publish(Scores(model), version=version))["publish/probe_gap"] < 1e-4
    monkeypatch.setattr(beside, "_put_adapters", lambda folder: None)
    change_adapters(model, 3)
    with pytest.raises(RunFailure, match="log-probabilit"):
        await publisher.publish(Scores(model), version=3)


async def test_stop_texts_end_a_completion_as_in_local(core: VllmCore) -> None:
    class Letters:
        def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            return "".join(f"<{token}>" for token in tokens)

    engine = await engine_of(core, tokenizer=Letters())
    (free,) = await sample(engine, [request(new=12)])
    assert len(free.tokens) > 4
    stop = f"<{free.tokens[2]}><{free.tokens[3]}>"
    pairs = [f"<{a}><{b}>" for a, b in zip(free.tokens, free.tokens[1:], strict=False)]
    first = pairs.index(stop) + 1
    stopped, other = await sample(engine, [request(new=12, stop=(stop,)), request(stream=(5, 0, 0))])
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish == "stop"
    assert len(other.tokens) == 8 or other.finish == "stop"


async def test_given_up_and_aborted_requests(core: VllmCore) -> None:
    engine = await engine_of(core)
    given_up = asyncio.create_task(engine.generate(request(new=100)))
    aborted = asyncio.create_task(engine.generate(request(stream=(1, 0, 0), new=100)))
    await until_sampled(engine, 6)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await engine.abort()
    found = (await aborted).plain()
    assert found.finish == "aborted"
    assert 0 < len(found.tokens) < 100
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, request(), found)).max() < 1e-4
    # Nothing of them is left, and others go on.
    (after,) = await sample(engine, [request(new=5)])
    assert len(after.tokens) == 5 or after.finish == "stop"
    assert not engine._requests


async def test_the_probe_is_scored_while_the_engine_is_paused(core: VllmCore) -> None:
    engine = await engine_of(core)
    running = asyncio.create_task(engine.generate(request(new=30)))
    await until_sampled(engine, 3)
    await engine.pause()
    async with asyncio.timeout(60):
        (scored,) = await engine.score([prompt_of(12)])
    assert np.abs(scored[1:] - score_streams(MODEL, [prompt_of(12)])[0][1:]).max() < 1e-4
    await engine.resume()
    found = (await running).plain()
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, request(), found)).max() < 1e-4


async def test_a_stale_tensor_stops_the_run(core: VllmCore, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(MODEL)
    engine = await engine_of(core, model)
    publisher = SharedPublisher(engine, Probe.make(96, floor=1e-4))
    for version in (1, 2):
        assert (await publisher.publish(Scores(model), version=version))["publish/probe_gap"] < 1e-4
    push = core.push

    def without(*names: str) -> None:
        """The old values of these, in place of the new ones."""
        old = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in names}
        monkeypatch.setattr(core, "push", lambda weights: push({**weights, **old}))

    # Kept by vLLM in a form of its own: only what is computed with it can tell.
    without("model.layers.1.self_attn.k_proj.weight")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    with pytest.raises(RunFailure, match="log-probabilit"):
        await publisher.publish(Scores(model), version=3)


async def test_what_vllm_holds_is_compared_with_what_it_was_given(core: VllmCore) -> None:
    weights = dict(MODEL.state_dict())
    core.push(weights)
    assert stale(core._model, weights) == []
    found = places(core._model, Sent.of(weights).shapes)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(found)
    changed = {**weights, "model.norm.weight": weights["model.norm.weight"] * 2}
    assert stale(core._model, changed) == ["model.norm.weight"]


# Sleep. On a CPU vLLM keeps its memory; everything else of a sleep is as it is on a GPU, where
# `test_gpu_vllm_sleep.py` looks at the memory.


@pytest.mark.parametrize("level", [1, 2])
async def test_what_runs_and_what_waits_goes_on_after_a_sleep(core: VllmCore, level: Any) -> None:
    model = copy.deepcopy(MODEL)
    asked = [request(stream=(number, 0, 0), new=40) for number in range(4)]
    late = request(prompt_of(70), (9, 0, 0), new=6)
    unslept = [one.tokens for one in await sample(await engine_of(core, model), [*asked, late])]
    engine = await engine_of(core, model)
    engine._sleep_level = level
    tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
    for more in (5, 30, 60):
        async with asyncio.timeout(60):
            while engine._stats.sampled_tokens < more:
                await asyncio.sleep(0)
        await engine.sleep()
        await engine.sleep()
        there = engine._stats.sampled_tokens
        if more == 5:
            tasks.append(asyncio.create_task(engine.generate(late)))
        await asyncio.sleep(0.05)
        assert engine._stats.sampled_tokens == there
        assert more > 5 or not tasks[4].done()
        await engine.wake()
        if level == 2:
            await asyncio.sleep(0.02)
            assert engine._stats.sampled_tokens == there, "its weights are gone until somebody brings them"
            await engine.update_weights(WeightUpdate(0))
    async with asyncio.timeout(60):
        found = [(await task).plain() for task in tasks]
    assert [one.tokens for one in found] == unslept
    for one, other in zip([*asked, late], found, strict=True):
        assert np.abs(np.asarray(other.logprobs) - logprobs_of(model, one, other)).max() < 1e-4


async def test_scores_wait_for_a_sleeping_engine_but_not_for_ever(core: VllmCore) -> None:
    engine = await engine_of(core)
    await engine.sleep()
    waiting = asyncio.create_task(engine.score([prompt_of(12)]))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engine.pause()
    with pytest.raises(RunFailure, match="a sleeping engine"):
        await engine.score([prompt_of(12)])
    await engine.resume()
    await engine.wake()
    (scored,) = await waiting
    assert np.abs(scored[1:] - score_streams(MODEL, [prompt_of(12)])[0][1:]).max() < 1e-4


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_cannot_wake_serves_no_version(
    core: VllmCore, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    engine = await engine_of(core)
    engine._sleep_level = level
    await engine.sleep()
    waiting = asyncio.create_task(engine.generate(request()))

    def fail() -> None:
        raise RunFailure("no room")

    with monkeypatch.context() as patch:
        patch.setattr(core, "wake_cache", fail)
        with pytest.raises(RunFailure, match="no room"):
            await (engine.wake() if level == 1 else engine.update_weights(WeightUpdate(1)))
        with pytest.raises(RunFailure, match="serves no version"):
            await waiting
    # The next publication mends it.
    await engine.update_weights(WeightUpdate(2))
    (found,) = await sample(engine, [request()])
    assert set(found.versions) == {2}


async def test_an_engine_that_slept_half_is_of_no_use(core: VllmCore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await engine_of(core)

    def fail(*_: Any) -> None:
        raise AssertionError("Memory usage increased after sleeping.")

    with monkeypatch.context() as patch:
        patch.setattr("strop.rollout.engines.vllm_sleep.fall_asleep", fail)
        with pytest.raises(RunFailure, match="could not give its memory back"):
            await engine.sleep()
    with pytest.raises(RunFailure, match="serves no version"):
        await engine.generate(request())
    with pytest.raises(RunFailure, match="serves nothing any more"):
        await engine.update_weights(WeightUpdate(1))
    # For the tests that follow: nothing of it slept.
    core._asleep = ["scheduling"]
    core.wake_cache()
