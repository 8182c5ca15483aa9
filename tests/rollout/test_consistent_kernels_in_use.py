"""Engine and trainer with the kernels that a GPU has for the consistent mode, in Triton's interpreter.

`TRITON_INTERPRET=1 pytest tests/rollout/test_consistent_kernels_in_use.py`. On a card it is `test_gpu_consistent.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from consistent_cases import distances, requests_of, sampled, scored

from strop.models import exact_sums
from strop.models.attention import PackedAttention
from strop.models.consistent_mode import make_consistent
from strop.models.forward import score_streams
from strop.rollout.engines import local
from strop.rollout.engines.local import LocalEngine

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Computes as on a GPU, and has the rows of each decoding step, which is computed as it would be captured."""
    from strop.models import consistent_kernels
    from strop.models.logprobs_fused import read
    from strop.rollout.engines.graphs import _Step

    def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        # A card multiplies each row of a tile alike, and BLAS does not.
        out = np.zeros((a.shape[0], b.shape[1]), dtype)
        for at in range(a.shape[1]):
            out += a[:, at, None].astype(dtype) * b[at].astype(dtype)
        return out

    def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
        return read(logits, torch.zeros(len(logits), dtype=torch.int64), torch.ones(1))[0]

    ordinary = PackedAttention.attend

    def attend(self: PackedAttention, layer: Any, query: Any, key: Any, value: Any, scores: Any) -> torch.Tensor:
        if scores.consistent:
            return self._consistent(layer, query, key, value, scores)
        return ordinary(self, layer, query, key, value, scores)

    taken: list[int] = []

    def decode(cache: Any, count: int, device: torch.device) -> Any:
        taken.append(count)
        cache.reserve(int(cache.lengths[:count].max()) + 1)
        return _Step(cache, torch.from_numpy(cache.lengths[:count].copy()))

    monkeypatch.setattr(np, "matmul", product)
    monkeypatch.setattr(exact_sums, "linear", consistent_kernels.linear)
    monkeypatch.setattr(exact_sums, "rms_norm", consistent_kernels.rms_norm)
    monkeypatch.setattr(exact_sums, "log_sum_exp", log_sum_exp)
    monkeypatch.setattr(PackedAttention, "attend", attend)
    monkeypatch.setattr(local, "Decode", decode)
    return taken


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_noted_is_what_the_trainer_computes(
    tiny_model: Callable[..., Any], family: str, steps: list[int]
) -> None:
    model = tiny_model(family)
    make_consistent(model)
    rng = np.random.default_rng(0)
    requests = requests_of(rng, 7, vocabulary=40, longest=7, temperature=0.9)
    engine = LocalEngine(model, None, eos_ids=(1,), seed=5, context=256, max_sequences=3, prefill_tokens=20)
    results = asyncio.run(sampled(engine, requests, rng, cuts=1))
    assert len(set(steps)) > 1
    assert distances(results, scored(model, requests, results, rng)).max() == 0
    streams = [np.array([*r.tokens, *x.tokens]) for r, x in zip(requests, results, strict=True)]
    ours, theirs = (np.concatenate(score_streams(m, streams)) for m in (model, tiny_model(family)))
    assert np.nanmax(np.abs(ours - theirs)) < 1e-4
