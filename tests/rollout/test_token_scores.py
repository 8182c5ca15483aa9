"""Scores that are asked for again and again are a graph: of the weights as they are, and only as long as it holds."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from eager_graphs import capture_on_a_cpu

from strop.config.model import LoraConfig
from strop.config.training import OptimizerSettings
from strop.models import repeated
from strop.models.forward import packed_inputs, score_streams
from strop.models.load import add_lora
from strop.rollout.engine import WeightUpdate
from strop.rollout.engines import token_scores
from strop.rollout.engines.local import LocalEngine
from strop.training.parallel.ranks import Alone
from strop.training.single import SingleDeviceTrainer

PROBE = [[1, 17, 33, 49], [4, 5]]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Replays of each graph that was captured."""
    capture_on_a_cpu(monkeypatch)
    replays: list[int] = []
    capture = repeated.captured

    def counted(compute: Any, pool: Any = None) -> Any:
        graph, found = capture(compute, pool)
        at, replay = len(replays), graph.replay
        replays.append(0)

        def counting() -> None:
            replays[at] += 1
            replay()

        graph.replay = counting
        return graph, found

    monkeypatch.setattr(repeated, "captured", counted)
    return replays


def model_of() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


def engine_of(model: Any) -> LocalEngine:
    return LocalEngine(model, None, eos_ids=(), seed=3, context=128, max_sequences=4, pack_weights=False)


def shake(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)


async def agrees(engine: LocalEngine, model: Any, lists: list[list[int]], temperature: float = 1.0) -> None:
    found = await engine.score(lists, temperature=temperature)
    expected = score_streams(model, [np.asarray(tokens) for tokens in lists], temperature=temperature)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


async def test_a_probe_is_captured_once_and_gives_the_scores_of_each_version(captures: list[int]) -> None:
    model = model_of()
    engine, seen = engine_of(model), set()
    for version in range(5):
        await engine.update_weights(WeightUpdate(version))
        await agrees(engine, model, PROBE)
        seen.add(float((await engine.score(PROBE))[0][1]))
        shake(model)
    assert captures == [9]
    assert len(seen) == 5


async def test_what_is_asked_once_is_not_captured(captures: list[int]) -> None:
    model = model_of()
    engine = engine_of(model)
    for lists, temperature in ((PROBE, 1.0), (PROBE, 0.5), (PROBE[:1], 0.5), (PROBE, 1.0)):
        await agrees(engine, model, lists, temperature)
    assert captures == []


async def test_many_tokens_are_not_captured(captures: list[int]) -> None:
    model = model_of()
    engine = engine_of(model)
    for _ in range(3):
        await agrees(engine, model, [[at % 50 for at in range(65)]])
    assert captures == []
    for _ in range(3):
        await agrees(engine, model, [[at % 50 for at in range(64)]])
    assert captures == [2]


async def test_weights_that_were_moved_are_captured_anew(captures: list[int]) -> None:
    model = model_of()
    engine = engine_of(model)
    for _ in range(3):
        await agrees(engine, model, PROBE)
    shake(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    await engine.update_weights(WeightUpdate(1))
    for _ in range(2):
        await agrees(engine, model, PROBE)
    assert captures == [2, 2]


async def test_an_engine_that_slept_captures_only_what_is_asked_twice_again(captures: list[int]) -> None:
    model = model_of()
    engine = engine_of(model)
    for _ in range(3):
        await agrees(engine, model, PROBE)
    for _ in range(3):
        await engine.sleep()
        assert engine._derived.joined_bytes() == 0
        await engine.wake()
        await agrees(engine, model, PROBE)
    assert captures == [2]


async def test_a_pass_that_cannot_be_captured_is_computed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_on_a_cpu(monkeypatch)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(repeated, "captured", refuse)
    model = model_of()
    engine = engine_of(model)
    await agrees(engine, model, PROBE)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph.*not permitted when stream is capturing"):
        await agrees(engine, model, PROBE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            await agrees(engine, model, PROBE)


async def test_what_a_graph_reads_is_held_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_on_a_cpu(monkeypatch)

    class Graph:
        """It holds addresses alone."""

        def replay(self) -> None: ...

    monkeypatch.setattr(repeated, "captured", lambda compute, pool=None: (Graph(), compute()))
    read: list[weakref.ref[Any]] = []

    def noted(*given: Any) -> Any:
        inputs = packed_inputs(*given)
        read.append(weakref.ref(inputs))
        return inputs

    monkeypatch.setattr(token_scores, "packed_inputs", noted)
    engine = engine_of(model_of())
    for _ in range(3):
        await engine.score(PROBE)
    gc.collect()
    assert [one() is None for one in read] == [True, False]
    await engine.sleep()
    gc.collect()
    assert read[1]() is None


async def test_without_graphs_nothing_is_captured(captures: list[int]) -> None:
    model = model_of()
    engine = LocalEngine(model, None, eos_ids=(), seed=3, context=128, pack_weights=False, graphs=False)
    for _ in range(3):
        await agrees(engine, model, PROBE)
    assert captures == []


def trainer_of(model: Any, **options: Any) -> SingleDeviceTrainer:
    return SingleDeviceTrainer(model, OptimizerSettings(), total_updates=9, **options)


def scored_alike(trainer: SingleDeviceTrainer, model: Any) -> float:
    found = trainer.score(PROBE)
    for mine, theirs in zip(found, score_streams(model, [np.asarray(tokens) for tokens in PROBE]), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    return float(found[0][1])


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_trainer_scores_its_probe_again_from_a_graph(captures: list[int], adapters: bool, recompute: bool) -> None:
    model = model_of()
    if adapters:
        model = add_lora(model, LoraConfig(rank=2), 0, updates=1)
    trainer, seen = trainer_of(model, recompute=recompute), set()
    for _ in range(4):
        seen.add(scored_alike(trainer, model))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3)
    assert captures == [3]
    assert len(seen) == 4
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    scored_alike(trainer, model)
    assert captures == [3, 1]


def test_a_rank_among_others_captures_nothing(captures: list[int]) -> None:
    class Ranks(Alone):
        """Whose passes need others."""

    model = model_of()
    trainer = trainer_of(model, ranks=Ranks())
    for _ in range(3):
        scored_alike(trainer, model)
    assert captures == []
