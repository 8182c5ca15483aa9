"""The invariants of past groups, what each way of selecting selects, and that a checkpoint brings all of them back."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from strop.config.window import PastSettings
from strop.errors import RunFailure, UserError
from strop.rollout.episode import Episode, Group, Status
from strop.rollout.kept_groups import as_arrays, from_arrays
from strop.rollout.past_groups import PastGroup, PastGroups, oldest_version


def episode_of(number: int, sample: int, version: int, reward: float = 0.0, **more: Any) -> Episode:
    episode = Episode(number, sample, {"prompt": "1+1="}, f"row-{number}", reward=reward, **more)
    turn = episode.append_prompt([1, 2])
    episode.append_sampled([3, 4], [-0.5, -0.25], [version, version + 1], parent=turn, finish="stop")
    episode.status = Status.STOP
    return episode


def past(
    number: int, version: int = 0, *, advantage: float = 1.0, rate: float = 0.5, rewards: Any = (0, 1)
) -> PastGroup:
    episodes = [episode_of(number, sample, version, float(reward)) for sample, reward in enumerate(rewards)]
    return PastGroup(Group(number, f"row-{number}", episodes), None, version, advantage, rate)


def groups_of(seed: int = 0, **options: Any) -> PastGroups:
    return PastGroups(PastSettings(**{"groups": 2, "max_age": 100, **options}), seed=seed)


SELECTS = st.sampled_from(["uniform", "priority", "stratified", "tiny_choices:any_past"])


@settings(max_examples=150, deadline=None)
@given(
    SELECTS,
    st.integers(1, 5),
    st.integers(0, 8),
    st.integers(1, 6),
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3), st.floats(0, 1)), max_size=4), max_size=10),
    st.integers(0, 9),
)
def test_no_group_is_too_old_or_too_many_and_a_run_that_goes_on_draws_the_same(
    select: str, count: int, more: int, max_age: int, steps: list[list[tuple[int, float, float]]], stop: int
) -> None:
    options = {"groups": count, "keep": count + more, "max_age": max_age, "select": select}
    whole = groups_of(7, **options)
    again = groups_of(7, **options)
    number, expected = 0, list[tuple[int, int]]()
    for step, made in enumerate(steps):
        if step == stop:
            again = groups_of(7, **options)
            again.take_back(from_arrays(load(save(as_arrays(whole.kept)))))
        drawn = whole.draw(step)
        expected = [(n, version) for n, version in expected if step - version <= max_age]
        assert [one.number for one in drawn] == [one.number for one in again.draw(step)]
        assert [one.number for one in drawn] == sorted({one.number for one in drawn})
        assert len(drawn) == min(count, len(whole.kept))
        for one in drawn:
            for episode in one.group.episodes:
                assert step - oldest_version(one.group) <= max_age
                assert (episode.streams()[0].versions[-2:] >= step - max_age).all()
        new = []
        for age, advantage, rate in made:
            new.append(past(number, max(0, step - age), advantage=advantage, rate=rate))
            expected.append((number, max(0, step - age)))
            number += 1
        for groups in (whole, again):
            groups.trained_again({one.number: 0.5 for one in drawn})
            groups.add(new)
        kept = [one.number for one in whole.kept]
        assert kept == [one.number for one in again.kept]
        assert kept == [n for n, _ in expected[-(count + more) :]]
        expected = expected[-(count + more) :]


def test_a_draw_is_that_of_the_seed_and_the_step() -> None:
    def drawn(seed: int, step: int) -> list[int]:
        groups = groups_of(seed)
        groups.add([past(n) for n in range(20)])
        return [one.number for one in groups.draw(step)]

    assert drawn(0, 3) == drawn(0, 3)
    assert len({tuple(drawn(0, step)) for step in range(20)}) > 10
    assert len({tuple(drawn(seed, 3)) for seed in range(20)}) > 10


def counted(groups: PastGroups, draws: int) -> Counter[int]:
    return Counter(one.number for step in range(draws) for one in groups.draw(step))


def test_uniform_draws_all_alike() -> None:
    groups = groups_of(groups=1, max_age=10**6)
    groups.add([past(n) for n in range(5)])
    found = counted(groups, 2000)
    # Five standard deviations of a binomial count.
    assert all(abs(found[n] - 400) < 5 * math.sqrt(2000 * 0.2 * 0.8) for n in range(5))


@pytest.mark.parametrize("priority", ["advantage", "spread"])
@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_priority_draws_in_proportion_to_a_power(priority: str, exponent: float) -> None:
    groups = groups_of(groups=1, max_age=10**6, select="priority", priority=priority, exponent=exponent)
    sizes = [1.0, 2.0, 3.0]
    made = [past(n, advantage=size, rewards=(0, 1)) for n, size in enumerate(sizes)]
    if priority == "spread":
        # Rewards of 0 and x have a standard deviation of x / 2; the advantages are all alike.
        made = [past(n, advantage=1.0, rewards=(0, size)) for n, size in enumerate(sizes)]
        assert [one.spread for one in made] == [0.5, 1.0, 1.5]
    groups.add([*made, past(3, advantage=0.0, rewards=(1, 1))])
    found, total = counted(groups, 3000), sum(size**exponent for size in sizes)
    for n, size in enumerate(sizes):
        share = size**exponent / total
        assert abs(found[n] - 3000 * share) < 5 * math.sqrt(3000 * share * (1 - share))
    assert found[3] == 0


def test_what_has_no_priority_comes_when_nothing_else_is_left() -> None:
    groups = groups_of(groups=2, select="priority", priority="advantage")
    groups.add([past(0, advantage=0.0), past(1, advantage=0.0), past(2, advantage=1.0)])
    assert all(2 in {one.number for one in groups.draw(step)} for step in range(20))
    assert {one.number for step in range(20) for one in groups.draw(step)} == {0, 1, 2}


def test_a_priority_is_that_of_the_last_time() -> None:
    groups = groups_of(groups=1, select="priority", priority="advantage")
    groups.add([past(0, advantage=0.0), past(1, advantage=1.0)])
    assert [one.number for one in groups.draw(0)] == [1]
    groups.trained_again({0: 1.0, 1: 0.0, 99: 5.0})
    assert [one.number for one in groups.draw(0)] == [0]
    assert [one.number for one in groups.kept] == [0, 1]


def test_roles_are_spread_by_themselves() -> None:
    episodes = [episode_of(0, n, 0, float(n // 2), role="ab"[n // 2]) for n in range(4)]
    assert PastGroup(Group(0, "row-0", episodes), None, 0, 0.0, 0.0).spread == 0


def test_strata_give_alike_whatever_their_size() -> None:
    groups = groups_of(groups=4, select="stratified", strata=4, max_age=10**6)
    rates = [0.0] * 10 + [0.3] + [0.6] * 3 + [1.0] * 2
    groups.add([past(n, rate=rate) for n, rate in enumerate(rates)])
    for step in range(20):
        assert sorted(one.pass_rate for one in groups.draw(step)) == [0.0, 0.3, 0.6, 1.0]
    assert len(counted(groups, 200)) == len(rates)
    one = groups_of(groups=1, select="stratified", strata=4, max_age=10**6)
    one.add(groups.kept)
    found = Counter(rates[number] for number in counted(one, 1200).elements())
    assert all(abs(found[rate] - 300) < 5 * math.sqrt(1200 * 0.25 * 0.75) for rate in set(rates))


def test_an_empty_stratum_leaves_its_places_to_others() -> None:
    groups = groups_of(groups=3, select="stratified")
    groups.add([past(0, rate=0.0), past(1, rate=1.0), past(2, rate=1.0), past(3, rate=1.0)])
    for step in range(10):
        numbers = {one.number for one in groups.draw(step)}
        assert 0 in numbers
        assert len(numbers) == 3


def test_a_function_of_ones_own_is_refused_what_is_wrong() -> None:
    groups = groups_of(select="tiny_choices:bad_past")
    groups.add([past(0), past(1), past(2)])
    with pytest.raises(RunFailure, match="not everything is the number of a group") as found:
        groups.draw(0)
    assert found.value.where == "rollout.window.past.select"
    with pytest.raises(UserError, match=r"cannot be called as latest\(groups, count, rng\)"):
        groups_of(select="tiny_choices:latest")


# --- in a checkpoint -----------------------------------------------------------------------------------------------


def test_all_of_an_episode_comes_back() -> None:
    plain = episode_of(
        4,
        0,
        3,
        math.nan,
        components={"exact": math.nan, "length": 0.1 + 0.2},
        correct=True,
        detail="“fine”",
        completion="4\ud800",
        messages=[{"role": "user", "content": "1+1="}],
        turn_rewards={1: 0.1},
        role="first",
    )
    trunk = episode_of(4, 1, 2, 0.1)
    trunk.status = None
    left, right = trunk.fork(1), trunk.fork(2)
    for episode, branch in ((left, (1, 0)), (right, (1, 1))):
        seen = episode.append_observation([5], parent=1)
        episode.append_sampled([6 + branch[1]], [-1.5], [4], parent=seen, finish="length")
        episode.branch, episode.branched, episode.status = branch, (2,), Status.LENGTH
    baseline = episode_of(4, -1, 3, 0.7)
    given = [
        PastGroup(Group(4, "row-4", [plain, left, right]), baseline, 2, 0.1 + 0.2, 1 / 3),
        PastGroup(Group(9, "row-9", [episode_of(9, 0, 5)]), None, 5, 0.0, 0.0),
    ]
    found = from_arrays(load(save(as_arrays(given))))
    assert [one.number for one in found] == [4, 9]
    assert [(f.version, f.advantage, f.pass_rate) for f in found] == [(2, 0.1 + 0.2, 1 / 3), (5, 0.0, 0.0)]
    assert found[1].baseline is None
    pairs = [
        (a, b)
        for x, y in zip(given, found, strict=True)
        for a, b in zip(x.group.episodes, y.group.episodes, strict=True)
    ]
    pairs.append((baseline, found[0].baseline))
    for before, after in pairs:
        assert repr({**vars(before), "turns": 0}) == repr({**vars(after), "turns": 0})
        for a, b in zip(before.turns, after.turns, strict=True):
            assert (a.role, a.parent, a.finish) == (b.role, b.parent, b.finish)
            for name in ("tokens", "logprobs", "versions"):
                one, other = getattr(a, name), getattr(b, name)
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
                assert not other.flags.writeable
    # What was shared is shared: a token of the trunk is trained once.
    taken: set[int] = set()
    _, one, other = found[0].group.episodes
    assert [int(s.loss_mask.sum()) for e in (one, other) for s in e.streams(taken)] == [3, 1]


def test_nothing_kept_comes_back_as_nothing() -> None:
    assert from_arrays(load(save(as_arrays([])))) == []
