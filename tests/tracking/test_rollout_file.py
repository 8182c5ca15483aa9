"""Files of completions: the types that Parquet gets, and that JSON stays JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from strop.tracking import rollouts
from strop.tracking.rollouts import COLUMNS, RolloutFile, rollout_row


def row(number: int = 0, **data: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": "1+2=",
        "prompt_id": f"row-{number:06d}",
        "group": number,
        "sample": 0,
        "prompt_ids": [1, 2],
        "completion": "3",
        "completion_ids": [3],
        "logprobs": [-0.25],
        "temperature": 1.0,
        "reward": 1.0,
        "correct": None,
        "components": {"exact": 1.0},
        "status": "stop",
        "detail": "",
        "answer": None,
        "model": "m",
        "model_fingerprint": "f",
        "weight_version": 0,
    }
    assert tuple(found) == COLUMNS
    return rollout_row(found, data)


def written(path: Path, rows: list[dict[str, Any]]) -> Any:
    file = RolloutFile(path, key="k", per_group=1)
    file.append(rows)
    file.finish()
    file.close()
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parquet_columns_have_the_types_of_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In chunks of two the common type of a column is only known at the end.
    monkeypatch.setattr(rollouts, "ROWS_AT_ONCE", 2)
    several: dict[str, list[Any]] = {
        "count": [1, 2, None, 4, 5],
        "level": [1, 2, 3, 4, 0.5],
        "late": [None, None, None, None, "x"],
        "mixed": [1, "a", [2], None, {"b": 3}],
        "parts": [["a"], [], None, ["b", "c"], []],
        "never": [None] * 5,
        "shape": [{"a": 1}, {}, None, {"a": 2, "b": "x"}, {}],
        "empty": [{}, {}, {}, {}, {}],
    }
    table = written(
        tmp_path / "out.parquet",
        [row(n, **{name: values[n] for name, values in several.items()}) for n in range(5)],
    )
    assert table.column_names == [*COLUMNS, *several]
    types = {field.name: field.type for field in table.schema}
    assert types["completion_ids"] == pa.list_(pa.field("element", pa.int32()))
    assert types["logprobs"] == pa.list_(pa.field("element", pa.float32()))
    assert pa.types.is_map(types["components"])
    assert (types["prompt"], types["reward"], types["group"]) == (pa.string(), pa.float64(), pa.int64())
    assert (types["count"], types["level"]) == (pa.int64(), pa.float64())
    found = {name: table.column(name).to_pylist() for name in several}
    for name in ("count", "level", "late", "parts", "never"):
        assert found[name] == several[name]
    # Values without a common type are JSON.
    assert [None if value is None else value for value in found["mixed"]] == ["1", "a", "[2]", None, '{"b": 3}']
    assert found["empty"] == ["{}"] * 5
    assert [value and value.get("a") for value in found["shape"]] == [1, None, None, 2, None]


def test_a_file_of_only_null_answers_is_still_parquet(tmp_path: Path) -> None:
    table = written(tmp_path / "out.parquet", [row(0), row(1)])
    assert table.column("answer").to_pylist() == [None, None]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_half_a_surrogate_pair_and_numbers_that_json_lacks(tmp_path: Path, name: str) -> None:
    found = written(tmp_path / name, [{**row(0, note="\udfff", odd=math.nan), "completion": "a\ud800b"}])
    rows = found.to_pylist() if name.endswith(".parquet") else found
    assert rows[0]["odd"] is None
    assert rows[0]["completion"] == ("a?b" if name.endswith(".parquet") else "a\ud800b")


def test_arrays_in_the_data_become_lists(tmp_path: Path) -> None:
    import numpy as np

    [found] = written(tmp_path / "out.jsonl", [row(0, vector=np.arange(3), path=Path("a/b"))])
    assert (found["vector"], found["path"]) == ([0, 1, 2], "a/b")


def test_a_disk_that_is_full_keeps_the_groups_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from strop.errors import RunFailure

    file = RolloutFile(tmp_path / "out.jsonl", key="k", per_group=1)
    file.append([row(0)])
    real = os.write

    def full(handle: int, data: bytes) -> int:
        real(handle, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunFailure, match="No space left on device"):
        file.append([row(1)])
    monkeypatch.setattr(os, "write", real)
    file.close()
    again = RolloutFile(tmp_path / "out.jsonl", key="k", per_group=1)
    assert again.groups == 1
    again.append([row(1)])
    assert [found["group"] for found in again.rows()] == [0, 1]
    again.close()


def test_a_half_written_group_is_done_again(tmp_path: Path) -> None:
    file = RolloutFile(tmp_path / "out.jsonl", key="k", per_group=2)
    file.append([row(0), row(0), row(1), row(1)])
    file.close()
    lines = file.partial.read_bytes().splitlines(keepends=True)
    file.partial.write_bytes(b"".join(lines[:-1]))
    again = RolloutFile(tmp_path / "out.jsonl", key="k", per_group=2)
    assert again.groups == 1
    assert len(list(again.rows())) == 2
    again.close()
    other = RolloutFile(tmp_path / "out.jsonl", key="other", per_group=2)
    assert (other.groups, list(other.rows())) == (0, [])
    other.close()


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path, rows: int) -> None:
    """Whoever writes until enough groups are there would go on for ever."""
    file = RolloutFile(tmp_path / "out.jsonl", key="k", per_group=2)
    with pytest.raises(ValueError, match="no whole groups of 2"):
        file.append([row(0)] * rows)
    assert file.groups == 0
    file.close()
