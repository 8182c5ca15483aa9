"""Aggregation: every mode against a plain sum, any cut into micro-batches, any layout, nothing at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.aggregation import Mode, aggregate, denominators

MODES: list[Mode] = ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"]


def plain(rows: list[torch.Tensor], masks: list[torch.Tensor], mode: str, longest: int) -> torch.Tensor:
    sums = [row[mask].sum() for row, mask in zip(rows, masks, strict=True)]
    counts = [int(mask.sum()) for mask in masks]
    alive = max(sum(count > 0 for count in counts), 1)
    if mode == "token_mean":
        return sum(sums) / max(sum(counts), 1)  # type: ignore[return-value]
    if mode == "sequence_mean":
        return sum(s / max(c, 1) for s, c in zip(sums, counts, strict=True)) / alive  # type: ignore[return-value]
    if mode == "sequence_mean_token_sum":
        return sum(sums) / alive  # type: ignore[return-value]
    return sum(sums) / (len(rows) * longest)  # type: ignore[return-value]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 99), data=st.data())
def test_parts_add_up_to_the_whole(mode: Mode, lengths: list[int], seed: int, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weights = torch.randn(len(ids), generator=draw, requires_grad=True)
    mask = torch.rand(len(ids), generator=draw) < 0.6
    values = torch.where(mask, weights.square(), torch.nan)
    longest = 11
    count = denominators(mask, ids, max_new_tokens=longest)[mode]
    whole = aggregate(values, mask, ids, mode=mode, denominator=count)
    expected = plain(list(values.split(lengths)), list(mask.split(lengths)), mode, longest)
    torch.testing.assert_close(whole, expected)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
    parts = []
    for micro in range(3):
        cut = owner[ids] == micro
        parts.append(aggregate(values[cut], mask[cut], ids[cut], mode=mode, denominator=count))
    total = torch.stack(parts).sum()
    torch.testing.assert_close(total, whole)
    got, wanted = (torch.autograd.grad(x, weights, retain_graph=True)[0] for x in (total, whole))
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    assert bool(wanted.isfinite().all())
    # Counts of ranks that hold different sequences add up.
    by_rank = [
        denominators(mask[owner[ids] == r], ids[owner[ids] == r], max_new_tokens=longest)[mode] for r in range(3)
    ]
    assert sum(by_rank) == count


def test_what_counts() -> None:
    mask, ids = torch.ones(3, 10, dtype=torch.bool), torch.arange(3)[:, None].expand(3, 10)
    mask[0, :5] = False
    assert denominators(mask, ids) == {"token_mean": 25, "sequence_mean": 3, "sequence_mean_token_sum": 3}
    mask[0] = False
    assert denominators(mask, ids, max_new_tokens=10) == {
        "token_mean": 20,
        "sequence_mean": 2,
        "sequence_mean_token_sum": 2,
        "constant": 30,
    }
    padded = ids.clone()
    padded[:, 8:] = -1
    mask[:, 8:] = False
    assert denominators(mask, padded, max_new_tokens=10)["constant"] == 30
    assert float(aggregate(torch.ones(3, 10), mask, padded, mode="sequence_mean", denominator=2)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train(mode: Mode) -> None:
    values = torch.full((2, 3), torch.nan, requires_grad=True)
    mask, ids = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)
    total = aggregate(values, mask, ids, mode=mode, denominator=denominators(mask, ids, max_new_tokens=3)[mode])
    assert float(total.detach()) == 0
    assert bool((torch.autograd.grad(total, values)[0] == 0).all())
    empty = torch.zeros(0, requires_grad=True)
    total = aggregate(empty, empty.bool(), empty.long(), mode=mode, denominator=7)
    assert float(total.detach()) == 0


def test_low_precision_is_summed_in_float32() -> None:
    values, mask = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bool)
    got = aggregate(values, mask, torch.zeros(4096, dtype=torch.int64), denominator=4096)
    assert got.dtype == torch.float32
    assert float(got) == 1


def test_refusals() -> None:
    one, ids = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    for count in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="denominator"):
            aggregate(one, one.bool(), ids, denominator=count)
    with pytest.raises(ValueError, match="unknown aggregation"):
        aggregate(one, one.bool(), ids, mode="mean", denominator=1)  # type: ignore[arg-type]
