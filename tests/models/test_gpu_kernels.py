"""Packed attention on a GPU in half precision, beside the same in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from strop.models import attention_flash
from strop.models.attention import running
from strop.models.blocks import ChangedBlocks
from strop.models.forward import packed_inputs, packed_logprobs
from strop.models.layout import pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def model_of(window: int | None, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=192, max_position_embeddings=4096, sliding_window=window, head_dim=64,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.to("cuda", dtype).train()


def gradients(model: Any, streams: Any, shared: Any, recompute: Any = None, compiled: bool = False) -> dict[str, Any]:
    inputs = packed_inputs(pack(streams, shared), [np.arange(len(s)) > 0 for s in streams], torch.device("cuda"))
    blocks = ChangedBlocks(model, compiled=compiled, recompute=recompute or False) if recompute or compiled else None
    model.zero_grad()
    with running(model, inputs.attention):
        if blocks is None:
            logprobs, _ = packed_logprobs(model, inputs)
            (logprobs.sum() / len(logprobs)).backward()
        else:
            with blocks.used():
                logprobs, _ = packed_logprobs(model, inputs)
                (logprobs.sum() / len(logprobs)).backward()
    return {"logprobs": logprobs.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("long", [10_000, 40], ids=["ragged", "long-ones-alone"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("recompute", "compiled"), [(None, False), (True, False), ("keep_attention", False), ("keep_attention", True)]
)
def test_packed_attention_in_half_precision(
    long: int, window: int | None, recompute: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_flash, "LONG", long)
    torch.use_deterministic_algorithms(False)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 97, 33)
    streams = [np.concatenate([prompt, rng.integers(0, 97, n)]) for n in (3, 50, 21, 64)]
    streams += [rng.integers(0, 97, n) for n in (1, 130, 7, 200)]
    shared = [33, 33, 33, 33, 0, 0, 0, 0]
    wanted = gradients(model_of(window, torch.float32), streams, shared)
    found = gradients(model_of(window, torch.bfloat16), streams, shared, recompute, compiled)
    plain = gradients(model_of(window, torch.bfloat16), streams, shared)
    for name, value in wanted.items():
        assert gap(found[name], value) < 0.06, name
        # What is computed again, or is compiled, is as near as what is not.
        assert gap(found[name], value) < 1.5 * gap(plain[name], value) + 1e-3, name


def test_deterministic_algorithms_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    streams = [rng.integers(0, 97, n) for n in (1500, 300, 1100)]
    model = model_of(None, torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (gradients(model, streams, [0, 0, 0], "keep_attention") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
