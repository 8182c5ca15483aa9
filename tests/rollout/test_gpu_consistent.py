"""The consistent mode on a GPU, with the kernels that a card is there for: see `test_consistent.py`.

The shape is that of Qwen3-0.6B, of whose 28 blocks there are four.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from consistent_cases import distances, requests_of, sampled, scored

from strop.config.model import LoraConfig
from strop.models.attention import running
from strop.models.blocks import ChangedBlocks
from strop.models.consistent_mode import make_consistent
from strop.models.forward import packed_inputs, packed_logprobs
from strop.models.layout import pack
from strop.models.load import add_lora
from strop.rollout.engines.local import LocalEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCABULARY = 151_936


def model_of(*, consistent: bool, adapted: bool = False, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 2048,
            "tie_word_embeddings": True, **shape,
        }
    )  # fmt: skip
    model: Any = transformers.Qwen3ForCausalLM(config).to("cuda", dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # So that what stands before a token matters to it.
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    if adapted:
        model = add_lora(model, LoraConfig(rank=8), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
    if consistent:
        make_consistent(model)
    return model


def found(model: Any, *, seed: int, count: int, rows: int, longest: int, cuts: int = 1, **options: Any) -> np.ndarray:
    """Distances of what an engine noted to what the trainer computes in other passes."""
    rng = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    requests = requests_of(rng, count, vocabulary=vocabulary, longest=longest, temperature=0.9)
    engine = LocalEngine(model, None, eos_ids=(1,), seed=5, context=2048, max_sequences=rows, **options)
    results = asyncio.run(sampled(engine, requests, rng, cuts=cuts))
    if options.get("graphs", True):
        assert engine._capture, "decoding steps could not be captured"
    return distances(results, scored(model, requests, results, rng))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("graphs", [True, False])
def test_the_mismatch_in_bfloat16_is_exactly_zero(adapted: bool, graphs: bool) -> None:
    model = model_of(consistent=True, adapted=adapted)
    for seed, (count, rows, longest) in enumerate([(80, 48, 150), (7, 3, 300), (1, 1, 40)]):
        gaps = found(model, seed=seed, count=count, rows=rows, longest=longest, graphs=graphs, prefill_tokens=700)
        assert gaps.max() == 0, f"{(gaps > 0).mean():.1%} of {len(gaps)} tokens differ, by {gaps.max():.2g} at most"


def test_the_ordinary_mode_has_some() -> None:
    assert found(model_of(consistent=False), seed=0, count=40, rows=24, longest=100).max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_shapes(dtype: torch.dtype) -> None:
    """Three query heads to a key head, of a size that is no power of two, and a small vocabulary."""
    shape = {
        "hidden_size": 288, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48,
        "intermediate_size": 520, "vocab_size": 1003, "num_hidden_layers": 2,
    }  # fmt: skip
    model = model_of(consistent=True, dtype=dtype, **shape)
    assert found(model, seed=3, count=40, rows=16, longest=120, cuts=2).max() == 0


@pytest.mark.parametrize("recompute", [False, True, "keep_attention"])
def test_gradients_are_those_of_the_ordinary_mode(recompute: Any) -> None:
    def passed(consistent: bool, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = model_of(consistent=consistent, dtype=dtype, num_hidden_layers=2, vocab_size=5000)
        rng = np.random.default_rng(0)
        prompt = rng.integers(3, 5000, 90)
        streams = [np.concatenate([prompt, rng.integers(3, 5000, n)]) for n in (200, 31, 1200)]
        wanted = [np.arange(len(stream)) >= 90 for stream in streams]
        inputs = packed_inputs(pack(streams, [89] * 3), wanted, torch.device("cuda"))
        blocks = ChangedBlocks(model, compiled=False, recompute=recompute)
        with running(model, inputs.attention), blocks.used():
            logprobs, _ = packed_logprobs(model, inputs, entropy="value")
            (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
        return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def gap(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.double() - other.double()).norm() / other.double().norm())

    truth = passed(False, torch.float32)
    ordinary, consistent = passed(False, torch.bfloat16), passed(True, torch.bfloat16)
    assert gap(consistent[0], truth[0]) < 2 * gap(ordinary[0], truth[0])
    assert consistent[1].keys() == truth[1].keys()
    furthest = max(gap(ordinary[1][name], grad) for name, grad in truth[1].items())
    for name, grad in truth[1].items():
        assert gap(consistent[1][name], grad) < 2 * furthest, name
