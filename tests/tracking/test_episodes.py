"""Episodes as parquet: what goes in comes out, and other tools can read it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.tracking.episodes import (
    EpisodeRecord,
    columns_of,
    drop_episodes_after,
    episode_table,
    episodes_file,
    read_episodes,
    records_of,
    schema,
    write_episodes,
)

ARRAYS = ("tokens", "loss_mask", "sampler_logprobs", "trainer_logprobs", "advantages", "versions")


class Status(StrEnum):
    STOP = "stop"


def record(length: int = 5, prompt: int = 2, **more: Any) -> EpisodeRecord:
    mask = np.arange(length) >= prompt
    logprobs = np.where(mask, -0.5, np.nan).astype(np.float32)
    values: dict[str, Any] = {
        "group": 1,
        "sample": 0,
        "prompt_id": "row-000001",
        "prompt_text": "37+48=",
        "completion_text": "85",
        "answer": "85",
        "status": Status.STOP,
        "reward": 1.0,
        "correct": True,
        "tokens": np.arange(length, dtype=np.int64),
        "loss_mask": mask,
        "sampler_logprobs": logprobs,
        "trainer_logprobs": logprobs - 0.25,
        "advantages": mask.astype(np.float32),
        "versions": np.where(mask, 3, -1),
        "components": {"exact": 1.0},
        "row": {"prompt": "37+48=", "answer": "85"},
    }
    return EpisodeRecord(**{**values, **more})


@st.composite
def records(draw: st.DrawFn) -> EpisodeRecord:
    length = draw(st.integers(0, 6))

    def floats() -> Any:
        return st.none() | st.lists(st.floats(-5, 0, width=32), min_size=length, max_size=length).map(
            lambda values: np.array(values, dtype=np.float32)
        )

    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=np.bool_)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    scores = st.floats(-2, 2) | st.just(math.nan)
    return EpisodeRecord(
        group=draw(st.integers(0, 2**40)),
        sample=draw(st.integers(0, 1000)),
        prompt_id=draw(text),
        prompt_text=draw(text),
        completion_text=draw(text),
        answer=draw(st.none() | text),
        status=draw(st.sampled_from(["stop", "length", "verifier_error"])),
        reward=draw(scores),
        correct=draw(st.none() | st.booleans()),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), dtype=np.int64),
        loss_mask=mask,
        sampler_logprobs=draw(floats()),
        trainer_logprobs=draw(floats()),
        advantages=draw(floats()),
        versions=draw(st.none() | st.just(np.where(mask, 7, -1))),
        components=draw(st.dictionaries(text, scores, max_size=3)),
        detail=draw(text),
        row=draw(st.dictionaries(text, st.none() | st.integers() | text | st.lists(text, max_size=2), max_size=3)),
        stream=draw(st.integers(0, 3)),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(records(), max_size=5))
def test_what_is_written_is_read(given_records: list[EpisodeRecord]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = episodes_file(Path(folder), 12)
        write_episodes(path, given_records)
        found = read_episodes(path)
    assert len(found) == len(given_records)
    for before, after in zip(given_records, found, strict=True):
        for name in ARRAYS:
            old, new = getattr(before, name), getattr(after, name)
            if old is None:
                assert new is None
                continue
            if name.endswith("logprobs"):
                old = np.where(before.loss_mask, old, np.nan)
            np.testing.assert_array_equal(new, old)
        for name in ("group", "sample", "stream", "prompt_id", "prompt_text", "completion_text", "answer"):
            assert getattr(after, name) == getattr(before, name)
        assert (after.status, after.correct, after.detail) == (before.status, before.correct, before.detail)
        assert after.row == before.row
        np.testing.assert_equal(after.reward, before.reward)
        np.testing.assert_equal(dict(after.components), dict(before.components))


@settings(max_examples=40, deadline=None)
@given(st.lists(records(), max_size=5))
def test_field_by_field_they_are_the_same(given_records: list[EpisodeRecord]) -> None:
    table = episode_table(columns_of(given_records))
    again = records_of(columns_of(given_records))
    assert episode_table(columns_of(again)).equals(table)
    for before, after in zip(given_records, again, strict=True):
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


@pytest.mark.parametrize("name", ARRAYS)
def test_columns_with_a_number_too_many_are_refused(name: str) -> None:
    columns = columns_of([record(), record(4)])
    columns.arrays[name] = np.append(columns.arrays[name], columns.arrays[name][-1])
    with pytest.raises(ValueError, match="10"):
        episode_table(columns)


def test_other_tools_see_the_documented_columns(tmp_path: Path) -> None:
    path = episodes_file(tmp_path / "episodes", 12)
    write_episodes(path, [record(), record(status="verifier_error", reward=math.nan, correct=None, components={})])
    assert path.name == "step-000012.parquet"
    table = parquet.read_table(path)
    assert table.schema.equals(schema())
    assert table.schema.metadata == {b"strop.episodes": b"1"}
    for name in schema().names:
        assert name in (schema.__doc__ or "")
    first, second = table.to_pylist()
    assert first["tokens"] == [0, 1, 2, 3, 4]
    assert first["loss_mask"] == [False, False, True, True, True]
    assert first["sampler_logprobs"] == [None, None, -0.5, -0.5, -0.5]
    assert first["trainer_logprobs"] == [None, None, -0.75, -0.75, -0.75]
    assert first["versions"] == [-1, -1, 3, 3, 3]
    assert first["status"] == "stop"
    assert dict(first["components"]) == {"exact": 1.0}
    assert (second["reward"], second["correct"]) == (None, None)  # a failed verifier is not a reward of 0


def test_a_log_probability_at_a_masked_place_never_reaches_the_file(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.parquet", [record(trainer_logprobs=np.full(5, -9.0, dtype=np.float32))])
    (row,) = parquet.read_table(tmp_path / "e.parquet").to_pylist()
    assert row["trainer_logprobs"] == [None, None, -9.0, -9.0, -9.0]


def test_records_may_hold_cuts_and_numbers_of_different_kinds(tmp_path: Path) -> None:
    # Every other entry of what is larger, and kinds of which the first is too small for the second.
    spread = np.stack([np.arange(5), np.full(5, 9)], axis=1)[:, 0]
    small, large = np.arange(5, dtype=np.int8), np.arange(5, dtype=np.int64) + 1000
    for tokens in ([spread, spread + 5], [small, large], [large, small]):
        write_episodes(tmp_path / "e.parquet", [record(tokens=one) for one in tokens])
        found = read_episodes(tmp_path / "e.parquet")
        assert [one.tokens.tolist() for one in found] == [one.tolist() for one in tokens]


def test_records_may_hold_what_numpy_makes_an_array_of(tmp_path: Path) -> None:
    given = np.arange(5)
    for kind in (list, torch.tensor, lambda tokens: tokens.astype(object)):
        write_episodes(tmp_path / "e.parquet", [record(tokens=kind(given)), record(tokens=given + 5)])
        assert [one.tokens.tolist() for one in read_episodes(tmp_path / "e.parquet")] == [
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8, 9],
        ]


@pytest.mark.parametrize("name", ARRAYS)
def test_more_than_one_number_for_a_token_is_refused(tmp_path: Path, name: str) -> None:
    pairs = np.stack([getattr(record(), name)] * 2, axis=1)
    with pytest.raises(ValueError, match=rf"{name} has the shape \[5, 2\] for 5 tokens"):
        write_episodes(tmp_path / "e.parquet", [record(), record(**{name: pairs})])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "tokens"])
def test_a_length_that_differs_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 4 entries for 5 tokens"):
        write_episodes(tmp_path / "e.parquet", [record(), record(**{name: getattr(record(4), name)})])
    assert list(tmp_path.iterdir()) == []


def test_half_a_surrogate_pair_does_not_stop_a_run(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.parquet", [record(completion_text="a\ud800b", row={"x": "\udfff"})])
    (found,) = read_episodes(tmp_path / "e.parquet")
    assert found.completion_text == "a?b"
    assert found.row == {"x": "?"}


def test_a_row_with_values_json_does_not_know(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.parquet", [record(row={"path": Path("a/b"), "answer": 85})])
    (found,) = read_episodes(tmp_path / "e.parquet")
    assert found.row == {"path": "a/b", "answer": 85}


def test_rows_that_share_what_they_hold(tmp_path: Path) -> None:
    # As the rows of a group do, whatever a reward writes into one of them.
    text, tests = "x" * 9, [1, 2]
    rows: list[dict[str, Any]] = [{"a": text, "b": tests}, {"a": text, "b": tests}, {"b": tests, "a": text}]
    rows += [{"a": text, "b": one} for one in (1, True, 1.0, [1, 2])] + [{"a": text}, {"a": tests, "b": text}, {}]
    write_episodes(tmp_path / "e.parquet", [record(row=row) for row in rows])
    found = [one["row"] for one in parquet.read_table(tmp_path / "e.parquet").to_pylist()]
    assert found == [json.dumps(row) for row in rows]


def test_a_kill_in_the_middle_leaves_the_last_whole_file(tmp_path: Path) -> None:
    path = episodes_file(tmp_path, 1)
    write_episodes(path, [record()])
    program = (
        "import os, pathlib, signal\nimport pyarrow.parquet as parquet\n"
        "from strop.tracking import atomic, episodes\n"
        f"path = pathlib.Path({str(path)!r})\nrecords = episodes.read_episodes(path) * 50\n"
        "def torn(file):\n"
        "    os.truncate(file, file.stat().st_size // 2)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "atomic.sync_file = torn\nepisodes.write_episodes(path, records)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    assert len(read_episodes(path)) == 1
    write_episodes(path, [record(), record()])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert len(read_episodes(path)) == 2


def test_resume_drops_the_files_of_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000):
        write_episodes(episodes_file(tmp_path, step), [record()])
    (tmp_path / "step-notes.parquet").write_text("somebody's")
    drop_episodes_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000001.parquet",
        "step-000002.parquet",
        "step-notes.parquet",
    ]
    drop_episodes_after(tmp_path / "none", 2)
