"""From verdicts to a reward: gates, requirements, clips, and verifiers for some rows only."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from strop.config.rewards import RewardSettings
from strop.rewards.combination import combine, combine_all
from strop.rewards.composition import CompositeScorer
from strop.rewards.protocol import Completed, Reward, Verdict

ERROR = Verdict(None, "verifier_error", "broken")


def settings(*verifiers: dict[str, Any], **others: Any) -> RewardSettings:
    """Entries are named a, b, c, unless they have a name."""
    entries = [{"kind": "exact", "name": name, **entry} for name, entry in zip("abcdef", verifiers, strict=False)]
    return RewardSettings.model_validate({"verifiers": entries, "retries": 0, **others})


def reward(of: RewardSettings, *scores: float | Verdict | None, row: dict[str, Any] | None = None) -> Reward:
    names = [verifier.name or "" for verifier in of.verifiers]
    verdicts = [score if isinstance(score, Verdict) else Verdict(score) for score in scores]
    return combine(dict(zip(names, verdicts, strict=True)), of, row)


def test_components_of_a_verifier_are_reported_and_not_added() -> None:
    of = settings({}, {})
    found = reward(of, Verdict(1.0, components={"answers": 3.0}), 0.5)
    assert found.total == 1.5
    assert found.components == {"a": 1.0, "a/answers": 3.0, "b": 0.5}


def test_scores_and_the_total_are_clipped() -> None:
    of = settings({"clip": [-1, 2], "weight": 3}, {"clip": [None, 0.5]}, {"clip": [0, None]}, clip=[-2, 6])
    assert reward(of, 1.5, 0.2, 0.3).total == pytest.approx(5.0)
    assert reward(of, 9.0, 9.0, -9.0).total == 6.0
    assert reward(of, -9.0, -0.5, 0.0).total == -2.0
    found = reward(of, 9.0, 0.0, 0.0)
    # What is reported, and what decides whether it is correct, is what the verifier said.
    assert found.components["a"] == 9.0
    assert reward(settings({"clip": [0, 0.5]}), 1.0) == Reward(0.5, {"a": 1.0}, True)


@given(
    score=st.one_of(st.none(), st.floats(allow_nan=False, min_value=-1e15, max_value=1e15)),
    weight=st.sampled_from([0.5, -1.0, 1e300]),
    clip=st.sampled_from([None, [0, None], [-1, 1]]),
    detail=st.sampled_from(["", "seen"]),
    topic=st.sampled_from(["sums", "words"]),
)
def test_one_verifier_alone_is_worth_what_it_is_beside_one_that_does_not_apply(
    score: float | None, weight: float, clip: list[float | None] | None, detail: str, topic: str
) -> None:
    first = {"weight": weight, "clip": clip, "when": {"topic": "sums"}}
    others = {"clip": [None, 1e9]}
    verdict, row = Verdict(score, detail=detail), {"topic": topic}
    alone = reward(settings(first, **others), verdict, row=row)
    beside = reward(settings(first, {"when": {"topic": "none"}}, **others), verdict, None, row=row)
    assert (repr(alone.total), alone.components, alone.correct) == (
        repr(beside.total),
        beside.components,
        beside.correct,
    )
    assert (alone.status, alone.failed) == (beside.status, beside.failed)
    assert alone.detail == beside.detail.replace("a, b:", "a:")


def test_a_gate_shuts_the_others_out() -> None:
    of = settings({}, {"gate": True, "weight": 0.1}, {})
    assert reward(of, 1.0, 1.0, 1.0).total == 2.1
    found = reward(of, 1.0, 0.5, 1.0)
    assert (found.total, found.components, found.correct, found.status) == (0.05, {"b": 0.5}, False, "ok")
    # One that does not apply stands open.
    assert reward(of, 1.0, None, 1.0).total == 2.0
    lower = settings({}, {"gate": True, "passes_at": 0.5}, {})
    assert reward(lower, 1.0, 0.5, 1.0).total == 2.5
    assert reward(lower, 1.0, 0.49, 1.0).total == 0.49


def test_what_one_requires_shuts_it_out_alone() -> None:
    of = settings({}, {"requires": "a"}, {}, {"requires": "b"})
    assert reward(of, 1.0, 1.0, 1.0, 1.0).total == 4.0
    assert reward(of, 0.0, 1.0, 1.0, 1.0).components == {"a": 0.0, "c": 1.0}
    assert reward(of, 1.0, 0.0, 1.0, 1.0).components == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_a_failure_behind_a_shut_gate_does_not_count() -> None:
    of = settings({"gate": True}, {})
    assert reward(of, 0.0, ERROR).status == "ok"
    assert reward(of, 1.0, ERROR).status == "verifier_error"
    failed = reward(of, ERROR, 1.0)
    assert (failed.status, failed.failed, math.isnan(failed.total)) == ("verifier_error", "a", True)


def test_verifiers_for_some_rows() -> None:
    of = settings({"when": {"source": "maths"}}, {"when": {"source": ["law", "art"], "hard": True}}, {"weight": 0.5})
    assert reward(of, 1.0, None, 1.0, row={"source": "maths"}).components == {"a": 1.0, "c": 1.0}
    assert reward(of, None, 1.0, 1.0, row={"source": "art", "hard": True}).components == {"b": 1.0, "c": 1.0}
    assert reward(of, None, 1.0, 1.0, row={"source": "art"}).components == {"c": 1.0}
    # The first verifier that a row is for says what is correct.
    assert reward(of, None, 1.0, 0.0, row={"source": "law", "hard": True}).correct is True
    assert reward(of, None, 0.0, 1.0, row={"source": "law", "hard": True}).correct is False
    assert reward(of, 1.0, 1.0, None, row={"source": "maths"}).correct is True
    only = settings({"when": {"source": "maths"}})
    assert reward(only, None, row={"source": "art"}).status == "verifier_error"


def test_a_gate_for_other_rows_stands_open() -> None:
    of = settings({"gate": True, "when": {"source": "maths"}}, {})
    assert reward(of, None, 1.0, row={"source": "art"}).total == 1.0
    assert reward(of, 0.0, 1.0, row={"source": "maths"}).total == 0.0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"requires": "c"}, {}], "'a' requires 'c'; the verifiers are a, b"),
        ([{"requires": "a"}, {}], "waits for itself"),
        ([{"requires": "b"}, {"requires": "a"}], "waits for itself"),
        ([{"gate": True, "requires": "b"}, {}], "waits for itself"),
        ([{"clip": [1, 1]}], "below the second"),
        ([{"clip": [2, 1]}], "below the second"),
        ([{"clip": [None, None]}], "bounds nothing"),
        ([{"clip": [1]}], "at least 2 items"),
    ],
)
def test_what_cannot_be_is_refused(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(*entries)


def test_two_gates_may_wait_for_each_other_in_one_direction() -> None:
    of = settings({}, {"gate": True}, {"gate": True, "requires": "b"})
    assert reward(of, 1.0, 1.0, 1.0).total == 3.0
    assert reward(of, 1.0, 0.0, 1.0).components == {"b": 0.0}
    assert reward(of, 1.0, 1.0, 0.0).components == {"b": 1.0, "c": 0.0}


class Recorder:
    """A verifier whose scores are columns of the row, and that remembers what it was asked about."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        self.asked += [one.completion for one in completed]
        found = [one.row[self.name] for one in completed]
        return [ERROR if score == "error" else Verdict(score) for score in found]


