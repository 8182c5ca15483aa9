"""The consistent mode of the local engine: what it notes is bit for bit what the trainer computes, however both batch.

`test_gpu_consistent.py` has the same on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from consistent_cases import distances, requests_of, sampled, scored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.config.model import LoraConfig
from strop.models.consistent_mode import is_consistent, make_consistent
from strop.models.forward import score_streams
from strop.models.load import add_lora
from strop.rollout.engine import SampleRequest, SampleSettings
from strop.rollout.engines.local import LocalEngine

Make = Callable[..., Any]
VOCABULARY = 40
KINDS = [(family, dtype) for family in ("llama", "qwen3") for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module")
def models(tiny_model: Make) -> Callable[..., Any]:
    """Consistent models of each kind, or ordinary ones, with and without adapters that do something."""
    known: dict[Any, Any] = {}

    def model_of(kind: tuple[str, torch.dtype], *, adapted: bool = False, consistent: bool = True) -> Any:
        key = (kind, adapted, consistent)
        if key not in known:
            family, dtype = kind
            model = tiny_model(family).to(dtype)
            if adapted:
                model = add_lora(model, LoraConfig(rank=3), seed=0)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if "lora_B" in name:
                            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
            if consistent:
                make_consistent(model)
            known[key] = model
        return known[key]

    return model_of


def engine_of(model: Any, **options: Any) -> LocalEngine:
    return LocalEngine(model, None, eos_ids=(1,), seed=5, context=256, **options)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    adapted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 10),
    rows=st.integers(1, 9),
    prefill_tokens=st.sampled_from([1, 20, 4096]),
    cuts=st.integers(0, 2),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_what_is_noted_is_what_the_trainer_computes(
    models: Callable[..., Any],
    kind: tuple[str, torch.dtype],
    adapted: bool,
    seed: int,
    count: int,
    rows: int,
    prefill_tokens: int,
    cuts: int,
    temperature: float,
) -> None:
    model = models(kind, adapted=adapted)
    rng = np.random.default_rng(seed)
    requests = requests_of(rng, count, vocabulary=VOCABULARY, longest=14, temperature=temperature)
    engine = engine_of(model, max_sequences=rows, prefill_tokens=prefill_tokens)
    results = asyncio.run(sampled(engine, requests, rng, cuts=cuts))
    assert distances(results, scored(model, requests, results, rng)).max() == 0


def test_threads_change_nothing(models: Callable[..., Any]) -> None:
    model, rng = models(KINDS[0]), np.random.default_rng(3)
    requests = requests_of(rng, 6, vocabulary=VOCABULARY, longest=14, temperature=1.0)
    results = asyncio.run(sampled(engine_of(model), requests, rng, cuts=0))
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        scores = scored(model, requests, results, rng)
    finally:
        torch.set_num_threads(before)
    assert distances(results, scores).max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_ordinary_mode_is_near_and_not_equal(models: Callable[..., Any], kind: tuple[str, torch.dtype]) -> None:
    """The test above can fail; and both modes compute the same model."""
    rng = np.random.default_rng(0)
    requests = requests_of(rng, 12, vocabulary=VOCABULARY, longest=24, temperature=1.0)
    found = {}
    for consistent in (False, True):
        model = models(kind, consistent=consistent)
        results = asyncio.run(sampled(engine_of(model, max_sequences=5), requests, rng, cuts=0))
        found[consistent] = distances(results, scored(model, requests, results, rng))
        streams = [np.array([*r.tokens, *x.tokens]) for r, x in zip(requests, results, strict=True)]
    assert found[False].max() > 0
    assert found[True].max() == 0
    ours, theirs = (np.concatenate(score_streams(models(kind, consistent=c), streams)) for c in (True, False))
    gaps = np.abs(ours - theirs)[~np.isnan(ours)]
    assert gaps.mean() < (1e-5 if kind[1] == torch.float32 else 0.05)


def test_longer_streams_than_a_block_of_keys(models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.models import exact_sums

    monkeypatch.setattr(exact_sums, "KEYS", 16)
    model = models(KINDS[2])
    rng = np.random.default_rng(1)
    requests = requests_of(rng, 6, vocabulary=VOCABULARY, longest=60, temperature=1.0)
    results = asyncio.run(sampled(engine_of(model, max_sequences=4), requests, rng, cuts=1))
    assert max(len(r.tokens) + len(x.tokens) for r, x in zip(requests, results, strict=True)) > 64
    assert distances(results, scored(model, requests, results, rng)).max() == 0


def test_a_window_of_attention(tiny_model: Make) -> None:
    import transformers

    config = transformers.MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=VOCABULARY, sliding_window=7, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    make_consistent(model)
    rng = np.random.default_rng(2)
    requests = requests_of(rng, 8, vocabulary=VOCABULARY, longest=24, temperature=1.0)
    results = asyncio.run(sampled(engine_of(model, max_sequences=3), requests, rng, cuts=1))
    assert distances(results, scored(model, requests, results, rng)).max() == 0


async def test_the_engines_own_scores_are_the_trainers_too(models: Callable[..., Any]) -> None:
    model = models(KINDS[1])
    streams = [list(range(3, 3 + length)) for length in (2, 30, 9)]
    together = await engine_of(model).score(streams, temperature=0.7)
    for stream, scores in zip(streams, together, strict=True):
        [alone] = score_streams(model, [np.array(stream)], temperature=0.7)
        np.testing.assert_array_equal(scores, alone)


async def test_a_greedy_token_has_its_log_probability_at_temperature_one(models: Callable[..., Any]) -> None:
    model = models(KINDS[0])
    request = SampleRequest((5, 6, 7), SampleSettings(6, 0.0), (0,))
    found = await engine_of(model).generate(request)
    [scores] = score_streams(model, [np.array([*request.tokens, *found.tokens])])
    np.testing.assert_array_equal(np.float32(found.logprobs), scores[3:])


def test_what_would_compute_otherwise_is_refused(models: Callable[..., Any]) -> None:
    model = models(KINDS[0])
    assert is_consistent(model)
    for option in ({"pack_weights": True}, {"compiled": True}):
        with pytest.raises(ValueError, match="what the trainer does not"):
            engine_of(model, **option)
