"""Engines behind HTTP, in both forms, against a server that samples with a real (tiny) model."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampled import logprobs_of, sample, went_on
from sampling_server import SamplingServer, serving

from strop.errors import RunFailure, UserError
from strop.models.forward import score_streams
from strop.models.save import save_model
from strop.publishing.proof import Probe
from strop.publishing.served import ServedPublisher
from strop.rewards.client import Server
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.dialects import OpenAI, Sglang
from strop.rollout.engines.served import ServedEngine

EOS, CONTEXT = 1, 64


@pytest.fixture
def server(tiny_model: Any, character_tokenizer: Any) -> SamplingServer:
    return SamplingServer(tiny_model(), character_tokenizer, context=CONTEXT)


@pytest.fixture
def address(server: SamplingServer) -> Iterator[str]:
    with serving(server) as found:
        yield found


@pytest.fixture(params=["sglang", "openai"])
async def engine(
    request: Any, address: str, server: SamplingServer, character_tokenizer: Any
) -> AsyncIterator[ServedEngine]:
    made = engine_of(address, request.param, character_tokenizer, server)
    yield made
    await made.close()


def engine_of(
    address: str,
    kind: str,
    tokenizer: Any,
    server: SamplingServer,
    *,
    retries: int = 2,
    timeout: float = 60.0,
    concurrency: int = 8,
) -> ServedEngine:
    return ServedEngine(
        Server(address, timeout, retries, "hidden-key"),
        Sglang() if kind == "sglang" else OpenAI(),
        tokenizer,
        concurrency=concurrency,
        eos_ids=(EOS,),
        seed=5,
        context=CONTEXT,
        vocabulary=int(server.model.get_output_embeddings().weight.shape[0]),
    )


def request(prompt: Sequence[int] = (5, 6, 7), sample: int = 0, new: int = 12, **settings: Any) -> SampleRequest:
    return SampleRequest(tuple(prompt), SampleSettings(new, **settings), (0, sample, 0))


def changed(server: SamplingServer) -> Any:
    """A model with other weights than the server's."""
    model = copy.deepcopy(server.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


# Sampling.


async def test_what_is_sampled_is_the_models(engine: ServedEngine, server: SamplingServer) -> None:
    assert "tiny" in await engine.check()
    asked = [request(sample=at, new=4 + 3 * at, temperature=0.7 + 0.2 * at) for at in range(5)]
    found = await sample(engine, asked)
    for one, result in zip(asked, found, strict=True):
        assert len(result.tokens) == len(result.logprobs) == len(result.versions)
        assert set(result.versions) == {0}
        assert result.finish == ("stop" if result.tokens[-1] == EOS else "length")
        assert np.abs(np.asarray(result.logprobs) - logprobs_of(server.model, one, result)).max() < 1e-4
    # The same draws again, whatever else is asked.
    assert [one.tokens for one in await sample(engine, asked[2:3])] == [found[2].tokens]
    stats = engine.take_stats()
    assert (stats.sequences, stats.sampled_tokens) == (6, sum(len(r.tokens) for r in found) + len(found[2].tokens))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer hidden-key"}


async def test_probes_are_scored(engine: ServedEngine, server: SamplingServer) -> None:
    lists = [[5, 6, 7, 8, 9], [10, 11]]
    for ours, theirs in zip(await engine.score(lists), score_streams(server.model, lists), strict=True):
        assert np.isnan(ours[0])
        assert np.abs(ours[1:] - theirs[1:]).max() < 1e-5
    with pytest.raises(ValueError, match="temperature 1 only"):
        await engine.score(lists, temperature=0.5)


async def test_stop_texts_and_what_does_not_fit(engine: ServedEngine, character_tokenizer: Any) -> None:
    (free,) = await sample(engine, [request(new=20)])
    text = character_tokenizer.decode(free.tokens[3:5])
    (stopped,) = await sample(engine, [request(new=20, stop=(text,))])
    assert stopped.finish == "stop"
    assert character_tokenizer.decode(stopped.tokens).endswith(text)
    with pytest.raises(ValueError, match="do not fit the context of 64"):
        await engine.generate(request(new=62))
    with pytest.raises(ValueError, match="at least one token"):
        await engine.generate(request(()))


async def test_a_failure_that_passes_is_tried_again(engine: ServedEngine, server: SamplingServer) -> None:
    server.faults.add("fails once")
    (found,) = await sample(engine, [request()])
    assert len(found.tokens) == 12 or found.finish == "stop"


async def test_one_that_stays_is_told_without_the_key(engine: ServedEngine, server: SamplingServer) -> None:
    server.faults.add("always fails")
    with pytest.raises(RunFailure, match=r"the server failed at sampling: .*HTTP 503.*3 tries") as caught:
        await engine.generate(request())
    assert "hidden-key" not in str(caught.value)
    assert engine.server.url in caught.value.where


# What a server must be able to do.


@pytest.mark.parametrize(
    ("kind", "fault", "says"),
    [
        ("openai", "no ids", "does not return the ids"),
        ("openai", "no logprobs", "does not return log-probabilities"),
        ("sglang", "no logprobs", "no output_token_logprobs"),
        ("openai", "raw logprobs", "not those at the sampling temperature"),
        ("sglang", "raw logprobs", "not those at the sampling temperature"),
        ("openai", "no scores", "does not score prompts"),
        ("sglang", "no scores", "no input_token_logprobs"),
        ("openai", "always fails", "HTTP 503"),
        ("openai", "odd replies", "its reply has another form"),
        ("sglang", "odd replies", "its reply has another form"),
    ],
)
async def test_one_that_cannot_sample_for_a_run_is_refused(
    kind: str, fault: str, says: str, address: str, server: SamplingServer, character_tokenizer: Any
) -> None:
    server.faults.add(fault)
    engine = engine_of(address, kind, character_tokenizer, server, retries=0)
    try:
        with pytest.raises(UserError, match=says) as caught:
            await engine.check()
        assert address in caught.value.where
    finally:
        await engine.close()


async def test_one_that_is_not_there_is_refused(server: SamplingServer, character_tokenizer: Any) -> None:
    engine = engine_of("http://127.0.0.1:9", "sglang", character_tokenizer, server, retries=0)
    with pytest.raises(UserError, match="does not answer as SGLang does"):
        await engine.check()
    await engine.close()


# New weights.


class Trainer:
    def __init__(self, model: Any) -> None:
        self.model = model

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return score_streams(self.model, token_lists)

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.full(len(tokens), 1e-7, np.float32) for tokens in token_lists]

    def export(self, tokenizer: Any, folder: Path) -> None:
        save_model(self.model, tokenizer, folder)


