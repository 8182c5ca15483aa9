"""The curriculum: what is passed by follows from what was recorded; every row is tried or counted; it ends nowhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from strop.config.curriculum import CurriculumSettings
from strop.config.data import DataSettings, DataSource
from strop.data import Cursor, PromptDataset, PromptStream, RowsSource
from strop.data.curriculum import Curriculum


def curriculum(rows: int = 10, *, seed: int = 0, group_size: int = 4, **keys: Any) -> Curriculum:
    return Curriculum(CurriculumSettings(**keys), rows, seed=seed, group_size=group_size)


def stream_of(sizes: list[int], tokenizer: Any, given: Curriculum | None, *, seed: int = 0) -> PromptStream:
    """Prompts of so many characters; more than nine are too long."""
    source = RowsSource([{"prompt": "x" * size} for size in sizes])
    keys = DataSettings(train=DataSource(path="unused"), overlong_prompts="skip")
    return PromptStream(PromptDataset(source, keys, tokenizer, 10), Cursor(source, seed=seed), given)


def row_of(prompt_id: str) -> int:
    return int(prompt_id.removeprefix("row-"))


# What is thought of a prompt


def test_a_prompt_is_judged_once_enough_of_it_is_known() -> None:
    found = curriculum(floor=0.25)
    assert found.standing(3) == ("unknown", 1.0)
    found.record(3, 3, 3)
    # Four completions were sampled, of which one could not be verified.
    assert found.standing(3) == ("unknown", 1.0)
    found.record(3, 4, 4)
    assert found.standing(3) == ("solved", 0.25)
    found.record(4, 0, 4)
    assert found.standing(4) == ("failed", 0.25)
    found.record(5, 1, 4)
    assert found.standing(5) == ("open", 1.0)


def test_it_forgets_what_is_older_than_its_memory() -> None:
    found = curriculum(memory=2)
    seen = []
    for passed in (4, 1, 4, 4, 0, 0):
        found.record(0, passed, 4)
        seen.append(found.standing(0)[0])
    assert seen == ["solved", "open", "open", "solved", "open", "failed"]


def test_a_try_that_could_not_be_verified_pushes_nothing_out() -> None:
    found = curriculum(memory=1)
    found.record(0, 4, 4)
    found.record(0, 0, 0)
    assert found.standing(0)[0] == "solved"


def test_thresholds_and_what_is_never_dropped() -> None:
    found = curriculum(solved_at=0.75, failed_at=None)
    found.record(0, 3, 4)
    found.record(1, 0, 4)
    assert found.standing(0)[0] == "solved"
    assert found.standing(1) == ("open", 1.0)
    other = curriculum(solved_at=None, failed_at=0.25)
    other.record(0, 4, 4)
    other.record(1, 1, 4)
    assert other.standing(0) == ("open", 1.0)
    assert other.standing(1)[0] == "failed"


def test_the_uncertain_are_preferred() -> None:
    found = curriculum(prefer="uncertain", group_size=8, floor=0.1, solved_at=None)
    for row, passed in enumerate((4, 2, 8, 0)):
        found.record(row, passed, 8)
    assert [found.standing(row)[1] for row in range(4)] == [1.0, 0.75, 0.1, 0.1]


# Which prompts come


def test_without_anything_recorded_the_order_is_that_without_a_curriculum(tokenizer: Any) -> None:
    plain, chosen = (stream_of([3] * 12, tokenizer, given) for given in (None, curriculum(12)))
    assert [plain.next() for _ in range(30)] == [chosen.next() for _ in range(30)]


def test_in_every_epoch_each_row_is_tried_or_counted(tokenizer: Any) -> None:
    found = curriculum(40, floor=0.2)
    for row in range(30):
        found.record(row, 4 if row < 20 else 0, 4)
    stream = stream_of([3] * 40, tokenizer, found)
    tried: list[Counter[int]] = []
    epochs = 60
    while True:
        prompt, epoch = stream.next()
        if epoch == epochs:
            break
        if len(tried) == epoch:
            tried.append(Counter())
        tried[epoch][row_of(prompt.prompt_id)] += 1
    # What is not dropped comes once in every epoch.
    assert all(counts[row] == 1 for counts in tried for row in range(30, 40))
    assert all(max(counts.values()) == 1 for counts in tried)
    metrics = found.metrics()
    missing = sum(40 - sum(counts.values()) for counts in tried)
    skipped = metrics["curriculum/skipped_solved"] + metrics["curriculum/skipped_failed"]
    # The last call has looked into one more epoch.
    assert 0 <= skipped - missing <= 40
    dropped = [sum(counts[row] for counts in tried) for row in range(30)]
    assert np.mean(dropped) / epochs == pytest.approx(0.2, abs=0.03)
    assert metrics["curriculum/forced"] == 0


def test_what_comes_is_a_matter_of_seed_epoch_and_row(tokenizer: Any) -> None:
    def drawn(seed: int) -> set[tuple[int, int]]:
        found = curriculum(20, seed=seed, floor=0.3)
        for row in range(20):
            found.record(row, 4, 4)
        return {(epoch, row) for epoch in range(20) for row in range(20) if not found.skips(epoch, row, waited=0)}

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    by_epoch = [{row for at, row in drawn(1) if at == epoch} for epoch in range(20)]
    assert len({frozenset(rows) for rows in by_epoch}) > 15


def test_where_all_are_solved_one_comes_all_the_same(tokenizer: Any) -> None:
    found = curriculum(5, floor=1e-9)
    for row in range(5):
        found.record(row, 4, 4)
    stream = stream_of([3] * 5, tokenizer, found)
    # Five rows are passed by for each that is tried.
    assert [stream.next()[1] for _ in range(5)] == [1, 2, 3, 4, 5]
    assert found.metrics()["curriculum/forced"] == 5
    assert found.metrics()["curriculum/skipped_solved"] == 25


def test_one_usable_prompt_among_overlong_ones_comes_though_it_is_solved(tokenizer: Any) -> None:
    found = curriculum(8, floor=1e-9)
    stream = stream_of([3, *[20] * 7], tokenizer, found)
    assert stream.next()[0].prompt_id == "row-000000"
    found.record(0, 4, 4)
    assert [stream.next()[0].prompt_id for _ in range(20)] == ["row-000000"] * 20
    assert found.metrics()["curriculum/forced"] == 20


# Metrics


def test_metrics_count_since_the_step_began_and_know_all_rows() -> None:
    found = curriculum(6, floor=0.5)
    assert np.isnan(found.metrics()["curriculum/pass_rate"])
    for row, passed in enumerate((4, 4, 0, 2, 1)):
        found.record(row, passed, 4)
    came = [not found.skips(epoch, 0, waited=0) for epoch in range(100)]
    metrics = found.metrics()
    assert metrics["curriculum/skipped_solved"] == 100 - sum(came)
    assert metrics["curriculum/revisited"] == sum(came)
    assert 30 < sum(came) < 70
    assert [metrics[f"curriculum/{name}"] for name in ("known", "solved", "failed")] == [5, 2, 1]
    assert metrics["curriculum/pass_rate"] == pytest.approx(11 / 20)
    assert "curriculum/skipped_certain" not in metrics
    found.start_step()
    assert found.metrics()["curriculum/skipped_solved"] == 0
    assert found.metrics()["curriculum/known"] == 5


# Resuming


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20).filter(lambda sizes: min(sizes) <= 9),
    before=st.integers(0, 40),
    after=st.integers(1, 40),
    seed=st.integers(0, 1000),
    memory=st.integers(1, 3),
    prefer=st.sampled_from(["any", "uncertain"]),
)
def test_a_stream_resumes_with_its_curriculum(
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    before: int,
    after: int,
    seed: int,
    memory: int,
    prefer: str,
) -> None:
    def fresh() -> tuple[PromptStream, Curriculum]:
        found = curriculum(len(sizes), seed=seed, memory=memory, prefer=prefer)
        return stream_of(sizes, tokenizer, found, seed=seed), found

    def go(stream: PromptStream, found: Curriculum, tries: int, first: int) -> list[str]:
        came = []
        for number in range(first, first + tries):
            prompt, epoch = stream.next()
            came.append(f"{epoch} {prompt.prompt_id}")
            row = row_of(prompt.prompt_id)
            found.record(row, (0, 4, 4, (number * 7 + row) % 5)[row % 4], 4)
        return came

    stream, found = fresh()
    go(stream, found, before, 0)
    file = tmp_path_factory.mktemp("state") / "curriculum.safetensors"
    found.save(file)
    state = json.loads(json.dumps(stream.state()))
    expected = go(stream, found, after, before)
    again, remembered = fresh()
    again.load(state)
    remembered.record(0, 2, 4)  # what it knew before it goes
    remembered.load(file)
    assert go(again, remembered, after, before) == expected
    remembered.start_step()
    found.start_step()
    assert str(remembered.metrics()) == str(found.metrics())


def test_its_file_grows_with_the_rows_that_were_tried(tmp_path: Path) -> None:
    found = curriculum(1_000_000)
    for row in range(100):
        found.record(row * 1000, 2, 4)
    found.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 5000


# Settings


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"solved_at": 0.2, "failed_at": 0.2}, "is not below"),
        ({"solved_at": None, "failed_at": None}, "no effect"),
        ({"floor": 0.0}, "greater than 0"),
        ({"floor": 1.0}, "less than 1"),
        ({"memory": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CurriculumSettings(**keys)
