"""Advantages: properties over random groups and trajectories, against references that are written plainly."""

from __future__ import annotations

import math
import statistics
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.advantages import discounted_returns, gae, group_relative, no_spread, whiten
from strop.algorithms.recurrence import reverse_recurrence

CHOICES = [(b, s) for b in ("mean", "leave_one_out", "none") for s in ("none", "std", "population_std", "mean")]

episodes = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 3.0]), st.integers(0, 4)), min_size=1, max_size=24
)


def plain_group_relative(rewards: list[float], groups: list[int], baseline: str, scale: str, eps: float) -> list[float]:
    if baseline == scale == "none":
        return rewards
    result = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and i != index]
        if len(set(members)) == 1:
            result.append(0.0)
            continue
        base = {"mean": statistics.fmean(members), "leave_one_out": statistics.fmean(others), "none": 0.0}[baseline]
        divisor = {
            "none": 1.0 - eps,
            "std": statistics.stdev(members),
            "population_std": statistics.pstdev(members),
            "mean": statistics.fmean(members),
        }[scale]
        result.append((reward - base) / (divisor + eps))
    return result


@pytest.mark.filterwarnings("ignore:a group holds a single episode")
@pytest.mark.parametrize(("baseline", "scale"), CHOICES)
@settings(max_examples=15, deadline=None)
@given(drawn=episodes, data=st.data())
def test_groups_of_any_size_in_any_order(baseline: Any, scale: Any, drawn: list[tuple[float, int]], data: Any) -> None:
    rewards, groups = torch.tensor([r for r, _ in drawn]), torch.tensor([g * 1000 - 7 for _, g in drawn])
    got = group_relative(rewards, groups, baseline=baseline, scale=scale, eps=1e-4)
    # The same float32 rewards in exact-as-possible arithmetic.
    expected = plain_group_relative([float(r) for r in rewards], groups.tolist(), baseline, scale, 1e-4)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert got.dtype == torch.float32
    order = torch.tensor(data.draw(st.permutations(range(len(drawn)))))
    shuffled = group_relative(rewards[order], groups[order], baseline=baseline, scale=scale, eps=1e-4)
    torch.testing.assert_close(shuffled, got[order], atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:a group holds a single episode")
@settings(max_examples=30, deadline=None)
@given(value=st.floats(-10, 10, width=32), count=st.integers(1, 40))
def test_a_group_without_spread_is_exactly_zero(value: float, count: int) -> None:
    rewards, groups = torch.full((count,), value), torch.full((count,), 3)
    assert bool(no_spread(rewards, groups).all())
    for baseline, scale in CHOICES:
        if (baseline, scale) == ("none", "none"):
            assert torch.equal(group_relative(rewards, groups, baseline="none", scale="none"), rewards)
        elif scale != "mean" or value >= 0:
            assert bool((group_relative(rewards, groups, baseline=baseline, scale=scale) == 0).all())


@pytest.mark.parametrize(("baseline", "scale"), CHOICES)
def test_a_lone_success_has_the_largest_advantage(baseline: Any, scale: Any) -> None:
    got = group_relative(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4).long(), baseline=baseline, scale=scale)
    assert got[3] > 0
    assert bool((got[3] > got[:3]).all())
    assert not bool(no_spread(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4).long()).any())


def test_a_single_episode_warns() -> None:
    with pytest.warns(UserWarning, match="single episode"):
        got = group_relative(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), scale="std")
    assert got[2] == 0


def test_scale_mean_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        group_relative(torch.tensor([-1.0, 1.0]), torch.tensor([0, 0]), scale="mean")


# Trajectories.


def plain_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lams: list[float], observations: str
) -> list[float]:
    """One sequence, straight from the definition."""
    trained = [t for t, m in enumerate(mask) if m]
    result = [0.0] * len(mask)
    if not trained:
        return result
    steps = trained if observations == "skip" else list(range(trained[0], trained[-1] + 1))
    following, advantage = 0.0, 0.0
    for t in reversed(steps):
        drop = not mask[t] and observations in ("zero", "state_drop_rewards")
        reward = 0.0 if drop else rewards[t]
        value = 0.0 if not mask[t] and observations == "zero" else values[t]
        advantage = reward + gamma * following - value + gamma * lams[t] * advantage
        following = value
        if mask[t]:
            result[t] = advantage
    return result


