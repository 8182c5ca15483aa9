"""The local engine against one-token-at-a-time sampling with the plain model, whatever else goes on at the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from eager_graphs import EagerDecoder, capture_on_a_cpu

from strop.models.forward import score_streams
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings, WeightUpdate
from strop.rollout.engines import graphs, local
from strop.rollout.engines.graphs import NotCaptured
from strop.rollout.engines.local import LocalEngine
from strop.rollout.sampling import stream_key, uniforms

SEED, EOS = 11, 1
Make = Callable[..., Any]


@pytest.fixture(params=["plain", "captured"], autouse=True)
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the engine waits for each step, or launches the next one before it looks at what is drawn."""
    if request.param == "captured":
        capture_on_a_cpu(monkeypatch)
    return str(request.param)


def engine_of(model: Any, tokenizer: Any = None, **options: Any) -> LocalEngine:
    return LocalEngine(model, tokenizer, **{"eos_ids": (EOS,), "seed": SEED, "context": 512, **options})


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(3, 45, size=length).tolist())


def request(
    prompt: Sequence[int] = prompt_of(6), stream: tuple[int, ...] = (0, 0, 0), new: int = 12, **settings: Any
) -> SampleRequest:
    return SampleRequest(tuple(prompt), SampleSettings(new, **settings), stream)


def groups(temperature: float = 1.0) -> list[SampleRequest]:
    """Three completions of each of four ragged prompts."""
    return [
        request(prompt_of(length, number), (number, sample, 0), new=4 + 5 * sample, temperature=temperature)
        for number, length in enumerate([5, 33, 1, 12])
        for sample in range(3)
    ]


async def sample(engine: LocalEngine, requests: Sequence[SampleRequest]) -> list[SampleResult]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(r) for r in requests)))


async def sampled_tokens(engine: LocalEngine, count: int) -> None:
    """Let the engine work until it has sampled so many tokens."""
    async with asyncio.timeout(60):
        while engine._stats.sampled_tokens < count:
            await asyncio.sleep(0)


@torch.no_grad()
def one_at_a_time(model: Any, asked: SampleRequest, eos: Sequence[int] = (EOS,)) -> SampleResult:
    """What the request must give: the plain model's whole forward pass for each token, drawn by the inverse CDF."""
    tokens, logprobs = [], []
    key = np.asarray([stream_key(SEED, asked.stream)])
    temperature = asked.settings.temperature or 1.0
    while len(tokens) < asked.settings.max_new_tokens:
        ids = torch.tensor([[*asked.tokens, *tokens]])
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, -1].double() / temperature, -1)
        u = float(uniforms(key, np.asarray([len(tokens)]))[0])
        token = int(torch.searchsorted(logp.exp().cumsum(-1), u, right=True))
        token = token if asked.settings.temperature else int(logp.argmax())
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token in eos:
            return SampleResult(tokens, logprobs, [0] * len(tokens), "stop")
    return SampleResult(tokens, logprobs, [0] * len(tokens), "length")


def same(found: Sequence[SampleResult], expected: Sequence[SampleResult]) -> None:
    """Equal tokens and ends; log-probabilities to 1e-5 on average (the weights are large, so rounding is too)."""
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert [r.finish for r in found] == [r.finish for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.logprobs) == len(ours.versions) == len(ours.tokens)
        gap = np.abs(np.asarray(ours.logprobs) - np.asarray(theirs.logprobs))
        assert gap.mean() < 1e-5
        assert gap.max() < 1e-4


# What is sampled.


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_scheduling_never_changes_a_completion(tiny_model: Make, family: str, temperature: float) -> None:
    model, requests = tiny_model(family), groups(temperature)
    expected = [one_at_a_time(model, r) for r in requests]
    for rows, prefill in [(1, 1), (3, 16), (5, 4096), (256, 4096)]:
        order = np.random.default_rng(rows).permutation(len(requests)).tolist()
        engine = engine_of(model, max_sequences=rows, prefill_tokens=prefill)
        same(await sample(engine, [requests[at] for at in order]), [expected[at] for at in order])
    # The presence of others does not matter either.
    same(await sample(engine_of(model), requests[4:5]), expected[4:5])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_are_those_of_the_trainer(tiny_model: Make, temperature: float) -> None:
    model, requests = tiny_model(), groups(temperature)
    results = await sample(engine_of(model, max_sequences=5), requests)
    streams = [np.asarray([*r.tokens, *result.tokens]) for r, result in zip(requests, results, strict=True)]
    scores = score_streams(model, streams, temperature=temperature)
    scored = await engine_of(model).score([s.tolist() for s in streams], temperature=temperature)
    for asked, result, trainer, engine in zip(requests, results, scores, scored, strict=True):
        assert np.abs(trainer[len(asked.tokens) :] - result.logprobs).max() < 1e-5
        assert np.isnan(engine[0])
        assert np.abs(engine[1:] - trainer[1:]).max(initial=0) < 1e-5


