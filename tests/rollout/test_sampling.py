"""Draws: uniform, independent, keyed by the sample, and distributed as the softmax says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.sampling import BLOCK, draw, stream_key, uniforms

# Statistics of fixed seeds, so nothing here is a matter of luck; a limit of 4.5 standard deviations is 1 in 150,000.
LIMIT = 4.5


def chi_square_deviations(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations of the chi-square statistic above its mean (Wilson and Hilferty 1931)."""
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def kolmogorov_smirnov(values: np.ndarray) -> float:
    """sqrt(n) times the largest distance from the uniform distribution; above 2.3 once in 50,000."""
    ordered, n = np.sort(values), len(values)
    steps = np.arange(n)
    return float(max((ordered - steps / n).max(), ((steps + 1) / n - ordered).max()) * math.sqrt(n))


def keys_of(streams: int, seed: int = 0) -> np.ndarray:
    """Keys as a run has them: group, sample, turn."""
    return np.asarray([stream_key(seed, (n // 8, n % 8, 0)) for n in range(streams)], dtype=np.uint64)


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_uniforms_are_uniform_over_streams_and_over_positions(seed: int) -> None:
    keys = keys_of(2000, seed)
    grid = np.stack([uniforms(keys, np.full(len(keys), position)) for position in range(50)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert kolmogorov_smirnov(grid.ravel()) < 2.3
    # One position over all streams, and one stream over many positions.
    assert kolmogorov_smirnov(grid[0]) < 2.3
    assert kolmogorov_smirnov(uniforms(np.full(20_000, keys[0]), np.arange(20_000))) < 2.3
    counts = np.histogram(grid, bins=256, range=(0, 1))[0]
    assert chi_square_deviations(counts, np.full(256, grid.size / 256)) < LIMIT


@pytest.mark.parametrize(("streams_apart", "positions_apart"), [(0, 1), (1, 0), (8, 0), (1, 1), (8, -1)])
def test_neighbouring_draws_are_independent(streams_apart: int, positions_apart: int) -> None:
    keys = keys_of(4000)
    positions = np.arange(1, 11)
    a = np.stack([uniforms(keys, np.full(len(keys), p)) for p in positions])
    b = np.stack([uniforms(np.roll(keys, streams_apart), np.full(len(keys), p + positions_apart)) for p in positions])
    counts = np.histogram2d(a.ravel(), b.ravel(), bins=16, range=[[0, 1], [0, 1]])[0].ravel()
    assert chi_square_deviations(counts, np.full(256, a.size / 256)) < LIMIT
    correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
    assert abs(correlation) * math.sqrt(a.size) < LIMIT


def test_streams_that_differ_anywhere_have_keys_of_their_own() -> None:
    streams = [(group, sample, turn) for group in range(60) for sample in range(16) for turn in range(4)]
    streams += [(group,) for group in range(60)] + [(group, sample) for group in range(60) for sample in range(16)]
    keys = {int(stream_key(seed, stream)) for seed in range(5) for stream in streams}
    assert len(keys) == 5 * len(streams)
    assert stream_key(3, (1, 2, 0)) == stream_key(3, (1, 2, 0))
    # The order of the parts counts, and a negative part is a key of its own (evaluations use it).
    assert len({int(stream_key(0, s)) for s in [(1, 2), (2, 1), (-1, 2), (1, -2), (0, 0), (0,), ()]}) == 7


def test_a_draw_depends_on_key_and_position_alone() -> None:
    keys, positions = keys_of(64), np.arange(64) % 7
    together = uniforms(keys, positions)
    order = np.random.default_rng(0).permutation(64)
    assert (uniforms(keys[order], positions[order]) == together[order]).all()
    alone = [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(64)]
    assert (np.asarray(alone) == together).all()


def even_uniforms(count: int) -> torch.Tensor:
    return torch.from_numpy(uniforms(np.full(count, stream_key(0, (4,))), np.arange(count)))


@pytest.mark.parametrize(
    ("vocabulary", "temperature"), [(2, 1.0), (100, 0.7), (255, 1.0), (256, 0.7), (257, 1.0), (300, 0.7), (1000, 1.0)]
)
def test_draws_follow_the_softmax(vocabulary: int, temperature: float) -> None:
    count, batch = 200_000, 2_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    u = even_uniforms(count)
    expected = torch.softmax(logits.double() / temperature, -1)
    logp = torch.log_softmax(logits.double() / temperature, -1)
    found = np.zeros(vocabulary)
    for start in range(0, count, batch):
        rows = logits.expand(batch, vocabulary)
        tokens, logprobs = draw(rows, torch.full((batch,), temperature), u[start : start + batch])
        assert (logprobs.double() - logp[tokens]).abs().max() < 2e-6
        found += np.bincount(tokens.numpy(), minlength=vocabulary)
    assert chi_square_deviations(found, (expected * count).numpy()) < LIMIT


def test_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(1)) * 3
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    for row in range(3):
        for token in [0, 1, 255, 256, 257, 511, 512, 599]:
            low = float(cumulative[row, token - 1]) if token else 0.0
            middle = (low + float(cumulative[row, token])) / 2
            got, _ = draw(logits[row : row + 1], torch.ones(1), torch.tensor([middle], dtype=torch.float64))
            assert int(got) == token


def test_each_row_has_its_own_temperature_and_zero_is_greedy() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)) * 4
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0])
    for u in [0.0, 0.3, 0.999]:
        tokens, logprobs = draw(logits, temperatures, torch.full((4,), u, dtype=torch.float64))
        assert int(tokens[0]) == int(logits[0].argmax())
        for row, temperature in enumerate([1.0, 0.5, 1.0, 2.0]):
            expected = torch.log_softmax(logits[row].double() / temperature, -1)[tokens[row]]
            assert abs(float(logprobs[row]) - float(expected)) < 5e-6


EDGES = [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-53]


@pytest.mark.parametrize("u", EDGES)
@pytest.mark.parametrize("vocabulary", [255, 256, 257, 700])
def test_a_certain_token_is_always_drawn(u: float, vocabulary: int) -> None:
    for certain in {0, 128, 254, vocabulary - 1}:
        logits = torch.zeros(1, vocabulary)
        logits[0, certain] = 1e4
        token, logprob = draw(logits, torch.ones(1), torch.tensor([u], dtype=torch.float64))
        assert int(token) == certain
        assert float(logprob) == 0.0


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 700),
    st.integers(0, 2**31),
    st.one_of(st.sampled_from(EDGES), st.floats(0, 1, exclude_max=True)),
    st.floats(0.05, 30),
)
def test_what_is_impossible_is_never_drawn(vocabulary: int, seed: int, u: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * scale
    allowed = torch.rand(vocabulary, generator=generator) < 0.2
    allowed[int(torch.randint(vocabulary, (1,), generator=generator))] = True
    logits[0, ~allowed] = -torch.inf
    token, logprob = draw(logits, torch.ones(1), torch.tensor([u], dtype=torch.float64))
    assert bool(allowed[token])
    expected = torch.log_softmax(logits[0].double(), -1)[token]
    assert abs(float(logprob) - float(expected)) < 1e-5 * max(1.0, abs(float(expected)))
    # In particular what a rounding beyond the end falls back to has weight.
    assert float(logprob) > -110


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(3)) * 5).bfloat16()
    tokens, logprobs = draw(logits, torch.full((5,), 0.7), torch.rand(5, dtype=torch.float64))
    expected = torch.log_softmax(logits.double() / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - expected).abs().max() < 1e-5


def test_a_draw_on_the_edge_of_a_block_is_of_a_possible_token() -> None:
    """Rounding there can leave a rest below 0, which points at the first token of the block, possible or not."""
    rows, blocks = 1000, 8
    draws = torch.Generator().manual_seed(0)
    # Blocks of very different weight, so that their sums are not exact in float64 either.
    likely = torch.rand(rows, blocks, 1, generator=draws) * -30
    logits = (torch.randn(rows, blocks, BLOCK, generator=draws) + likely).view(rows, -1)
    logits[:, ::BLOCK] = -torch.inf
    weights = torch.exp(logits - logits.max(-1, keepdim=True).values)
    edges = weights.view(rows, blocks, BLOCK).sum(-1).double().cumsum(-1)
    for block in range(blocks - 1):
        u = edges[:, block] / edges[:, -1]
        tokens, logprobs = draw(logits, torch.ones(rows), u)
        assert torch.isfinite(logprobs).all()
        assert (tokens % BLOCK != 0).all()
