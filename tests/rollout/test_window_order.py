"""The invariants of the window, for any readiness and any choice; what the bias is; what functions may not return."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import RunFailure, UserError
from strop.rollout.admission import Admission
from strop.rollout.episode import Episode, Group, Status
from strop.rollout.window_order import LengthBias, Readiness, make_order
from strop.rollout.windows import Windows


def group_of(number: int, *lengths: int) -> Group:
    episodes = []
    for sample, length in enumerate(lengths):
        episode = Episode(number, sample)
        turn = episode.append_prompt([1])
        episode.append_sampled([2] * length, [-1.0] * length, [0] * length, parent=turn, finish="stop")
        episode.status = Status.STOP
        episodes.append(episode)
    return Group(number, f"row-{number}", episodes)


class Paced(Windows[int]):
    """Groups that are complete after as many turns of the event loop as their place in `pace` says."""

    def __init__(self, pace: list[int], admission: Admission, order: Any, first: int = 0) -> None:
        self.pace, self.begun = pace, dict[int, int]()
        numbers = itertools.count(first)
        drawn = lambda count: list(itertools.islice(numbers, count))  # noqa: E731
        super().__init__(drawn, per_group=1, admission=admission, order=order)

    async def make_group(self, number: int, prompt: int, attempt: int = 0) -> Group:
        assert number == prompt
        assert number not in self.begun
        self.begun[number] = self.under_way[number].version
        turns = self.pace[number % len(self.pace)]
        for _ in range(turns):
            await asyncio.sleep(0)
        self._completed(number)
        return group_of(number, 1 + turns)


class Drawn:
    """A choice that data makes, in the place of a function of the user's."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self, known: list[int], count: int, groups: Any, again: int) -> list[int]:
        assert [one.number for one in groups] == known
        assert count == again
        assert all(one.spare >= 0 for one in groups)
        return self.data.draw(st.permutations(known))[:count]


class Rounds:
    """A run: its windows, and what each step trained."""

    def __init__(self, windows: Paced, bound: int) -> None:
        self.windows, self.bound = windows, bound
        self.trained: list[int] = []

    async def steps(self, first: int, last: int, *, every: int) -> None:
        for step in range(first, last):
            if step % every == 0 or step == first:
                self.windows.serve(step)
            groups = await self.windows.next_window(step)
            numbers = [group.number for group in groups]
            assert numbers == sorted(numbers)
            assert len(numbers) == self.windows.admission.groups_per_step
            for number in numbers:
                assert 0 <= step - self.windows.begun[number] <= self.bound
            self.trained += numbers


PACES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(PACES, st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.booleans(), st.data())
def test_the_bound_holds_and_nothing_is_dropped_for_any_readiness_and_any_choice(
    pace: list[int], size: int, ahead: int, slack: int, later: int, own: bool, data: st.DataObject
) -> None:
    steps, every, bound = 9, 1 + min(later, ahead), ahead + slack
    stop = data.draw(st.integers(0, steps))

    async def run() -> list[int]:
        choice: Any = Drawn(data) if own else None
        windows = Paced(pace, Admission(size, ahead, last=size * steps), Readiness(size, bound, choice))
        rounds = Rounds(windows, bound)
        await rounds.steps(0, stop, every=every)
        # The run is killed, and goes on from its checkpoint.
        under_way, started, trained = windows.under_way, windows.admission.started, rounds.trained
        await windows.close()
        admission = Admission(size, ahead, started=started, last=size * steps)
        windows = Paced(pace, admission, Readiness(size, bound, choice), first=started)
        windows.take_back(under_way)
        rounds = Rounds(windows, bound)
        await rounds.steps(stop, steps, every=every)
        assert not windows.under_way
        return [*trained, *rounds.trained]

    assert sorted(asyncio.run(run())) == list(range(size * steps))


async def windows_at(pace: list[int], order: Any, *, size: int = 2, ahead: int = 2) -> Paced:
    windows = Paced(pace, Admission(size, ahead), order)
    windows.serve(0)
    return windows


async def test_what_is_complete_goes_first_until_a_group_cannot_wait_any_more() -> None:
    windows = await windows_at([500, 9, 9, 0, 9, 0], Readiness(2, 4))
    trained = []
    for step in range(5):
        windows.serve(step)
        trained.append([g.number for g in await windows.next_window(step)])
        if step == 0:
            assert windows.window_metrics == {"window/passed_over": 4, "window/forced": 0}
    # 6 and 12 are as slow as 0; that one may be passed over up to step 4.
    assert trained[0] == [3, 5]
    assert [step for step, numbers in enumerate(trained) if 0 in numbers] == [4]
    assert 6 not in trained[4]
    await windows.close()


async def test_the_first_admitted_of_what_is_complete_go_first() -> None:
    windows = await windows_at([0], Readiness(2, 4))
    for step in range(6):
        windows.serve(step)
        await asyncio.sleep(0.01)
        assert [g.number for g in await windows.next_window(step)] == [2 * step, 2 * step + 1]
    await windows.close()