async def scored(of: RewardSettings, rows: Sequence[dict[str, Any]]) -> tuple[list[Reward], dict[str, list[str]]]:
    recorders = [Recorder(verifier.name or "") for verifier in of.verifiers]
    completed = [Completed("", str(index), row=row) for index, row in enumerate(rows)]
    rewards = await CompositeScorer(recorders, of).score(completed)
    return rewards, {recorder.name: recorder.asked for recorder in recorders}


async def test_only_what_passed_is_asked_about() -> None:
    of = settings({"requires": "c"}, {"gate": True}, {"when": {"kind": "x"}})
    rows = [
        {"a": 1.0, "b": 1.0, "c": 1.0, "kind": "x"},
        {"a": 1.0, "b": 0.0, "c": 1.0, "kind": "x"},
        {"a": 1.0, "b": 1.0, "c": 0.0, "kind": "x"},
        {"a": 1.0, "b": 1.0, "c": 0.0, "kind": "y"},
        {"a": 1.0, "b": "error", "c": 1.0, "kind": "x"},
    ]
    rewards, asked = await scored(of, rows)
    assert asked == {"a": ["0", "3"], "b": ["0", "1", "2", "3", "4"], "c": ["0", "2"]}
    assert [reward.components for reward in rewards] == [
        {"a": 1.0, "b": 1.0, "c": 1.0},
        {"b": 0.0},
        {"b": 1.0, "c": 0.0},
        {"a": 1.0, "b": 1.0},
        {},
    ]
    assert [reward.status for reward in rewards] == ["ok"] * 4 + ["verifier_error"]


