"""The noise of NEFTune: its size, whom it belongs to, and that it reaches training alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from strop.models.neftune import embedding_noise, noisy_embeddings


def test_its_size_is_that_of_the_paper() -> None:
    """Uniform in +-alpha / sqrt(L d): of each sequence's own length."""
    alpha, width, lengths = 5.0, 64, [400, 100]
    noise = embedding_noise(lengths, width, alpha, keys=[1, 2], update=0)
    assert noise.shape == (500, width)
    assert noise.dtype == torch.float32
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        bound = alpha / math.sqrt(length * width)
        assert float(part.abs().max()) <= bound
        assert float(part.abs().max()) > 0.999 * bound
        # Of a uniform distribution in +-1: mean 0, variance 1/3.
        assert float(part.mean()) == pytest.approx(0, abs=4 * bound / math.sqrt(3 * part.numel()))
        assert float(part.var()) == pytest.approx(bound**2 / 3, rel=0.05)


def test_it_belongs_to_a_sequence_and_an_update() -> None:
    def noise(lengths: list[int], keys: list[int], update: int = 3) -> tuple[torch.Tensor, ...]:
        return embedding_noise(lengths, 8, 5.0, keys=keys, update=update).split(lengths)

    together = noise([4, 6, 3], [11, 2**64 - 1, 5])
    assert torch.equal(noise([6], [2**64 - 1])[0], together[1])
    # A key may have passed through int64.
    assert torch.equal(noise([6], [-1])[0], together[1])
    assert torch.equal(noise([3, 4], [5, 11])[1], together[0])
    assert not torch.equal(noise([4], [12])[0], together[0])
    assert not torch.equal(noise([4], [11], update=4)[0], together[0])
    # Nothing is drawn from, or left in, the global generators.
    state = np.random.get_state()[1].copy(), torch.get_rng_state()
    noise([4], [11])
    assert np.array_equal(np.random.get_state()[1], state[0])
    assert torch.equal(torch.get_rng_state(), state[1])


def test_it_is_added_to_the_embeddings_inside_alone(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    ids = torch.tensor([[3, 4, 5, 6]])
    noise = embedding_noise([4], 32, 5.0, keys=[1], update=0)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with noisy_embeddings(model, noise):
            inside = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
        embedded = model.get_input_embeddings()(ids) + noise
        expected = model(inputs_embeds=embedded).logits
    assert torch.equal(after, plain)
    assert torch.equal(inside, expected)
    assert not torch.equal(inside, plain)
