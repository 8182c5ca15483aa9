"""The further advantage estimators, each against its definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.advantages import discounted_returns, gae
from strop.algorithms.estimators import (
    batch_baseline,
    gae_decoupled,
    gdpo,
    length_adaptive_lam,
    maxrl,
    opo,
    pass_at_k,
    remax,
    running_baseline,
    token_rewards,
)


def test_batch_and_running_baselines() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 2.0])
    torch.testing.assert_close(batch_baseline(rewards), rewards - 1)
    other_rank = torch.tensor([8.0, 2.0])
    torch.testing.assert_close(batch_baseline(rewards, reduce=lambda sums, _: sums + other_rank), rewards - 2)
    first, baseline = running_baseline(rewards, None, decay=0.9)
    torch.testing.assert_close(first, rewards - 1)
    second, baseline = running_baseline(rewards + 1, baseline, decay=0.9)
    torch.testing.assert_close(second, rewards)
    assert baseline == pytest.approx(1.1)
    for _ in range(200):
        _, baseline = running_baseline(rewards + 4, baseline, decay=0.9)
    assert baseline == pytest.approx(5.0)


def test_remax() -> None:
    got = remax(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert got.tolist() == [0.0, -1.0, 1.0]


def test_opo_weighs_by_length_and_cancels() -> None:
    rewards, lengths = torch.tensor([1.0, 0.0, 5.0, 0.0, 3.0]), torch.tensor([30, 10, 4, 4, 9])
    groups = torch.tensor([7, 7, 2, 2, 1])
    got = opo(rewards, lengths, groups)
    torch.testing.assert_close(got, torch.tensor([0.25, -0.75, 2.5, -2.5, 0.0]))
    for group in (7, 2, 1):
        assert float((got * lengths)[groups == group].sum()) == pytest.approx(0)
    assert bool((opo(torch.full((3,), 0.1), torch.tensor([1, 2, 3]), torch.zeros(3).long()) == 0).all())


def test_maxrl_is_the_gradient_of_the_log_pass_rate() -> None:
    got = maxrl(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0, 1, 1]))
    torch.testing.assert_close(got, torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0, 0.0]))


def plain_pass_at_k(correct: list[bool], k: int) -> list[float]:
    """By going through every subset of k completions."""
    n = len(correct)
    subsets = list(itertools.combinations(range(n), k))
    passed = {subset: float(any(correct[i] for i in subset)) for subset in subsets}
    mean = sum(passed.values()) / len(subsets)
    deviation = math.sqrt(mean * (1 - mean))
    if deviation == 0:
        return [0.0] * n
    result = []
    for i in range(n):
        mine = [value for subset, value in passed.items() if i in subset]
        result.append((sum(mine) / len(mine) - mean) / deviation)
    return result


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.lists(st.booleans(), min_size=3, max_size=7), min_size=1, max_size=3), k=st.integers(1, 3))
def test_pass_at_k_equals_all_subsets(groups: list[list[bool]], k: int) -> None:
    correct = torch.tensor([c for group in groups for c in group])
    ids = torch.tensor([i * 10 for i, group in enumerate(groups) for _ in group])
    expected = [a for group in groups for a in plain_pass_at_k(group, k)]
    torch.testing.assert_close(pass_at_k(correct, ids, k=k), torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_pass_at_k_refuses_small_groups() -> None:
    with pytest.raises(ValueError, match="groups of at least k"):
        pass_at_k(torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), k=2)


def test_gdpo_keeps_apart_what_a_sum_would_join() -> None:
    # Two rewards: added first, episodes 1 and 2 of both groups would look the same.
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 10.0], [0.0, 0.0], [1.0, 10.0], [0.0, 10.0]])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    got = gdpo(rewards, groups)
    assert float(got.mean()) == pytest.approx(0, abs=1e-6)
    assert float(got.std()) == pytest.approx(1, abs=1e-5)
    # Size does not matter once each is normalised; weights do.
    torch.testing.assert_close(gdpo(rewards * torch.tensor([1.0, 0.01]), groups), got, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got[1], got[2])
    assert float(gdpo(rewards, groups, weights=torch.tensor([1.0, 0.1]))[2]) < float(got[2])
    assert bool((gdpo(torch.full((6, 2), 0.3), groups) == 0).all())


def test_token_rewards() -> None:
    mask = torch.tensor([False, True, True, False, False, True, False, True])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert token_rewards(rewards, mask, ids).tolist() == [0, 0, 1, 0, 0, 2, 0, 4]
    kl = torch.where(mask, 0.5, torch.nan)
    got = token_rewards(rewards, mask, ids, kl=kl, kl_coef=0.2)
    torch.testing.assert_close(got, torch.tensor([0, -0.1, 0.9, 0, 0, 1.9, 0, 3.9]))
    returns = discounted_returns(got, mask, gamma=1.0, seq_ids=ids)
    torch.testing.assert_close(returns, torch.tensor([0, 0.8, 0.9, 0, 0, 1.9, 0, 3.9]))
    with pytest.raises(ValueError, match="go together"):
        token_rewards(rewards, mask, ids, kl=kl)


def test_decoupled_gae_takes_each_from_its_lambda() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values, mask = (
        torch.randn(2, 9, generator=draw),
        torch.randn(2, 9, generator=draw),
        torch.ones(2, 9).bool(),
    )
    advantages, returns = gae_decoupled(rewards, values, mask, gamma=1.0, lam=0.8)
    assert torch.equal(advantages, gae(rewards, values, mask, gamma=1.0, lam=0.8)[0])
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1), atol=1e-5, rtol=1e-5)


def test_length_adaptive_lambda() -> None:
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1, 100:], mask[2, 10:] = False, False
    ids = torch.arange(3)[:, None].expand(3, 200)
    got = length_adaptive_lam(mask, ids, alpha=0.05)
    torch.testing.assert_close(got[:, 0], torch.tensor([0.9, 0.8, 0.0]))
    assert bool((got[~mask] == 0).all())
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(3, 200, generator=draw), torch.randn(3, 200, generator=draw)
    adaptive, _ = gae(rewards, values, mask, gamma=1.0, lam=got)
    fixed, _ = gae(rewards, values, mask, gamma=1.0, lam=0.8)
    torch.testing.assert_close(adaptive[1], fixed[1])