SCORES = st.sampled_from([0.0, 0.5, 1.0, None, "error"])


@given(
    st.lists(st.tuples(SCORES, SCORES, SCORES, SCORES), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.lists(st.sampled_from(["", "gate", "when", "requires"]), min_size=4, max_size=4),
)
def test_asking_little_gives_what_asking_everything_gives(
    table: list[tuple[Any, ...]], order: list[int], kinds: list[str]
) -> None:
    """Which verifiers are asked is an economy, and nothing else: the reward is that of all verdicts."""
    entries: list[dict[str, Any]] = [{} for _ in order]
    for place, kind in zip(order, kinds, strict=True):
        if kind == "gate":
            entries[place] = {"gate": True}
        elif kind == "when":
            entries[place] = {"when": {"even": True}}
        elif kind == "requires" and place != order[0] and kinds[0] != "requires":
            entries[place] = {"requires": "abcd"[order[0]]}
    try:
        of = settings(*entries)
    except ValidationError:
        return
    rows = [dict(zip("abcd", row, strict=True), even=index % 2 == 0) for index, row in enumerate(table)]
    rewards, _ = asyncio.run(scored(of, rows))
    for row, found in zip(rows, rewards, strict=True):
        verdicts = {name: ERROR if row[name] == "error" else Verdict(row[name]) for name in "abcd"}
        whole = combine(verdicts, of, row)
        same = {"status", "correct", "components"} if whole.status == "ok" else {"status"}
        assert all(getattr(found, name) == getattr(whole, name) for name in same), (found, whole)
        assert found.total == whole.total or (math.isnan(found.total) and math.isnan(whole.total))


@given(
    st.lists(
        st.builds(
            Verdict,
            st.none() | st.floats(-1e16, 1e16) | st.just(math.inf),
            st.sampled_from(["ok", "ok", "verifier_error", "timeout"]),
            st.sampled_from(["", "", "what it said"]),
            st.sampled_from([{}, {}, {"part": 0.5}]),
        ),
        max_size=6,
    ),
    st.sampled_from([{}, {"weight": -2.5}, {"weight": 1e300}, {"clip": [None, 0.5]}, {"when": {"even": True}}]),
    st.sampled_from([{}, {"clip": [-0.25, 1.0]}, {"correct_at": 0.0}]),
)
def test_a_single_verifier_counts_as_among_others(
    verdicts: list[Verdict], entry: dict[str, Any], of_all: dict[str, Any]
) -> None:
    of = RewardSettings.model_validate({"verifiers": [{"kind": "exact", "name": "a", **entry}], **of_all})
    rows = [{"even": index % 2 == 0} for index in range(len(verdicts))]
    found = combine_all({"a": verdicts}, of, rows)
    for reward, verdict, row in zip(found, verdicts, rows, strict=True):
        expected = combine({"a": verdict}, of, row)
        assert reward._replace(total=0.0) == expected._replace(total=0.0)
        assert reward.total == expected.total or (math.isnan(reward.total) and math.isnan(expected.total))


def test_every_permutation_of_three_means_the_same() -> None:
    entries = {"a": {"requires": "b"}, "b": {"gate": True}, "c": {"weight": 2}}
    totals = set()
    for order in itertools.permutations("abc"):
        of = RewardSettings.model_validate({"verifiers": [{"kind": "exact", "name": n, **entries[n]} for n in order]})
        totals.add(combine({name: Verdict(1.0) for name in order}, of).total)
        totals.add(combine({name: Verdict(float(name == "b")) for name in order}, of).total + 3)
    assert totals == {4.0}