async def here(work: Any) -> Any:
    return work()


def publisher_of(engine: ServedEngine, tokenizer: Any, folder: Path) -> ServedPublisher:
    return ServedPublisher({"one": engine}, Probe.make(40, floor=1e-4), lambda: folder, tokenizer, here)


async def test_new_weights_are_published_and_proved(
    engine: ServedEngine, server: SamplingServer, character_tokenizer: Any, tmp_path: Path
) -> None:
    publisher = publisher_of(engine, character_tokenizer, tmp_path)
    for version in (1, 2):
        model = changed(server)
        told = await publisher.publish(Trainer(model), version=version)
        assert told["publish/probe_gap"] < 1e-4
        assert told["publish/bytes"] > 10_000
        (found,) = await sample(engine, [request()])
        assert set(found.versions) == {version}
        assert np.abs(np.asarray(found.logprobs) - logprobs_of(model, request(), found)).max() < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["version-000002"]
    assert await engine.update_weights(WeightUpdate(2)) == 2
    with pytest.raises(RunFailure, match="serves version 2"):
        await engine.update_weights(WeightUpdate(3))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("loads nothing", "log-probabilit"),
        ("does not load", "no space"),
        ("no weights", "failed at taking new weights"),
    ],
)
async def test_weights_that_do_not_arrive_stop_the_run(
    fault: str, says: str, engine: ServedEngine, server: SamplingServer, character_tokenizer: Any, tmp_path: Path
) -> None:
    publisher = publisher_of(engine, character_tokenizer, tmp_path)
    await publisher.publish(Trainer(changed(server)), version=1)
    server.faults.add(fault)
    model = changed(server)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    with pytest.raises(RunFailure, match=says):
        await publisher.publish(Trainer(model), version=2)
    # Nothing is sampled with weights that are not proved.
    waiting = asyncio.ensure_future(engine.generate(request()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()


async def test_a_completion_that_is_cut_off_goes_on_with_the_new_weights(
    engine: ServedEngine, server: SamplingServer, character_tokenizer: Any, tmp_path: Path
) -> None:
    old, new = copy.deepcopy(server.model), changed(server)
    publisher = publisher_of(engine, character_tokenizer, tmp_path)
    asked = [request(sample=at, new=40) for at in range(4)]
    running = [asyncio.ensure_future(engine.generate(one)) for one in asked]
    async with asyncio.timeout(60):
        while server.engine._stats.sampled_tokens < 12:
            await asyncio.sleep(0.001)
    await publisher.publish(Trainer(new), version=1)
    for one, task in zip(asked, running, strict=True):
        went_on(one, (await task).plain(), old, new)


async def test_abort_gives_what_there_is(engine: ServedEngine, server: SamplingServer) -> None:
    server.slow = 0.2
    running = [asyncio.ensure_future(engine.generate(request(sample=at, new=50))) for at in range(3)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await engine.abort()
    for task in running:
        found = (await task).plain()
        assert found.finish in ("aborted", "stop", "length")
    server.slow = 0.0
    (after,) = await sample(engine, [request(new=5)])
    assert len(after.tokens) == 5 or after.finish == "stop"


async def test_time_begins_when_a_request_has_a_place_and_commands_need_none(
    address: str, server: SamplingServer, character_tokenizer: Any
) -> None:
    server.slow = 0.4
    engine = engine_of(address, "sglang", character_tokenizer, server, retries=0, timeout=1.5, concurrency=1)
    try:
        found = await sample(engine, [request(sample=at, new=2) for at in range(6)])
        assert all(one.tokens for one in found)
        running = [asyncio.ensure_future(engine.generate(request(sample=at, new=2))) for at in range(6)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            await engine.abort()
        ended = [(await task).finish for task in running]
        assert ended.count("aborted") >= 5
    finally:
        await engine.close()


async def test_a_request_that_is_tried_again_waits_at_the_gate(
    engine: ServedEngine, server: SamplingServer, character_tokenizer: Any, tmp_path: Path
) -> None:
    await engine.check()
    publisher = publisher_of(engine, character_tokenizer, tmp_path)
    server.again = "2"
    server.faults.add("fails once")
    waiting = asyncio.ensure_future(engine.generate(request()))
    async with asyncio.timeout(60):
        while not server._failed:
            await asyncio.sleep(0.001)
    new = changed(server)
    await publisher.publish(Trainer(new), version=4)
    found = (await waiting).plain()
    assert set(found.versions) == {4}
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(new, request(), found)).max() < 1e-4


async def test_nothing_is_asked_while_it_is_paused(engine: ServedEngine, server: SamplingServer) -> None:
    await engine.pause()
    waiting = asyncio.ensure_future(engine.generate(request()))
    await asyncio.sleep(0.05)
    assert not any(path in ("/generate", "/v1/completions") for path, _ in server.asked)
    await engine.resume()
    assert (await waiting).plain().tokens
