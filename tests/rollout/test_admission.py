"""The invariants of admission, one test each, under any pace of training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strop.rollout.admission import Admission

# Trained steps at each moment admission is asked: any pace that never goes back.
PACES = st.lists(st.integers(0, 3), min_size=1, max_size=20)
ADMISSIONS = st.builds(Admission, st.integers(1, 7), st.integers(0, 4))


def admitted(admission: Admission, pace: list[int]) -> list[tuple[int, int]]:
    """(group, trained steps when it started) in order."""
    found, trained = [], 0
    for step in pace:
        trained += step
        found += [(group, trained) for group in admission.admit(trained)]
    return found


@given(ADMISSIONS, PACES)
def test_a_group_starts_only_within_the_limit(admission: Admission, pace: list[int]) -> None:
    for group, trained in admitted(admission, pace):
        assert group < (trained + 1 + admission.max_staleness) * admission.groups_per_step


@given(ADMISSIONS, PACES)
def test_groups_start_in_order_each_once_and_as_soon_as_they_may(admission: Admission, pace: list[int]) -> None:
    started = [group for group, _ in admitted(admission, pace)]
    assert started == list(range((sum(pace) + 1 + admission.max_staleness) * admission.groups_per_step))


@given(ADMISSIONS, PACES)
def test_no_token_is_staler_than_the_bound_when_it_is_trained(admission: Admission, pace: list[int]) -> None:
    # A token is sampled with the version of its start, or fresher.
    for group, version in admitted(admission, pace):
        assert admission.step_of(group) - version <= admission.max_staleness


def test_synchronous_admission_is_one_window_a_step() -> None:
    admission = Admission(4)
    assert [list(admission.admit(step)) for step in (0, 0, 1)] == [[0, 1, 2, 3], [], [4, 5, 6, 7]]


def test_a_resumed_run_goes_on_with_its_number() -> None:
    admission = Admission(4, started=12)
    assert list(admission.admit(3)) == [12, 13, 14, 15]
