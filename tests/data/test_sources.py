from __future__ import annotations

import datetime
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.config.data import Columns, DataSource
from strop.data import Cursor, RowsSource, open_source
from strop.data import fingerprints as fingerprints_module
from strop.data import huggingface as huggingface_module
from strop.data import parquet as parquet_module
from strop.data.fingerprints import file_fingerprint, rows_fingerprint
from strop.data.parquet import ParquetSource
from strop.data.sources import detect, require_column
from strop.errors import DataError

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(100)]


def write_parquet(path: Path, rows: list[dict[str, Any]], *, group: int = 10) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def error_of(**settings: Any) -> DataError:
    with pytest.raises(DataError) as error:
        open_source(DataSource(**settings))
    return error.value


def every(source: Any) -> list[dict[str, Any]]:
    return [source[i] for i in range(len(source))]


# Files and folders


def test_parquet_rows_messages_and_columns(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}, {"prompt": [], "answer": None}]
    source = open_source(DataSource(path=str(write_parquet(tmp_path / "a.parquet", rows))))
    assert every(source) == rows
    assert source.columns == ["prompt", "answer"]
    assert source.blocks is None
    with pytest.raises(IndexError):
        source[2]


def test_large_parquet_holds_few_blocks_and_a_shuffled_epoch_reads_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_module, "HELD_BYTES", 0)
    monkeypatch.setattr(parquet_module, "BLOCK_ROWS", 20)
    rows = [{"prompt": f"p{i}"} for i in range(1005)]
    source = ParquetSource([write_parquet(tmp_path / "a.parquet", rows)])
    assert source.blocks is not None
    assert len(source.blocks) == 52
    cursor = Cursor(source, seed=0)
    seen = []
    for _ in range(len(source)):
        seen.append(source[cursor.next()[1]]["prompt"])
        assert len(source._held) <= parquet_module.HELD_BLOCKS
    assert sorted(seen) == sorted(row["prompt"] for row in rows)
    assert seen != [row["prompt"] for row in rows]
    assert source.blocks_read == 51


def test_row_groups_of_different_sizes_and_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "BLOCK_ROWS", 7)
    write_parquet(tmp_path / "b.parquet", ROWS[40:], group=9)
    write_parquet(tmp_path / "a.parquet", ROWS[:40], group=3)
    (tmp_path / "README.md").write_text("not data")
    source = open_source(DataSource(path=str(tmp_path)))
    assert every(source) == ROWS
    assert source.location(41) == f"{tmp_path / 'b.parquet'}, row 1 counted from 0"


def test_a_folder_of_json_lines_is_one_source(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    jsonl(ROWS[60:], "2.jsonl")
    first = jsonl(ROWS[:60], "1.jsonl")
    source = open_source(DataSource(path=str(tmp_path)))
    assert every(source) == ROWS
    assert source.location(3) == f"{first}:4"
    assert "2 files" in source.describe()
    limited = open_source(DataSource(path=str(tmp_path), limit=61))
    assert every(limited) == ROWS[:61]


def test_limit_cuts_blocks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "HELD_BYTES", 0)
    monkeypatch.setattr(parquet_module, "BLOCK_ROWS", 10)
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    for limit in (5, 10, 25, 99, 100, 1000):
        source = open_source(DataSource(path=str(path), limit=limit))
        assert len(source) == min(limit, 100)
        cursor = Cursor(source, seed=1)
        assert sorted(cursor.next()[1] for _ in range(len(source))) == list(range(min(limit, 100)))


