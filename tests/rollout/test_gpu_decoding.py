"""The local engine's decoding on a GPU: captured steps beside plain ones."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from strop.config.model import LoraConfig
from strop.config.training import OptimizerSettings
from strop.models.forward import score_streams
from strop.models.load import add_lora
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.local import LocalEngine
from strop.training.single import SingleDeviceTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def model_of(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=192, max_position_embeddings=512, head_dim=32,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).to("cuda", dtype).eval()


async def sampled(model: Any, **options: Any) -> tuple[LocalEngine, list[Any], list[SampleRequest]]:
    engine = LocalEngine(model, None, eos_ids=(3,), seed=5, context=256, max_sequences=40, **options)
    rng = np.random.default_rng(0)
    prompts = [tuple(int(t) for t in rng.integers(4, 97, n)) for n in (3, 30, 9, 61)]
    requests = [
        SampleRequest(prompts[at % 4], SampleSettings(20 + at, 1.0 if at % 5 else 0.0), (at % 4, at))
        for at in range(60)
    ]
    found = await asyncio.gather(*(engine.generate(request) for request in requests))
    return engine, found, requests


@pytest.mark.parametrize("compiled", [False, True])
async def test_captured_steps_are_those_of_plain_ones(compiled: bool) -> None:
    model = model_of(torch.float32)
    _, plain, _ = await sampled(model, graphs=False)
    engine, captured, requests = await sampled(model, compiled=compiled)
    assert engine._graphs is not None
    assert engine._graphs._draw == engine._drawn_in_one_pass
    for mine, theirs in zip(captured, plain, strict=True):
        assert list(mine.tokens) == list(theirs.tokens)
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    # Weights that are changed in place are those that the next steps use, and what was sampled is what is scored.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    await engine.update_weights(WeightUpdate(1))
    request = requests[1]
    result = await engine.generate(request)
    stream = np.array([*request.tokens, *result.tokens])
    [scores] = score_streams(model, [stream])
    np.testing.assert_allclose(result.logprobs, scores[len(request.tokens) :], atol=1e-4)


def families() -> dict[str, Any]:
    shape: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 512,
    }  # fmt: skip
    return {
        "qwen3": lambda: model_of(torch.float32),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)),
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("compiled", [False, True])
async def test_joined_layers_have_the_weights_of_each_version_where_graphs_expect_them(
    family: str, compiled: bool
) -> None:
    torch.manual_seed(0)
    model = families()[family]().to("cuda", torch.float32).eval()
    engine, found, requests = await sampled(model, compiled=compiled)
    joined = engine._derived.joined(0)
    assert joined is not None
    assert [len(group.layers) for group in joined._groups] == [3, 2] * 2
    places = [parameter.data_ptr() for group in joined._groups for parameter in group.parameters()]
    captured = dict(engine._graphs._graphs)
    decoder, seen = engine._graphs, []
    # The last time the version stays the same, as when weights are loaded again.
    for version in (0, 1, 2, 2):
        if version:
            draw = torch.Generator("cuda").manual_seed(len(seen))
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=draw, device="cuda")
                    parameter.add_(noise * 0.02)
            await engine.update_weights(WeightUpdate(version))
            found = await asyncio.gather(*(engine.generate(request) for request in requests))
        _, plain, _ = await sampled(model, graphs=False)
        for mine, theirs in zip(found, plain, strict=True):
            assert list(mine.tokens) == list(theirs.tokens)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
        seen.append([tuple(one.tokens) for one in found])
        # Graphs of the first version are replayed for the others, from the same places.
        assert engine._derived.joined(version) is joined
        assert [parameter.data_ptr() for group in joined._groups for parameter in group.parameters()] == places
        assert engine._graphs is decoder
        assert all(decoder._graphs[size] is entry for size, entry in captured.items())
    assert all(one != other for one, other in pairwise(seen))
    await engine.sleep()
    assert engine._derived.joined_bytes() == 0
    found = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert [tuple(one.tokens) for one in found] == seen[-1]


async def test_captured_steps_and_scores_compute_joined_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            return func(*args, **(kwargs or {}))

    from strop.rollout.engines.graphs import GraphDecoder

    counts = []
    compute = GraphDecoder._compute

    def counted(decoder: GraphDecoder, size: int) -> Any:
        with Products() as products:
            found = compute(decoder, size)
        counts.append(products.count)
        return found

    monkeypatch.setattr(GraphDecoder, "_compute", counted)
    engine, _, _ = await sampled(model_of(torch.bfloat16))
    assert engine._graphs is not None
    # In each of two blocks: q, k and v; o; gate and up; down. Then the output head.
    assert set(counts) == {2 * 4 + 1}
    with Products() as products:
        await engine.score([[3, 4, 5]])
    assert products.count == 2 * 4 + 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
async def test_a_probe_is_a_graph_from_the_second_time_on(compiled: bool, dtype: torch.dtype, gap: float) -> None:
    model, probe = model_of(dtype), [[4, 40, 80, 96], [7, 9, 11]]
    engine, _, requests = await sampled(model, compiled=compiled)
    seen = []
    for version in range(1, 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await engine.update_weights(WeightUpdate(version))
        found = await engine.score(probe)
        for mine, theirs in zip(found, score_streams(model, [np.array(tokens) for tokens in probe]), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=gap)
        seen.append(float(found[0][1]))
        assert (engine._scores._repeated._graph is not None) == (version > 1)
        # Steps and scores are replayed in turn.
        await engine.generate(requests[version])
    assert len(set(seen)) == 4
    await engine.sleep()
    assert engine._scores._repeated._graph is None


@pytest.mark.parametrize("changes", [{}, {"compiled": True}, {"compiled": True, "recompute": "keep_attention"}])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_trainer_scores_its_probe_again_from_a_graph(changes: dict[str, Any], adapters: bool) -> None:
    model, probe = model_of(torch.bfloat16), [[4, 40, 80, 96], [7, 9, 11]]
    if adapters:
        model = add_lora(model, LoraConfig(rank=4), 0, updates=1)
    trainer, seen = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=9, **changes), []
    for number in range(4):
        found = trainer.score(probe)
        for mine, theirs in zip(found, score_streams(model, [np.array(tokens) for tokens in probe]), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=0.1)
        assert trainer._repeated is not None
        assert (trainer._repeated._graph is not None) == (number > 0)
        seen.append(float(found[0][1]))
        for moves, mine in zip(trainer.rounding(probe), found, strict=True):
            assert moves.shape == mine.shape
            assert ((moves[1:] > 1e-4) & (moves[1:] < 5)).all()
        # The graph knows of none of it.
        for mine, again in zip(found, trainer.score(probe), strict=True):
            np.testing.assert_allclose(mine, again, atol=0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    assert len(set(seen)) == 4


async def test_half_precision_log_probabilities_are_near_the_trainers() -> None:
    model = model_of(torch.bfloat16)
    _, captured, requests = await sampled(model)
    gaps = []
    for request, result in zip(requests, captured, strict=True):
        if request.settings.temperature == 1.0:
            [scores] = score_streams(model, [np.array([*request.tokens, *result.tokens])])
            gaps.append(np.abs(np.asarray(result.logprobs) - scores[len(request.tokens) :]))
    assert np.concatenate(gaps).mean() < 0.02