async def test_a_choice_that_would_break_the_bound_later_is_changed_as_little_as_needed() -> None:
    windows = await windows_at([0], Readiness(2, 3, Latest()))
    found = []
    for step in range(5):
        windows.serve(step)
        await asyncio.sleep(0.01)
        numbers = [g.number for g in await windows.next_window(step)]
        found.append((numbers, windows.window_metrics["window/forced"]))
    # Under version 0 six groups began, for the steps 0 to 3, and later two under each version.
    assert found[:2] == [([4, 5], 0), ([6, 7], 0)]
    # From step 2 on four of the first six are left for two steps.
    assert found[2:] == [([0, 1], 2), ([2, 3], 2), ([12, 13], 0)]
    await windows.close()


async def test_in_order_of_admission_the_slow_one_is_waited_for() -> None:
    windows = await windows_at([500, 9, 9, 0, 9, 0], None)
    assert [g.number for g in await windows.next_window(0)] == [0, 1]
    assert windows.window_metrics == {}
    await windows.close()


async def test_a_failure_of_a_group_that_is_not_chosen_is_told() -> None:
    class Failing(Paced):
        async def make_group(self, number: int, prompt: int, attempt: int = 0) -> Group:
            if number == 5:
                raise RuntimeError("the engine broke")
            return await super().make_group(number, prompt, attempt)

    windows = Failing([3], Admission(2, 2), Readiness(2, 3))
    windows.serve(0)
    with pytest.raises(RuntimeError, match="the engine broke"):
        await windows.next_window(0)


async def test_the_display_counts_completions_of_whatever_may_be_chosen() -> None:
    seen = []
    windows = await windows_at([5, 4, 3, 2, 1, 0], Readiness(2, 3))
    windows._progress = lambda done, of: seen.append((done, of))
    await windows.next_window(0)
    assert seen[-1] == (2, 2)
    assert all(done <= of for done, of in seen)
    await windows.close()


# --- the measure of the bias ---------------------------------------------------------------------------------------


def test_the_bias_is_known_when_all_that_could_be_chosen_is_trained() -> None:
    bias = LengthBias()
    assert bias.of([1], {1: group_of(1, 2, 4)}, {0, 1}) == {}
    # Step 0 chose a mean of 3 of a mean of (2 + 4 + 9) / 3 = 5; the choice of step 1 was no choice.
    assert bias.of([0], {0: group_of(0, 9)}, {0}) == {"window/length_bias": pytest.approx((3 / 5 + 1) / 2)}
    assert bias._lengths == {}
    assert bias._open == []


async def test_an_order_that_prefers_short_groups_is_measured_as_biased() -> None:
    async def bias(pace: list[int]) -> float:
        windows = await windows_at(pace, Readiness(2, 6), ahead=3)
        seen = []
        for step in range(40):
            windows.serve(step)
            await windows.next_window(step)
            seen.append(windows.window_metrics.get("window/length_bias", 1.0))
        await windows.close()
        return sum(seen) / len(seen)

    assert await bias([0, 40, 0, 40, 3, 60, 2, 50, 1]) < 0.8
    assert await bias([7]) == 1


class Latest:
    def __call__(self, known: list[int], count: int, groups: Any, again: int) -> list[int]:
        return known[-count:]


# --- functions of one's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_few", "returned 1 groups, and 2 were asked for"),
        ("twice", "has a group twice"),
        ("unknown", "not everything is the number of a group"),
        ("objects", "not everything is the number of a group"),
        ("true", "not everything is the number of a group"),
        ("nothing", r"returned None \(NoneType\)"),
        ("breaks", r"failed: ValueError: no such luck \(.*tiny_choices.py:\d+\)"),
    ],
)
async def test_what_a_function_must_not_return_is_refused(name: str, says: str) -> None:
    order = make_order(f"tiny_choices:{name}", groups_per_step=2, max_staleness=3)
    windows = await windows_at([1], order)
    with pytest.raises(RunFailure, match=says) as found:
        await windows.next_window(0)
    assert found.value.where == "rollout.window.order"
    assert found.value.mend
    assert not windows._tasks


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("tiny_choices:missing", "has no function 'missing'"),
        ("tiny_choices:alone", r"cannot be called as alone\(groups, count\)"),
        ("tiny_choices:later", "is an async function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_runs(path: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as found:
        make_order(path, groups_per_step=2, max_staleness=3)
    assert found.value.where == "rollout.window.order"


async def test_a_function_is_told_what_it_needs() -> None:
    import tiny_choices

    tiny_choices.ASKED.clear()
    windows = await windows_at([1], make_order("tiny_choices:latest", groups_per_step=2, max_staleness=3))
    assert [g.number for g in await windows.next_window(0)] == [4, 5]
    [(groups, count)] = tiny_choices.ASKED
    assert count == 2
    assert [(one.number, one.version, one.spare) for one in groups] == [(n, 0, 3) for n in range(6)]
    assert all(one.group.episodes[0].sampled_tokens() == 2 for one in groups)
    await windows.close()
