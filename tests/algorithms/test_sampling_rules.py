"""Dynamic sampling, overlong filtering and the soft overlong penalty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.algorithms.sampling_rules import dynamic_sampling, overlong_filter, soft_overlong_penalty


def test_groups_with_a_signal_are_kept_in_order() -> None:
    rewards = torch.tensor([0.7, 1.0, 0.7, 0.0, 0.7, 1.0, 1.0, 0.5])
    groups = torch.tensor([9, 4, 9, 4, 9, 1, 1, 2])
    got = dynamic_sampling(rewards, groups, wanted=2)
    assert (got.kept, got.without_spread, got.surplus, got.refill) == ([4], [9, 1, 2], [], 1)
    got = dynamic_sampling(rewards, groups, wanted=2, refills=3, max_refills=3)
    assert (got.kept, got.without_spread, got.surplus, got.refill) == ([9, 4], [1, 2], [], 0)


@given(
    drawn=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.7])), min_size=1, max_size=30),
    wanted=st.integers(1, 8),
    refills=st.integers(0, 3),
    bound=st.none() | st.integers(0, 3),
)
def test_every_group_is_accounted_for(
    drawn: list[tuple[int, float]], wanted: int, refills: int, bound: int | None
) -> None:
    groups, rewards = torch.tensor([g for g, _ in drawn]), torch.tensor([r for _, r in drawn])
    got = dynamic_sampling(rewards, groups, wanted=wanted, refills=refills, max_refills=bound)
    assert sorted(got.kept + got.without_spread + got.surplus) == sorted(set(groups.tolist()))
    assert len(got.kept) <= wanted
    assert got.refill == wanted - len(got.kept)
    exhausted = bound is not None and refills >= bound
    for group in got.kept:
        assert exhausted or len(set(rewards[groups == group].tolist())) > 1
    assert not (got.surplus and got.refill)


def test_overlong_filter() -> None:
    mask = torch.tensor([False, True, True, False, True, False])
    ids = torch.tensor([0, 0, 1, 1, 2, -1])
    got = overlong_filter(mask, torch.tensor([False, True, False]), ids)
    assert got.tolist() == [False, True, False, False, True, False]


def test_soft_penalty_is_bounded_and_monotone() -> None:
    lengths = torch.arange(0, 400)
    got = soft_overlong_penalty(lengths, max_tokens=100, buffer=20)
    assert bool((got[:81] == 0).all())
    assert float(got[90]) == -0.5
    assert bool((got[100:] == -1).all())
    assert bool((got.diff() <= 0).all())
    assert float(soft_overlong_penalty(torch.tensor([10**9]), max_tokens=100, buffer=20, factor=0.3)) == pytest.approx(
        -0.3
    )
    for settings in ({"buffer": 0}, {"buffer": 101}, {"buffer": 20, "factor": -1.0}):
        with pytest.raises(ValueError, match="buffer"):
            soft_overlong_penalty(lengths, max_tokens=100, **settings)  # type: ignore[arg-type]