def trajectories(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return {
        "rewards": torch.randn(total, generator=draw),
        "values": torch.randn(total, generator=draw),
        "mask": torch.rand(total, generator=draw) < 0.6,
        "lam": torch.rand(total, generator=draw),
        "ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    }


@pytest.mark.parametrize("observations", ["skip", "state", "state_drop_rewards", "zero"])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 99), lam=st.booleans())
def test_gae_equals_its_definition(observations: Any, gamma: float, lengths: list[int], seed: int, lam: bool) -> None:
    made = trajectories(lengths, seed)
    lams = made["lam"] if lam else torch.full_like(made["lam"], 0.95)
    got, returns = gae(
        made["rewards"],
        made["values"],
        made["mask"],
        gamma=gamma,
        lam=lams if lam else 0.95,
        observations=observations,
        seq_ids=made["ids"],
    )
    rows = [[x.tolist() for x in made[key].split(lengths)] for key in ("rewards", "values", "mask")]
    expected = []
    for rewards, values, mask, row_lams in zip(*rows, [x.tolist() for x in lams.split(lengths)], strict=True):
        expected += plain_gae(rewards, values, mask, gamma, row_lams, observations)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, torch.where(made["mask"], got + made["values"], 0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decay", [1.0, 0.999, 0.0])
def test_long_recurrences(decay: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for length in (1, 63, 64, 65, 4096, 4097, 9001):
        inputs = torch.randn(length, generator=draw, dtype=torch.float64)
        decays = torch.full((length,), decay, dtype=torch.float64)
        decays[length // 3] = 0.0
        expected, following = [0.0] * length, 0.0
        for t in reversed(range(length)):
            following = float(inputs[t]) + float(decays[t]) * following
            expected[t] = following
        before = inputs.clone()
        got = reverse_recurrence(inputs, decays)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=1e-10)
        assert torch.equal(inputs, before)


@pytest.mark.parametrize("observations", ["skip", "zero"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 999.0])
def test_values_at_observations_never_reach_advantages(observations: Any, fill: float) -> None:
    made = trajectories([30, 1, 17], 0)
    settings = {"gamma": 0.99, "lam": 0.9, "observations": observations, "seq_ids": made["ids"]}
    before = gae(made["rewards"], made["values"], made["mask"], **settings)
    masked = torch.where(made["mask"], made["values"], fill)
    rewards = torch.where(made["mask"], made["rewards"], fill)
    after = gae(rewards, masked, made["mask"], **settings)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("observations", ["state", "state_drop_rewards"])
def test_padding_is_not_an_observation(observations: Any) -> None:
    rewards, values = torch.randn(2, 12), torch.randn(2, 12)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, [3, 4, 7]] = True
    outside = torch.ones(2, 12, dtype=torch.bool)
    outside[:, 3:8] = False
    settings = {"gamma": 0.99, "lam": 0.9, "observations": observations}
    before = gae(rewards, values, mask, **settings)
    after = gae(rewards.masked_fill(outside, torch.nan), values.masked_fill(outside, torch.nan), mask, **settings)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 5)])
def test_nothing_to_train_gives_zeros(shape: tuple[int, ...]) -> None:
    nothing, mask = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.bool)
    for result in (*gae(nothing, nothing, mask, gamma=1, lam=1), discounted_returns(nothing, mask, gamma=1)):
        assert torch.equal(result, torch.zeros(shape))
    assert torch.equal(whiten(nothing, mask), torch.zeros(shape))


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_discounted_returns_skip_observations(lengths: list[int], seed: int) -> None:
    made = trajectories(lengths, seed)
    rewards = torch.where(made["mask"], made["rewards"], torch.nan)
    got = discounted_returns(rewards, made["mask"], gamma=0.9, seq_ids=made["ids"])
    zeros = [0.0] * len(rewards)
    expected = []
    split = [x.split(lengths) for x in (made["rewards"], made["mask"])]
    for row, mask in zip(*split, strict=True):
        # With V = 0 and lambda = 1, GAE is the discounted return.
        expected += plain_gae(row.tolist(), zeros, mask.tolist(), 0.9, [1.0] * len(row), "skip")
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)


# Whitening.


def over_ranks(parts: list[tuple[torch.Tensor, torch.Tensor]], **settings: Any) -> list[torch.Tensor]:
    """Run `whiten` once for each part, in threads that really wait for each other at every reduction."""
    barrier, slots = threading.Barrier(len(parts)), [torch.zeros(0)] * len(parts)
    results: list[torch.Tensor] = [torch.zeros(0)] * len(parts)

    def rank(index: int) -> None:
        def reduce(tensor: torch.Tensor, operation: str) -> torch.Tensor:
            slots[index] = tensor
            barrier.wait(10)
            stacked = torch.stack(slots)
            barrier.wait(10)
            return stacked.sum(0) if operation == "sum" else stacked.amax(0)

        results[index] = whiten(*parts[index], reduce=reduce, **settings)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize("cuts", [[], [30], [10, 10, 37]])
@pytest.mark.parametrize("choices", [{}, {"shift_mean": False}, {"unbiased": False}])
def test_whitening_does_not_depend_on_ranks(cuts: list[int], choices: dict[str, bool]) -> None:
    draw = torch.Generator().manual_seed(0)
    values, mask = torch.randn(60, generator=draw) * 3 + 1, torch.rand(60, generator=draw) < 0.7
    values = values.masked_fill(~mask, torch.nan)
    whole = whiten(values, mask, **choices)
    parts = list(zip(values.tensor_split(cuts), mask.tensor_split(cuts), strict=True))
    torch.testing.assert_close(torch.cat(over_ranks(parts, **choices)), whole, atol=1e-6, rtol=1e-6)
    kept = values[mask].double()
    centre = kept.mean() if choices.get("shift_mean", True) else 0.0
    expected = (kept - centre) / kept.std(correction=int(choices.get("unbiased", True)))
    torch.testing.assert_close(whole[mask].double(), expected, atol=1e-5, rtol=1e-5)
    assert bool((whole[~mask] == 0).all())


def test_whitening_without_spread() -> None:
    mask = torch.ones(16, dtype=torch.bool)
    constant = torch.full((16,), 0.7)
    assert torch.equal(whiten(constant, mask), torch.zeros(16))
    assert torch.equal(whiten(constant, mask, shift_mean=False), constant)
    parts = [(constant[:5], mask[:5]), (constant[:0], mask[:0]), (constant[5:], mask[5:])]
    assert torch.equal(torch.cat(over_ranks(parts)), torch.zeros(16))
    # Equal on each rank, but not over all of them.
    two = over_ranks([(torch.zeros(3), mask[:3]), (torch.ones(3), mask[:3])])
    assert math.isclose(float(two[1][0]), -float(two[0][0]), rel_tol=1e-6)
    assert float(two[1][0]) > 0.5
