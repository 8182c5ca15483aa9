"""strop's kernels against plain computations of the same in higher precision.

On a GPU, or anywhere in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/models/test_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from strop.models.logprobs import _Head, _LinearLogprobs, linear_logprobs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
# What the interpreter has no room for is of no interest in it either.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
@pytest.mark.parametrize("which", ["all", "frozen", "even", "not even after all"])
def test_fused_logprobs_are_those_of_the_plain_way(dtype: torch.dtype, entropy: Any, which: str) -> None:
    from strop.models.logprobs_fused import FusedLogprobs

    torch.manual_seed(0)
    count, width, vocabulary, chunk = 37, 24, 9001, 16
    hidden = torch.randn(count, width, device=DEVICE, dtype=dtype)
    weight = torch.randn(vocabulary, width, device=DEVICE, dtype=dtype) / 4
    bias = torch.randn(vocabulary, device=DEVICE, dtype=dtype)
    targets = torch.randint(0, vocabulary, (count,), device=DEVICE)
    factor = torch.ones(count, device=DEVICE) if which == "even" else torch.randn(count, device=DEVICE)
    even = which in ("even", "not even after all")

    def run(way: Any, number: torch.dtype) -> list[torch.Tensor]:
        h, w, b = (x.detach().to(number).requires_grad_() for x in (hidden, weight, bias))
        if which == "frozen":
            w, b = w.detach(), b.detach()
        hits = torch.zeros(count, device=DEVICE)
        logprobs, spread = way(h, w, b, hits)
        loss = (logprobs * factor).sum()
        if entropy == "graph":
            loss = loss + (spread * factor.flip(0)).sum()
        loss.backward(retain_graph=True)
        once = [x.grad.clone() for x in (h, w, b) if x.grad is not None]
        loss.backward()
        twice = [x.grad for x in (h, w, b) if x.grad is not None]
        return [logprobs.detach(), hits, *once, *twice, *([] if entropy == "none" else [spread.detach()])]

    found = run(lambda h, w, b, hits: FusedLogprobs.apply(h, w, b, targets, 0.7, chunk, entropy, hits, even), dtype)
    wanted = run(
        lambda h, w, b, hits: _LinearLogprobs.apply(h, w, b, targets, _Head(0.7, None, chunk, entropy, hits, even)),
        torch.float64,
    )
    assert len(found) == len(wanted)
    if which == "not even after all" and DEVICE == "cuda" and entropy != "graph":
        # Nobody waits to see whether rows that were said to count alike do: the optimizer refuses what comes of it.
        assert all(bool(torch.isnan(grad).any()) for grad in found[2:5])
        return
    for mine, theirs in zip(found, wanted, strict=True):
        assert gap(mine, theirs) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.skipif(INTERPRETED, reason="is about the choice on a GPU")
def test_log_probabilities_on_a_gpu_are_fused() -> None:
    hidden, weight = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.randn(20, 8, device=DEVICE)
    logprobs, _ = linear_logprobs(hidden, weight, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert "FusedLogprobs" in type(logprobs.grad_fn).__name__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 2, 64), (8, 8, 48), (16, 2, 128), (2, 1, 16)])
@pytest.mark.parametrize("window", [None, 70])
def test_decoding_kernel(dtype: torch.dtype, heads: int, shared: int, size: int, window: int | None) -> None:
    from strop.rollout.engines.decode_kernel import decode_attention

    torch.manual_seed(0)
    rows, capacity = 5, 300
    lengths = torch.tensor([0, 1, 64, 200, 299], device=DEVICE, dtype=torch.int32)
    keys, values = (torch.randn(rows + 2, shared, capacity, size, device=DEVICE, dtype=dtype) for _ in range(2))
    query = torch.randn(1, rows, heads, size, device=DEVICE, dtype=dtype).transpose(1, 2)[0].transpose(0, 1)
    key, value = (torch.randn(rows, shared, size, device=DEVICE, dtype=dtype) for _ in range(2))
    untouched = keys.clone()
    found = decode_attention(query, key, value, keys, values, lengths, scaling=0.2, window=window)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(keys[row, :, length], key[row])
        assert torch.equal(values[row, :, length], value[row])
        assert torch.equal(keys[row, :, :length], untouched[row, :, :length])
        first = 0 if window is None else max(0, length + 1 - window)
        k, v = (x[row, :, first : length + 1].repeat_interleave(heads // shared, 0).double() for x in (keys, values))
        weights = torch.softmax((k @ query[row].double()[..., None])[..., 0] * 0.2, -1)
        wanted = (weights[..., None] * v).sum(1)
        assert float((found[row].double() - wanted).norm() / wanted.norm()) < (2e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(keys[rows:], untouched[rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_decoding_kernel_copies_no_parts_of_a_joined_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.rollout.engines.decode_kernel import decode_attention

    torch.manual_seed(0)
    rows, heads, shared, size, capacity = 3, 4, 2, 16, 80
    lengths = torch.tensor([0, 5, 79], device=DEVICE, dtype=torch.int32)
    joined = torch.randn(rows, (heads + 2 * shared) * size, device=DEVICE, dtype=dtype)
    query, key, value = (
        part.view(rows, -1, size) for part in joined.split([n * size for n in (heads, shared, shared)], dim=-1)
    )
    # As after a rotary embedding: the query and the key are tensors of their own, the key's heads before its rows.
    query, key = query.clone(), key.transpose(0, 1).contiguous().transpose(0, 1)
    assert key.stride() != value.stride()
    assert not value.is_contiguous()
    cache = torch.randn(2, rows, shared, capacity, size, device=DEVICE, dtype=dtype)
    contiguous = key.contiguous(), value.contiguous()

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a copy")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    found = []
    for new in ((key, value), contiguous):
        keys, values = cache.clone()
        found.append((decode_attention(query, *new, keys, values, lengths, scaling=0.2), keys, values))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def drawn(logits: torch.Tensor, temperatures: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from strop.rollout.engines.draw_kernel import draw

    return draw(logits, temperatures, u)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 255, 256, 257, 4096, 4097, 9001])
def test_the_drawing_kernel_draws_what_is_drawn_without_it(dtype: torch.dtype, vocabulary: int) -> None:
    from strop.rollout.sampling import draw

    torch.manual_seed(vocabulary)
    rows = 40
    logits = (3 * torch.randn(rows, vocabulary, device=DEVICE)).to(dtype)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.0], device=DEVICE).repeat(rows // 4)
    u = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    tokens, logprobs = drawn(logits, temperatures, u)
    wanted, wanted_logprobs = draw(logits, temperatures, u)
    assert (tokens.dtype, logprobs.dtype) == (wanted.dtype, wanted_logprobs.dtype)
    assert torch.equal(tokens, wanted)
    assert (logprobs - wanted_logprobs).abs().max() < 5e-6
    # A row of a larger tensor, and one that is read with steps.
    wide = torch.zeros(rows, 2 * vocabulary, device=DEVICE, dtype=dtype)
    wide[:, :vocabulary] = logits
    for view in (wide[:, :vocabulary], logits.t().contiguous().t()):
        assert torch.equal(drawn(view, temperatures, u)[0], wanted)


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-53])
@pytest.mark.parametrize("vocabulary", [255, 257, 8300])
def test_the_drawing_kernel_never_draws_what_is_impossible(u: float, vocabulary: int) -> None:
    torch.manual_seed(3)
    rows = 6
    logits = 20 * torch.randn(rows, vocabulary, device=DEVICE)
    allowed = torch.rand(rows, vocabulary, device=DEVICE) < 0.01
    # In the last place alone, in the first alone, and in two that are far apart and far from alike.
    allowed[:3] = False
    allowed[0, -1] = allowed[1, 0] = allowed[2, 0] = allowed[2, -1] = allowed[3:, vocabulary // 2] = True
    logits[2, 0], logits[2, -1] = 300.0, 420.0
    logits = logits.masked_fill(~allowed, -torch.inf)
    at = torch.full((rows,), u, dtype=torch.float64, device=DEVICE)
    tokens, logprobs = drawn(logits, torch.ones(rows, device=DEVICE), at)
    assert bool(allowed.gather(1, tokens[:, None]).all())
    wanted = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs.double() - wanted).abs().max() < 1e-4
    assert logprobs.isfinite().all()


def test_what_is_no_number_stays_none_in_the_drawing_kernel() -> None:
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[0, 4990] = torch.nan
    logprobs = drawn(logits, torch.ones(2, device=DEVICE), torch.full((2,), 0.1, dtype=torch.float64, device=DEVICE))[1]
    assert logprobs.isnan().tolist() == [True, False]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter finds no likeliest one among what is no number")
@pytest.mark.parametrize("vocabulary", [13, 4096, 5000])
def test_a_greedy_token_is_one_of_the_vocabulary_though_no_logit_is_a_number(vocabulary: int) -> None:
    logits = torch.full((3, vocabulary), torch.nan, device=DEVICE)
    tokens, logprobs = drawn(logits, torch.zeros(3, device=DEVICE), torch.zeros(3, dtype=torch.float64, device=DEVICE))
    assert bool(((tokens >= 0) & (tokens < vocabulary)).all())
    assert bool(logprobs.isnan().all())
