"""Sums that no order of adding up can change: a row alone gives the bits that it gives among others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from strop.models import exact_sums

DTYPES = [torch.float32, torch.bfloat16]


def draw(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    """Normal numbers, of which each row has a size of its own."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.exp(torch.randn(*shape[:-1], 1, generator=random) * spread)
    return torch.randn(*shape, generator=random) * rows


def weight_and_bias(depth: int, columns: int) -> tuple[Tensor, Tensor]:
    return draw(1, columns, depth), draw(2, columns)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: exact_sums.linear(x, *(w.to(x.dtype) for w in weight_and_bias(x.shape[-1], 33))),
    "rms_norm": lambda x: exact_sums.rms_norm(x, draw(3, x.shape[-1]).to(x.dtype), 1e-6),
    "silu": exact_sums.silu,
    "log_sum_exp": lambda x: exact_sums.log_sum_exp(x.float()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 70), depth=st.integers(1, 300), spread=st.sampled_from([0, 9]))
def test_neighbours_and_places_change_no_bit(
    name: str, dtype: torch.dtype, seed: int, rows: int, depth: int, spread: float
) -> None:
    operator = OPERATORS[name]
    x = draw(seed, rows, depth, spread=spread).to(dtype)
    together = operator(x)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    chosen = order[: 1 + seed % rows]
    torch.testing.assert_close(operator(x[chosen]), together[chosen], rtol=0, atol=0)


@pytest.mark.parametrize("depth", [7, 128, 1536, 9000])
def test_products_are_not_much_further_from_the_truth_than_those_of_blas(depth: int) -> None:
    x, (weight, bias) = draw(0, 50, depth), weight_and_bias(depth, 40)
    truth = F.linear(x.double(), weight.double(), bias.double())
    ours, theirs = ((f(x, weight, bias) - truth).norm() for f in (exact_sums.linear, F.linear))
    assert ours < 8 * theirs


def test_whole_numbers_leave_room_for_every_sum() -> None:
    for count in (1, 2, 3, 128, 129, 1536, 100_000):
        digits = exact_sums._digits(count)
        assert count * 2 ** (2 * digits) <= 2**53
        numbers, _ = exact_sums.whole_numbers(draw(count, 9, 40), digits)
        assert float(numbers.abs().max()) <= 2**digits
        assert torch.equal(numbers, numbers.round())


def test_zeros_and_numbers_that_are_none() -> None:
    weight, bias = weight_and_bias(8, 3)
    assert torch.equal(exact_sums.linear(torch.zeros(2, 8), weight, bias), bias.expand(2, 3))
    x = torch.zeros(2, 8)
    x[1, 2] = float("nan")
    found = exact_sums.linear(x, weight)
    assert not bool(found[0].isnan().any())
    assert bool(found[1].isnan().all())


def test_functions_of_numbers() -> None:
    below = torch.cat([-torch.rand(5000) * 86, -torch.rand(5000), torch.zeros(1)])
    assert float((exact_sums.exp(below).double() / torch.exp(below.double()) - 1).abs().max()) < 3e-7
    assert float(exact_sums.exp(torch.tensor(0.0))) == 1.0
    assert 0 <= float(exact_sums.exp(torch.tensor(-float("inf")))) < 1e-37
    above = 1 + torch.rand(5000, dtype=torch.float64) * torch.logspace(-9, 6, 5000, dtype=torch.float64)
    assert float((exact_sums.log(above) - torch.log(above)).abs().max()) < 1e-14
    x = torch.linspace(-100, 100, 4001)
    torch.testing.assert_close(exact_sums.silu(x), F.silu(x), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_softmax_attention_and_padding_leaves_no_trace(dtype: torch.dtype) -> None:
    length, size = 1100, 16
    q, k, v = (draw(at, 2, 3, length, size, spread=0.3).to(dtype) for at in range(3))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    found = exact_sums.attention(q, k, v, causal, 0.25)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=causal, scale=0.25)
    assert float((found.double() - wanted).norm() / wanted.norm()) < (1e-5 if dtype == torch.float32 else 4e-3)
    for at in (0, 3, 511, 512, 900):
        # One query over a cache of another size, in which what is not seen is anything.
        seen = torch.arange(1000) <= at
        keys, values = (torch.where(seen[:, None], x[:, :, :1000].float(), 1e30).to(dtype) for x in (k, v))
        alone = exact_sums.attention(q[:, :, at : at + 1], keys, values, seen[None, None, None], 0.25)
        assert torch.equal(alone, found[:, :, at : at + 1])
    # Other streams in the batch.
    assert torch.equal(exact_sums.attention(q[1:], k[1:], v[1:], causal, 0.25), found[1:])


def test_log_sum_exp_of_a_whole_vocabulary() -> None:
    logits = draw(0, 6, 49_152, spread=1.0)
    logits[0] = 0.0
    truth = torch.logsumexp(logits.double(), -1)
    assert float((exact_sums.log_sum_exp(logits) - truth).abs().max()) < 5e-6
