"""The local engine's decoding on a GPU: captured steps beside plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from strop.models.forward import score_streams
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.local import LocalEngine

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
    import asyncio

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


async def test_half_precision_log_probabilities_are_near_the_trainers() -> None:
    model = model_of(torch.bfloat16)
    _, captured, requests = await sampled(model)
    gaps = []
    for request, result in zip(requests, captured, strict=True):
        if request.settings.temperature == 1.0:
            [scores] = score_streams(model, [np.array([*request.tokens, *result.tokens])])
            gaps.append(np.abs(np.asarray(result.logprobs) - scores[len(request.tokens) :]))
    assert np.concatenate(gaps).mean() < 0.02
