from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data import Cursor, RowsSource
from strop.data.order import WINDOW_BLOCKS, permutation, shuffled, stream_key
from strop.errors import DataError


def rows(count: int, *, blocks: list[int] | None = None) -> Any:
    source = RowsSource([{"prompt": str(i)} for i in range(count)])
    source.blocks = None if blocks is None else np.array(blocks)  # type: ignore[assignment]
    return source


block_sizes = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(lambda sizes: sum(sizes) > 0)
sources = st.one_of(
    st.integers(1, 120).map(rows),
    block_sizes.map(lambda sizes: rows(sum(sizes), blocks=[0, *itertools.accumulate(sizes)])),
)


@settings(max_examples=100, deadline=None)
@given(source=sources, seed=st.integers(0, 2**70), shuffle=st.booleans(), epochs=st.integers(1, 3))
def test_every_epoch_is_an_exact_permutation(source: Any, seed: int, shuffle: bool, epochs: int) -> None:
    cursor = Cursor(source, seed=seed, shuffle=shuffle)
    for epoch in range(epochs):
        visited = [cursor.next() for _ in range(len(source))]
        assert {number for number, _ in visited} == {epoch}
        assert sorted(index for _, index in visited) == list(range(len(source)))
        if not shuffle:
            assert [index for _, index in visited] == list(range(len(source)))


@settings(max_examples=100, deadline=None)
@given(
    source=sources,
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    before=st.integers(0, 250),
    after=st.integers(1, 250),
)
def test_a_loaded_cursor_goes_on_exactly_there(source: Any, seed: int, shuffle: bool, before: int, after: int) -> None:
    cursor = Cursor(source, seed=seed, shuffle=shuffle)
    for _ in range(before):
        cursor.next()
    state = json.loads(json.dumps(cursor.state()))
    expected = [cursor.next() for _ in range(after)]
    again = Cursor(source, seed=seed, shuffle=shuffle)
    again.next()
    again.load(state)
    assert [again.next() for _ in range(after)] == expected


def test_a_batch_that_an_epoch_cannot_fill_runs_into_the_next() -> None:
    cursor = Cursor(rows(10), seed=0)
    batches = [list(itertools.islice(cursor, 4)) for _ in range(5)]
    visited = [index for batch in batches for _, index in batch]
    assert [epoch for epoch, _ in batches[2]] == [0, 0, 1, 1]
    assert sorted(visited) == sorted([*range(10), *range(10)])


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(shuffled(50, None, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert stream_key(1, 2) != stream_key(2, 1)


def test_the_order_is_written_down_for_ever() -> None:
    """Checkpoints hold a position in this order: if this test fails, old runs would resume elsewhere."""
    assert shuffled(12, None, seed=7, epoch=1).tolist() == GOLDEN
    assert shuffled(12, np.array([0, 2, 4, 6, 8, 10, 12]), seed=7, epoch=1).tolist() == GOLDEN_BLOCKS


def test_all_orders_of_few_rows_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        order = tuple(shuffled(3, None, seed=3, epoch=epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # Chi-square with 5 degrees of freedom; 20.5 is passed by chance once in a thousand.
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5


def test_neighbours_do_not_stay_neighbours() -> None:
    order = permutation(10_000, 1)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_blocks_stay_within_their_window_and_mix_there() -> None:
    starts = np.arange(0, 1001, 10)
    order = shuffled(1000, starts, seed=0, epoch=0)
    windows = (order // 10).reshape(-1, 10 * WINDOW_BLOCKS)
    assert all(len(set(window.tolist())) == WINDOW_BLOCKS for window in windows)
    assert all(len(set(window[:10].tolist())) > 1 for window in windows)
    assert len({min(window.tolist()) // WINDOW_BLOCKS for window in windows}) > 5


@pytest.mark.parametrize(
    ("other", "arguments", "what"),
    [
        (rows(9), {}, "it had 10 rows and now has 9"),
        (RowsSource([{"prompt": "other"}] * 10), {}, "other content"),
        (rows(10), {"seed": 2}, "run.seed has changed"),
        (rows(10), {"shuffle": False}, "data.shuffle has changed"),
    ],
)
def test_a_state_of_other_data_is_refused(other: Any, arguments: dict[str, Any], what: str) -> None:
    state = Cursor(rows(10), seed=1).state()
    with pytest.raises(DataError) as error:
        Cursor(other, **{"seed": 1, **arguments}).load(state)
    assert what in error.value.what
    assert "--fresh" in error.value.mend


GOLDEN = [5, 7, 2, 4, 8, 9, 1, 6, 3, 11, 10, 0]
GOLDEN_BLOCKS = [2, 5, 8, 3, 10, 9, 11, 4, 7, 1, 0, 6]