async def test_greedy_takes_the_likeliest_at_temperature_one(tiny_model: Make) -> None:
    model = tiny_model()
    asked = [request(prompt_of(9, n), (n,), temperature=0.0) for n in range(3)]
    same(await sample(engine_of(model), asked), [one_at_a_time(model, r) for r in asked])


async def test_bfloat16_on_a_cpu(tiny_model: Make) -> None:
    model = tiny_model().to(torch.bfloat16)
    requests = groups()
    results = await sample(engine_of(model, max_sequences=4), requests)
    streams = [np.asarray([*r.tokens, *result.tokens]) for r, result in zip(requests, results, strict=True)]
    for asked, result, trainer in zip(requests, results, score_streams(model, streams), strict=True):
        gap = np.abs(trainer[len(asked.tokens) :] - result.logprobs)
        assert gap.mean() < 0.1


async def test_the_seed_and_the_stream_make_the_sample(tiny_model: Make) -> None:
    model = tiny_model()
    a, b = await sample(engine_of(model), [request(stream=(0, 0, 0)), request(stream=(0, 1, 0))])
    assert a.tokens != b.tokens
    (c,) = await sample(engine_of(model, seed=SEED + 1), [request(stream=(0, 0, 0))])
    assert a.tokens != c.tokens


# Where completions end.


async def test_a_stop_text_ends_the_completion_where_it_first_appears(
    tiny_model: Make, character_tokenizer: Any
) -> None:
    model = tiny_model()
    engine = engine_of(model, character_tokenizer, eos_ids=())
    for stream in [(n,) for n in range(6)]:
        (free,) = await sample(engine, [request(stream=stream, new=20)])
        text = character_tokenizer.decode(free.tokens)
        stop = character_tokenizer.decode(free.tokens[7:10])
        (stopped,) = await sample(engine, [request(stream=stream, new=20, stop=("never this", stop))])
        assert stopped.finish == "stop"
        ended = character_tokenizer.decode(stopped.tokens)
        assert ended == text[: text.index(stop) + len(stop)]
        assert stopped.tokens == free.tokens[: len(stopped.tokens)]
        assert stopped.logprobs == pytest.approx(free.logprobs[: len(stopped.tokens)], abs=1e-5)


async def test_a_stop_text_in_the_prompt_or_across_its_end_does_not_count(
    tiny_model: Make, character_tokenizer: Any
) -> None:
    engine = engine_of(tiny_model(), character_tokenizer, eos_ids=())
    prompt = prompt_of(8)
    (free,) = await sample(engine, [request(prompt)])
    inside = character_tokenizer.decode(prompt[2:6])
    across = character_tokenizer.decode([*prompt[-3:], *free.tokens[:2]])
    (result,) = await sample(engine, [request(prompt, stop=(inside, across))])
    assert result.tokens == free.tokens
    assert result.finish == "length"


class Syllables:
    """A tokenizer whose tokens are two letters each, so that a stop text may begin and end inside a token."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token % 26) + chr(65 + token // 26) for token in tokens)


class Bytes:
    """A byte tokenizer: a character of several bytes is whole only with its last one."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(0xC3 if t % 2 else 0x80 + t for t in tokens).decode(errors="replace")


async def test_a_stop_text_may_begin_and_end_inside_tokens(tiny_model: Make) -> None:
    engine = engine_of(tiny_model(), Syllables(), eos_ids=())
    (free,) = await sample(engine, [request()])
    stop = Syllables().decode(free.tokens[3:6], skip_special_tokens=False)[1:-1]
    (result,) = await sample(engine, [request(stop=(stop,))])
    # The tokens that hold the stop text are kept whole.
    assert result.tokens == free.tokens[:6]
    assert result.finish == "stop"