@pytest.mark.parametrize(
    ("make", "what", "mend"),
    [
        (lambda p: p / "tran.jsonl", "no such file", "train.jsonl"),
        (lambda p: p / "nowhere" / "x.jsonl", "no such file", "does not exist either"),
        (lambda p: p / "damaged.parquet", "not a readable Parquet file", "Write the file again"),
        (lambda p: p / "none.parquet", "no rows", "with rows"),
        (lambda p: p / "table.csv", "CSV files are not read", "Convert"),
        (lambda p: p / "what.bin", "cannot tell what kind", "set `format`"),
        (lambda p: p / "mixed", "both JSON lines and Parquet", "Point at one file"),
        (lambda p: p / "outer", "no .jsonl or .parquet", "inner"),
        (lambda p: p / "different", "the columns differ", "same columns"),
    ],
)
def test_paths_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], Path], what: str, mend: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "what.bin").write_bytes(b"\x01\x02")
    for folder in ("mixed", "outer/inner", "different"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mixed" / "a.jsonl").write_text("{}\n")
    write_parquet(tmp_path / "mixed" / "b.parquet", ROWS)
    (tmp_path / "outer" / "inner" / "a.jsonl").write_text("{}\n")
    write_parquet(tmp_path / "different" / "a.parquet", ROWS)
    write_parquet(tmp_path / "different" / "b.parquet", [{"text": "x"}])
    error = error_of(path=str(make(tmp_path)))
    assert what in error.what
    assert mend in error.mend
    assert str(tmp_path) in error.where


def test_kinds_are_told_by_form_and_by_content(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    assert detect("package.module:function") == "python"
    assert detect("openai/gsm8k") == "huggingface"
    assert detect(str(jsonl("\ufeff \n" + '{"a": 1}', "without_suffix"))) == "jsonl"
    assert detect(str(write_parquet(tmp_path / "noname", ROWS))) == "parquet"
    with pytest.raises(DataError, match="no such file"):
        detect("data/deep/er/path")


def test_a_name_in_a_folder_that_is_there_is_a_path_and_not_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    (tmp_path / "data" / "README.md").write_text("")
    error = error_of(path="data/train")
    assert "no such file" in error.what
    assert error.mend == "Did you mean 'train.jsonl'?"
    assert "current folder" in error_of(path="data/zzz").mend


def test_a_file_changes_the_fingerprint_anywhere_when_it_is_small_and_at_its_ends_when_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    content = bytearray(5000)
    path.write_bytes(content)
    whole = file_fingerprint(path)
    content[2500] = 1
    path.write_bytes(content)
    assert file_fingerprint(path) != whole
    monkeypatch.setattr(fingerprints_module, "WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(fingerprints_module, "PIECE_BYTES", 100)
    sampled = file_fingerprint(path)
    for changed in (0, 4999):
        other = bytearray(content)
        other[changed] = 9
        path.write_bytes(other)
        assert file_fingerprint(path) != sampled
    path.write_bytes(content + b"x")
    assert file_fingerprint(path) != sampled


# Columns


def test_a_missing_column_names_those_there_are_and_the_nearest(jsonl: Callable[..., Path]) -> None:
    path = jsonl([{"question": "a", "solution": "b"}])
    source = open_source(DataSource(path=str(path)))
    with pytest.raises(DataError) as error:
        require_column(source, "Questions", key="columns.prompt")
    assert "question, solution" in error.value.what
    assert "Did you mean 'question'?" in error.value.mend
    assert error.value.where == f"{path}:1"


def test_an_answer_column_must_exist_only_if_the_recipe_names_it(jsonl: Callable[..., Path]) -> None:
    path = str(jsonl([{"prompt": "a", "solution": "b"}]))
    assert open_source(DataSource(path=path)).columns == ["prompt", "solution"]
    error = error_of(path=path, columns=Columns(answer="solutions"))
    assert "'solutions'" in error.what
    assert "'solution'" in error.mend


# Python


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working folder; returns its name."""
    name = "rows_of_a_test_" + "".join(c for c in tmp_path.name if c.isalnum())
    (tmp_path / f"{name}.py").write_text(
        "def make(count, *, start=0):\n"
        "    return [{'prompt': str(i)} for i in range(start, start + count)]\n"
        "def lazily():\n    yield {'prompt': 'a'}\n"
        "def nothing():\n    return []\n"
        "def number():\n    return 3\n"
        "def texts():\n    return ['a']\n"
        "def fails():\n    raise KeyError('gone')\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / f"{name}_syntax.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # a copy: what is appended goes away again
    return name


def test_a_function_of_the_working_folder_gives_rows(module: str) -> None:
    source = open_source(DataSource(path=f"{module}:make", arguments={"count": 3, "start": 5}))
    assert every(source) == [{"prompt": "5"}, {"prompt": "6"}, {"prompt": "7"}]
    assert every(open_source(DataSource(path=f"{module}:lazily"))) == [{"prompt": "a"}]


def test_the_quickstart_generator_is_reached_by_its_path() -> None:
    source = open_source(DataSource(path="strop.data.arithmetic:problems", arguments={"count": 7}))
    assert len(source) == 7


@pytest.mark.parametrize(
    ("function", "arguments", "what", "mend"),
    [
        ("{m}:mak", {}, "has no function 'mak'", "'make'"),
        ("{m}x:make", {}, "was found neither in", "Did you mean '{m}'?"),
        ("{m}_broken:make", {}, "needs 'no_such_package_anywhere'", "Install"),
        ("{m}_syntax:f", {}, "cannot be imported: SyntaxError", "Try it alone"),
        ("{m}:make", {"count": 1, "strat": 2}, "do not fit", "'start'"),
        ("{m}:make", {}, "missing a required argument: 'count'", "count, start"),
        ("{m}:nothing", {}, "no rows", "at least one"),
        ("{m}:number", {}, "returned int", "list of dicts"),
        ("{m}:texts", {}, "not a dict but str", "must be a dict"),
        ("{m}:fails", {}, "failed: KeyError: 'gone'", "traceback"),
    ],
)
def test_functions_that_cannot_be_used(
    module: str, function: str, arguments: dict[str, Any], what: str, mend: str
) -> None:
    error = error_of(path=function.format(m=module), arguments=arguments)
    assert what in error.what
    assert mend.format(m=module) in error.mend


def test_a_python_path_without_a_function_is_refused() -> None:
    assert "module:function" in error_of(path="justamodule", format="python").mend


def test_the_fingerprint_of_rows_does_not_depend_on_addresses() -> None:
    class Thing:
        pass

    assert rows_fingerprint([{"a": Thing()}]) == rows_fingerprint([{"a": Thing()}])
    assert rows_fingerprint([{"a": 1}]) != rows_fingerprint([{"a": 2}])
    many = [{"a": i} for i in range(10_000)]
    assert rows_fingerprint(many) != rows_fingerprint([*many[:-1], {"a": 0}])
    assert RowsSource([{"a": 1}]).fingerprint != RowsSource([{"a": 1}, {"a": 1}]).fingerprint


def test_arrays_dates_and_bytes_are_part_of_the_fingerprint() -> None:
    first = {"a": np.arange(3), "b": b"x", "c": datetime.date(2020, 1, 1)}
    prints = {rows_fingerprint([first])}
    for changed in ({"a": np.arange(4)}, {"b": b"y"}, {"c": datetime.date(2020, 1, 2)}):
        prints.add(rows_fingerprint([first | changed]))
    assert len(prints) == 4
    assert rows_fingerprint([dict(reversed(first.items()))]) in prints


# Hugging Face


def test_a_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select(range(3))}).save_to_disk(tmp_path / "two")
    one = open_source(DataSource(path=str(tmp_path / "one")))
    assert every(one) == ROWS
    assert one.columns == ["prompt", "answer"]
    two = open_source(DataSource(path=str(tmp_path / "two"), split="test"))
    assert every(two) == ROWS[:3]
    # Saved again, the library gives it another fingerprint of its own; the rows are the same.
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "again")
    assert open_source(DataSource(path=str(tmp_path / "again"))).fingerprint == one.fingerprint
    error = error_of(path=str(tmp_path / "two"), split="tests")
    assert "it has train, test" in error.what
    assert "'test'" in error.mend


def test_an_unreachable_hub_is_reported_at_once_and_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    error = error_of(path="some-group/some-dataset-that-nobody-has")
    assert "no file or folder here" in error.what
    assert "cannot be reached" in error.what
    assert before == (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_what_the_hub_answers_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(path: str, subset: str | None, *, split: str) -> Any:
        asked.append((path, subset, split))
        if split != "train":
            raise ValueError(f"Unknown split {split!r}.\nmore lines")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(huggingface_module, "_hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(DataSource(path="group/name", subset="main", limit=10))
    assert every(source) == ROWS[:10]
    assert asked == [("group/name", "main", "train")]
    assert source.location(3) == "group/name/main [train], row 3 counted from 0"
    error = error_of(path="group/name", split="nope")
    assert error.what.endswith("could not be loaded from the Hub: Unknown split 'nope'.")


def test_a_proxy_leaves_the_question_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setattr(socket, "create_connection", None)
    assert huggingface_module._hub_answers()


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    error = error_of(path=str(tmp_path))
    assert "cannot be read as a saved dataset" in error.what
    assert error.where == str(tmp_path)


def test_data_that_changes_under_a_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    source = ParquetSource([path])
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read"):
        source[0]


def test_a_format_that_is_asked_for_is_used(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    path = jsonl(ROWS, "rows.txt")
    assert every(open_source(DataSource(path=str(path), format="jsonl"))) == ROWS
    assert "not a readable Parquet file" in error_of(path=str(path), format="parquet").what
    assert "no such file" in error_of(path=str(tmp_path / "gone"), format="jsonl").what
    assert "holds no parquet files" in error_of(path=str(tmp_path), format="parquet").what
