"""The kernels of the consistent mode: a row gives the same bits alone, among others, packed and over a cache.

On a GPU, or anywhere in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/models/test_consistent_kernels.py`. The
interpreter shows that tiles, masks and tables are right; how a card adds up within a tile only a card shows.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.layout import pack
from strop.models.scores import Scores

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
# The interpreter multiplies bfloat16 as if it were whole numbers.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_order_of_adding_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card multiplies each row of a tile alike. The interpreter has BLAS do it, which does not."""

    def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        out = np.zeros((a.shape[0], b.shape[1]), dtype)
        for at in range(a.shape[1]):
            out += a[:, at, None].astype(dtype) * b[at].astype(dtype)
        return out

    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", product)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(found: Tensor, wanted: Tensor) -> None:
    gap = float((found.double() - wanted).norm() / wanted.norm())
    assert gap < (5e-6 if found.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(64, 128), (100, 37), (7, 300)])
@pytest.mark.parametrize("bias", [True, False])
def test_products(dtype: torch.dtype, depth: int, columns: int, bias: bool) -> None:
    from strop.models.consistent_kernels import linear

    x, weight = draw(700, depth, dtype=dtype), draw(columns, depth, dtype=dtype, seed=1)
    added = draw(columns, dtype=dtype, seed=2) if bias else None
    found = linear(x, weight, added)
    near(found, F.linear(x.double(), weight.double(), None if added is None else added.double()))
    for rows in ([0], [699], [5, 3], range(60, 70), range(1, 700, 3)):
        assert torch.equal(linear(x[list(rows)], weight, added), found[list(rows)])
    # In three dimensions, and from every second row of something wider.
    wide = torch.cat([x, x], 1)[:, :depth]
    assert torch.equal(linear(wide.view(7, 100, depth), weight, added), found.view(7, 100, columns))
    assert linear(x[:0], weight, added).shape == (0, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 128, 576, 3000])
def test_norms(dtype: torch.dtype, size: int) -> None:
    from strop.models.consistent_kernels import rms_norm

    x, weight = draw(41, size, dtype=dtype), draw(size, dtype=dtype, seed=1)
    found = rms_norm(x, weight, 1e-6)
    wide = x.double()
    near(found, weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))
    for rows in ([0], [40], [7, 2, 2], range(10, 30)):
        assert torch.equal(rms_norm(x[list(rows)], weight, 1e-6), found[list(rows)])
    assert torch.equal(rms_norm(x[None, :, None], weight, 1e-6)[0, :, 0], found)


def streams_of(lengths: Sequence[int], shared: int) -> list[np.ndarray]:
    """Streams of these lengths, which begin alike."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, 50, shared)
    return [np.concatenate([beginning, rng.integers(0, 50, length - shared)]) for length in lengths]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 2, 16), (3, 1, 64), (2, 2, 40)])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_packed_alone_and_over_a_cache(
    dtype: torch.dtype, heads: int, shared: int, size: int, window: int | None
) -> None:
    from strop.models.attention_consistent import CachedTiles, PackedTiles

    scores = Scores(scaling=0.2, window=window, consistent=True)
    streams = streams_of([150, 90, 71], 70)
    # What a token's query, key and value are depends on the token and its position alone.
    table = {
        name: draw(50, 200, h, size, dtype=dtype, seed=at)
        for at, (name, h) in enumerate([("query", heads), ("key", shared), ("value", shared)])
    }

    def of(name: str, ids: np.ndarray, positions: np.ndarray) -> Tensor:
        picked = table[name][torch.from_numpy(ids).to(DEVICE), torch.from_numpy(positions).to(DEVICE)]
        return picked.transpose(0, 1)[None]

    def attended(given: Sequence[np.ndarray], together: bool) -> list[Tensor]:
        packed = pack(given, [70 - 1] * len(given) if together else None)
        layout = packed.layout
        parts = [of(name, layout.input_ids, layout.position_ids) for name in ("query", "key", "value")]
        found = PackedTiles(layout, DEVICE).attend(*parts, scores)[0]
        return [found[torch.from_numpy(places).to(DEVICE)] for places in packed.places]

    alone = [attended([stream], together=False)[0] for stream in streams]
    for stream, found in zip(streams, alone, strict=True):
        q, k, v = (of(name, stream, np.arange(len(stream)))[0].double() for name in ("query", "key", "value"))
        at = torch.arange(len(stream), device=DEVICE)
        distance = at[:, None] - at[None, :]
        seen = (distance >= 0) & (distance < (window or 1000))
        k, v = (x.repeat_interleave(heads // shared, 0) for x in (k, v))
        near(found, F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2).transpose(0, 1))
    for together in (True, False):
        for mine, found in zip(attended(streams, together), alone, strict=True):
            assert torch.equal(mine, found)
    # Each token in turn as the new one of a row of a cache, whose other places are rubbish.
    keys, values = (torch.full((5, shared, 192, size), 1e4, dtype=dtype, device=DEVICE) for _ in range(2))
    for length in (0, 1, 63, 64, 70):
        lengths = torch.tensor([length + extra for extra in (0, 3, 0)], device=DEVICE)
        asked = []
        for row, (stream, held) in enumerate(zip(streams, lengths.tolist(), strict=True)):
            span = np.arange(held + 1)
            keys[row, :, : held + 1] = of("key", stream[span], span)[0]
            values[row, :, : held + 1] = of("value", stream[span], span)[0]
            asked.append(of("query", stream[held : held + 1], span[held:]))
        found = CachedTiles(lengths).attend(torch.cat(asked, 2), keys, values, scores)[0]
        for row, held in enumerate(lengths.tolist()):
            assert torch.equal(found[row], alone[row][held])


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sum_exps_of_rows_with_temperatures_of_their_own(dtype: torch.dtype) -> None:
    from strop.models.logprobs_fused import read

    logits = draw(9, 5000, dtype=dtype) * 3
    targets = torch.arange(9, device=DEVICE) * 500
    temperatures = torch.tensor([1.0, 0.7, 1.3] * 3, device=DEVICE)
    together = read(logits, targets, temperatures.reciprocal())
    near(together[0], torch.logsumexp(logits.double() / temperatures[:, None].double(), -1))
    for row in (1, 4):
        # As the trainer has it: one for all.
        alone = read(logits[row - 1 : row + 1], targets[row - 1 : row + 1], temperatures[1:2].reciprocal())
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[1], theirs[row])