async def test_a_stop_text_of_several_bytes_a_character(tiny_model: Make) -> None:
    engine = engine_of(tiny_model(), Bytes(), eos_ids=())
    (free,) = await sample(engine, [request(new=40)])
    whole = next(n for n in range(39) if free.tokens[n] % 2 and not free.tokens[n + 1] % 2)
    stop = Bytes().decode(free.tokens[whole : whole + 2], skip_special_tokens=False)
    assert len(stop) == 1
    (result,) = await sample(engine, [request(new=40, stop=(stop,))])
    assert result.tokens == free.tokens[: whole + 2]


async def test_the_end_token_is_kept_and_counts_before_the_limit(tiny_model: Make) -> None:
    model = tiny_model()
    (free,) = await sample(engine_of(model, eos_ids=()), [request()])
    end = free.tokens[4]
    first = free.tokens.index(end)
    engine = engine_of(model, eos_ids=(end, 2))
    for new in (12, first + 1):
        (result,) = await sample(engine, [request(new=new)])
        assert (result.tokens, result.finish) == (free.tokens[: first + 1], "stop")


async def test_one_new_token(tiny_model: Make) -> None:
    engine = engine_of(tiny_model(), eos_ids=(), max_sequences=2)
    results = await sample(engine, [request(stream=(n,), new=1) for n in range(5)])
    assert [(len(r.tokens), r.finish) for r in results] == [(1, "length")] * 5
    (longer,) = await sample(engine, [request(stream=(3,), new=4)])
    assert longer.tokens[:1] == results[3].tokens


# Steps that are launched before the tokens of the one before them were looked at.


async def test_a_step_is_launched_before_the_last_one_is_waited_for(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    did: list[str] = []
    for owner, name in ((graphs.Drawn, "wait"), (graphs.GraphDecoder, "launch")):
        then = getattr(owner, name)

        def noted(*given: Any, then: Any = then, name: str = name) -> Any:
            did.append(name)
            return then(*given)

        monkeypatch.setattr(owner, name, noted)
    asked = [request(prompt_of(5, n), (n,), new=6) for n in range(3)]
    await sample(engine_of(tiny_model(), eos_ids=()), asked)
    # The first of six tokens comes from the prompt, and nothing is launched for what surely ends.
    assert did == ([] if steps == "plain" else ["launch", *["launch", "wait"] * 4, "wait"])


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The steps that a GPU may still compute: they were launched, and nobody has waited for them."""
    found: set[int] = set()
    made, wait = graphs.Drawn.__init__, graphs.Drawn.wait

    def noted(drawn: graphs.Drawn, *given: Any) -> None:
        made(drawn, *given)
        found.add(id(drawn))

    def waited(drawn: graphs.Drawn) -> Any:
        found.discard(id(drawn))
        return wait(drawn)

    monkeypatch.setattr(graphs.Drawn, "__init__", noted)
    monkeypatch.setattr(graphs.Drawn, "wait", waited)
    return found


@pytest.mark.parametrize("steps", ["captured"], indirect=True)
@pytest.mark.parametrize("how", ["sleep", "abort", "failure", "no capture"])
async def test_graphs_are_given_back_when_nothing_computes(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, computing: set[int], how: str
) -> None:
    from strop.errors import RunFailure

    engine = engine_of(tiny_model(), eos_ids=())
    task = asyncio.create_task(sample(engine, [request(stream=(n,), new=30) for n in range(3)]))
    await sampled_tokens(engine, 12)
    assert computing
    give_back = engine._derived.give_back

    def given_back() -> None:
        assert not computing
        give_back()

    monkeypatch.setattr(engine._derived, "give_back", given_back)
    if how == "sleep":
        await engine.sleep()
    elif how == "abort":
        await engine.abort()
    else:
        error = NotCaptured("it has sinks") if how == "no capture" else MemoryError("no room")

        def fail(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(EagerDecoder, "launch", fail)
    if how == "failure":
        with pytest.raises(RunFailure, match="no room"):
            await task
    elif how == "no capture":
        with pytest.warns(RuntimeWarning, match="it has sinks"):
            await task
    assert not computing
    assert engine._launched is None


@pytest.mark.parametrize("steps", ["captured"], indirect=True)
@pytest.mark.parametrize("ends", ["stop", "cancelled"])
async def test_nothing_is_computed_when_nobody_waits(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, computing: set[int], ends: str
) -> None:
    model = tiny_model()
    (free,) = await sample(engine_of(model, eos_ids=()), [request()])
    engine = engine_of(model, eos_ids=(free.tokens[5],) if ends == "stop" else ())
    task = asyncio.create_task(engine.generate(request(new=40)))
    if ends == "cancelled":
        await sampled_tokens(engine, 5)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not computing
    assert engine._launched is None


@pytest.mark.parametrize("steps", ["captured"], indirect=True)
async def test_a_gpu_that_has_failed_lets_the_engine_close(tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_model(), eos_ids=())
    task = asyncio.create_task(sample(engine, [request(new=40)]))
    await sampled_tokens(engine, 5)

    def fail(_: graphs.Drawn) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(graphs.Drawn, "wait", fail)
    await engine.close()
    assert (await task)[0].finish == "aborted"


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_comes_and_goes_a_completion_is_the_same(tiny_model: Make, seed: int) -> None:
    """Requests enter, end, are cancelled, wait and are prefilled again at random moments."""
    rng = np.random.default_rng(seed)
    model = tiny_model()
    free = await sample(engine_of(model, eos_ids=()), [request(prompt_of(7), (n,), new=20) for n in range(4)])
    eos = tuple({free[0].tokens[5], free[1].tokens[9]})
    engine = engine_of(model, eos_ids=eos, max_sequences=5, context=340, recomputes=bool(seed % 2))
    # For the last ones the cache has to grow.
    lengths = rng.integers(1, 40, 30) + np.repeat([0, 100, 270], [22, 4, 4])
    asked = [request(prompt_of(int(length), n // 2), (n,), new=1 + n % 25) for n, length in enumerate(lengths)]

    async def one(asked: SampleRequest, after: int) -> SampleResult:
        for _ in range(after):
            await asyncio.sleep(0)
        return await engine.generate(asked)

    async with asyncio.timeout(60):
        tasks = [asyncio.create_task(one(r, int(rng.integers(0, 5 + 5 * n)))) for n, r in enumerate(asked)]
        cancelled = {int(n) for n in rng.choice(len(asked), 5, replace=False)}
        version = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            match int(rng.integers(0, 40)):
                case 0:
                    await engine.sleep()
                case 1:
                    await engine.pause()
                    await asyncio.sleep(0)
                    await engine.resume()
                case 2:
                    version += 1
                    await engine.update_weights(WeightUpdate(version))
                case 3 if cancelled:
                    tasks[cancelled.pop()].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    kept = [at for at, result in enumerate(results) if isinstance(result, SampleResult)]
    assert len(kept) >= 25
    same([results[at] for at in kept], [one_at_a_time(model, asked[at], eos=eos) for at in kept])  # type: ignore[misc]
    assert all(results[at].versions == sorted(results[at].versions) for at in kept)  # type: ignore[union-attr]


# Prompts that are shared.


async def test_a_prompt_is_computed_once_for_all_its_completions(tiny_model: Make) -> None:
    model = tiny_model()
    engine = engine_of(model, eos_ids=())
    await sample(engine, [request(prompt_of(30), (n,)) for n in range(4)] + [request(prompt_of(20), (9,))])
    stats = engine.take_stats()
    assert stats.prompt_tokens == 50
    assert stats.sampled_tokens == 5 * 12
    assert stats.sequences == 5
    assert engine.take_stats().prompt_tokens == 0


async def test_a_sibling_that_enters_later_takes_the_prompt_from_a_row_that_has_it(tiny_model: Make) -> None:
    model = tiny_model()
    asked = [request(prompt_of(30), (n,), new=6 + 4 * n) for n in range(6)]
    engine = engine_of(model, eos_ids=(), max_sequences=2)
    found = await sample(engine, asked)
    assert engine.take_stats().prompt_tokens == 30
    same(found, [one_at_a_time(model, r, eos=()) for r in asked])


async def test_a_sibling_that_enters_after_a_sleep_starts_at_the_end_of_the_prompt(tiny_model: Make) -> None:
    model = tiny_model()
    asked = [request(prompt_of(10), (n,), new=8 + 3 * n) for n in range(4)]
    engine = engine_of(model, eos_ids=(), max_sequences=2)
    task = asyncio.create_task(sample(engine, asked))
    await sampled_tokens(engine, 8)
    await engine.sleep()
    await engine.wake()
    same(await task, [one_at_a_time(model, r, eos=()) for r in asked])


# Interruptions.


async def test_sleep_in_the_middle_changes_nothing(tiny_model: Make) -> None:
    model, requests = tiny_model(), groups()
    engine = engine_of(model, max_sequences=4)
    task = asyncio.create_task(sample(engine, requests))
    for count in (6, 20, 40):
        await sampled_tokens(engine, count)
        await engine.sleep()
        assert engine._cache is None
        await engine.wake()
    same(await task, [one_at_a_time(model, r) for r in requests])


async def test_pause_holds_and_resume_goes_on(tiny_model: Make) -> None:
    model, requests = tiny_model(), groups()
    engine = engine_of(model)
    task = asyncio.create_task(sample(engine, requests))
    await sampled_tokens(engine, 20)
    await engine.pause()
    before = engine._stats.sampled_tokens
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine._stats.sampled_tokens == before
    assert not task.done()
    await engine.resume()
    same(await task, [one_at_a_time(model, r) for r in requests])


async def test_abort_returns_what_there_is(tiny_model: Make) -> None:
    model = tiny_model()
    asked = [request(stream=(n,), new=30) for n in range(5)]
    expected = [one_at_a_time(model, r, eos=()) for r in asked]
    engine = engine_of(model, eos_ids=(), max_sequences=3)
    task = asyncio.create_task(sample(engine, asked))
    await sampled_tokens(engine, 12)
    await engine.abort()
    results = await task
    assert {r.finish for r in results} == {"aborted"}
    assert [len(r.tokens) > 0 for r in results] == [True] * 3 + [False] * 2
    for result, whole in zip(results, expected, strict=True):
        assert result.tokens == whole.tokens[: len(result.tokens)]
    same(await sample(engine, asked), expected)


async def test_a_cancelled_request_frees_its_row(tiny_model: Make) -> None:
    model = tiny_model()
    engine = engine_of(model, eos_ids=(), max_sequences=2)
    asked = [request(prompt_of(6, n), (n,), new=12) for n in range(4)]
    endless = [asyncio.create_task(engine.generate(request(stream=(n,), new=400))) for n in (98, 99)]
    await sampled_tokens(engine, 6)
    task = asyncio.create_task(sample(engine, asked))
    for _ in range(5):
        await asyncio.sleep(0)
    for one in endless:
        one.cancel()
    same(await task, [one_at_a_time(model, r, eos=()) for r in asked])
    assert all(one.cancelled() for one in endless)
    assert engine.take_stats().sampled_tokens < 200
    assert not engine._running
    assert not engine._waiting


async def test_a_request_that_cannot_fit_is_refused_and_disturbs_nobody(tiny_model: Make) -> None:
    model = tiny_model()
    engine = engine_of(model, context=40)
    whole = asyncio.create_task(sample(engine, [request(prompt_of(28), new=12)]))
    with pytest.raises(ValueError, match="context of 40"):
        await engine.generate(request(prompt_of(29), new=12))
    with pytest.raises(ValueError, match="at least one token"):
        await engine.generate(request(()))
    same(await whole, [one_at_a_time(model, request(prompt_of(28), new=12))])


async def test_a_group_is_sampled_as_its_completions_are(tiny_model: Make) -> None:
    model, asked = tiny_model(), groups()
    engine, found = engine_of(model), dict[int, SampleResult]()
    together = [
        asyncio.create_task(
            engine.generate_all(asked[at : at + 3], lambda place, result, at=at: found.setdefault(at + place, result))
        )
        for at in range(0, 12, 3)
    ]
    async with asyncio.timeout(60):
        await asyncio.gather(*together)
    same([found[at] for at in range(12)], await sample(engine_of(model), asked))


async def test_a_cancelled_group_frees_its_rows(tiny_model: Make) -> None:
    model = tiny_model()
    engine = engine_of(model, eos_ids=(), max_sequences=2)
    endless = [request(stream=(n,), new=400) for n in (97, 98, 99)]
    group = asyncio.create_task(engine.generate_all(endless, lambda place, result: None))
    await sampled_tokens(engine, 6)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    asked = request(prompt_of(6, 0), (0,))
    same(await sample(engine, [asked]), [one_at_a_time(model, asked, eos=())])
    assert engine.take_stats().sampled_tokens < 200
    assert not engine._running
    assert not engine._waiting


async def test_nothing_of_a_group_begins_where_one_cannot_fit(tiny_model: Make) -> None:
    engine = engine_of(tiny_model(), context=40)
    with pytest.raises(ValueError, match="context of 40"):
        await engine.generate_all([request(), request(new=40)], lambda place, result: None)
    assert not engine._waiting


@pytest.mark.parametrize("broken", ["cache", "model", "draw", "weights"])
async def test_a_failure_reaches_every_caller_and_the_engine_works_again(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    from strop.errors import RunFailure
    from strop.rollout.engines import packed_linear
    from strop.rollout.engines.kv_cache import KVCache

    model = tiny_model()
    engine = engine_of(model, max_sequences=3, pack_weights=True)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        target: dict[str, tuple[Any, str]] = {
            "cache": (KVCache, "reserve"),
            "model": (model.model.layers[1], "forward"),
            "draw": (local, "draw"),
            "weights": (packed_linear, "PackedLinears"),
        }
        patch.setattr(*target[broken], fail)
        async with asyncio.timeout(20):
            results = await asyncio.gather(*(engine.generate(r) for r in groups()), return_exceptions=True)
        assert len(results) == 12
        for result in results:
            assert isinstance(result, RunFailure)
            assert "no room" in str(result)
            assert isinstance(result.__cause__, MemoryError)
    same(await sample(engine, groups()), [one_at_a_time(model, r) for r in groups()])


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_model_that_cannot_be_captured_is_decoded_plainly(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    model = tiny_model()
    plain = engine_of(model)
    expected = await sample(plain, groups())
    await plain.close()

    launches = []

    class Refuses(EagerDecoder):
        def launch(self, *given: Any) -> Any:
            launches.append(given)
            if len(launches) == after + 1:
                raise NotCaptured("it has sinks")
            return super().launch(*given)

    capture_on_a_cpu(monkeypatch)
    monkeypatch.setattr(local, "GraphDecoder", Refuses)
    engine = engine_of(model)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*it has sinks") as warned:
        found = await sample(engine, groups())
    assert len(warned) == 1
    same(found, expected)
    await engine.close()


async def test_close_ends_what_runs(tiny_model: Make) -> None:
    engine = engine_of(tiny_model(), eos_ids=())
    task = asyncio.create_task(sample(engine, [request(new=400)]))
    await sampled_tokens(engine, 3)
    await engine.close()
    assert (await task)[0].finish == "aborted"
    # Not an object that hangs: a closed engine may be used again.
    assert len((await sample(engine, [request(new=5)]))[0].tokens) == 5


# Weights.


def adapted(model: Any, targets: Any = "all-linear", dropout: float = 0.0, **kind: Any) -> Any:
    """The model with adapters that change what it computes."""
    from strop.config.model import LoraConfig
    from strop.models.load import add_lora

    made = add_lora(model, LoraConfig(rank=4, targets=targets, dropout=dropout, **kind), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
            if "magnitude" in name:
                parameter.mul_(1 + 0.5 * torch.rand(parameter.shape, generator=draw))
    return made.eval()


@pytest.fixture
def packs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.rollout.engines import packed_linear

    monkeypatch.setattr(packed_linear, "SMALLEST", 1)


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
async def test_packed_weights_sample_the_same(tiny_model: Make, family: str) -> None:
    model, requests = tiny_model(family), groups()
    engine = engine_of(model, max_sequences=5, pack_weights=True)
    same(await sample(engine, requests), [one_at_a_time(model, r) for r in requests])
    assert engine._derived.layers is not None
    assert len(engine._derived.layers[1]._forwards) == 2 * 7 + 1
    # The model is its own again between steps.
    assert all("forward" not in module.__dict__ for module in model.modules())


async def test_a_matrix_too_small_to_be_packed_is_so_with_adapters(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.rollout.engines import packed_linear

    plain = tiny_model()
    model = adapted(tiny_model(), targets=["q_proj", "down_proj"])
    sizes = {m.weight.numel() for n, m in plain.named_modules() if n.endswith(("q_proj", "down_proj"))}
    monkeypatch.setattr(packed_linear, "SMALLEST", packed_linear.ADAPTED * min(sizes))
    found = [packed_linear.PackedLinears(one, rows=4)._forwards for one in (plain, model)]
    assert [len(forwards) for forwards in found] == [0, 2 * 2]
    assert all(hasattr(module, "lora_A") for module, _ in found[1])
    requests = groups(0.7)
    engine = engine_of(model, max_sequences=5, pack_weights=True)
    same(await sample(engine, requests), [one_at_a_time(model, r) for r in requests])


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("pack", [False, True])
# Larger adapters would make rounding larger; 16 / sqrt(4) is the scale of the plain ones.
@pytest.mark.parametrize(
    "kind", [{}, {"rank_stabilised": True, "alpha": 16.0}, {"dora": True}], ids=["lora", "rslora", "dora"]
)
async def test_adapters_reach_the_samples(tiny_model: Make, pack: bool, kind: dict[str, Any]) -> None:
    model, requests = adapted(tiny_model(), **kind), groups(0.7)
    with model.disable_adapter():
        base = [one_at_a_time(model, r) for r in requests]
    found = await sample(engine_of(model, max_sequences=5, pack_weights=pack), requests)
    same(found, [one_at_a_time(model, r) for r in requests])
    assert [r.tokens for r in found] != [r.tokens for r in base]


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("pack", [False, True])
async def test_an_adapter_on_the_output_head_counts(tiny_model: Make, pack: bool) -> None:
    model = adapted(tiny_model(), targets=["lm_head"])
    found = await sample(engine_of(model, pack_weights=pack), groups())
    same(found, [one_at_a_time(model, r) for r in groups()])


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("pack", [False, True])
async def test_dropout_stays_off_while_sampling(tiny_model: Make, pack: bool) -> None:
    model = adapted(tiny_model(), dropout=0.5)
    expected = [one_at_a_time(model, r) for r in groups()]
    # As a trainer leaves it after an update.
    model.train()
    engine = engine_of(model, pack_weights=pack)
    same(await sample(engine, groups()), expected)
    model.train()
    tokens = [[*groups()[4].tokens, *expected[4].tokens]]
    scored = (await engine.score(tokens))[0][len(groups()[4].tokens) :]
    assert np.abs(scored - expected[4].logprobs).max() < 1e-5


def shake(model: Any) -> None:
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * parameter.std() * 0.3)


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("pack", [False, True])
async def test_new_weights_are_served_after_an_update(tiny_model: Make, pack: bool) -> None:
    model, requests = tiny_model(), groups()
    engine = engine_of(model, pack_weights=pack)
    before = await sample(engine, requests)
    shake(model)
    assert await engine.update_weights(WeightUpdate(7)) == 7
    after = await sample(engine, requests)
    assert [r.tokens for r in after] != [r.tokens for r in before]
    same(after, [one_at_a_time(model, r) for r in requests])
    assert {v for r in before for v in r.versions} == {0}
    assert {v for r in after for v in r.versions} == {7}


async def test_a_token_has_the_version_that_sampled_it(tiny_model: Make, steps: str) -> None:
    engine = engine_of(tiny_model(), eos_ids=(), max_sequences=2)
    task = asyncio.create_task(sample(engine, [request(stream=(n,), new=10) for n in range(3)]))
    await sampled_tokens(engine, 8)
    await engine.update_weights(WeightUpdate(3))
    results = await task
    for result in results:
        assert result.versions == sorted(result.versions)
    assert [sorted(set(r.versions)) for r in results] == [[0, 3], [0, 3], [3]]
    # A captured step of two rows was launched before the update.
    assert sum(v == 0 for r in results for v in r.versions) == {"plain": 8, "captured": 10}[steps]


async def test_a_prompt_computed_with_old_weights_is_not_lent_to_new_samples(tiny_model: Make) -> None:
    model = tiny_model()
    engine = engine_of(model, eos_ids=())
    first = asyncio.create_task(sample(engine, [request(new=30)]))
    await sampled_tokens(engine, 5)
    shake(model)
    await engine.update_weights(WeightUpdate(1))
    late = request(stream=(1,), new=10)
    same(await sample(engine, [late]), [one_at_a_time(model, late, eos=())])
    await first
