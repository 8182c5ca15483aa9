from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.config.data import DataSource
from strop.data import jsonl as module
from strop.data import open_source
from strop.data.jsonl import JsonlSource
from strop.errors import DataError

lines = st.lists(
    st.one_of(
        st.fixed_dictionaries({"prompt": st.text(max_size=30), "n": st.integers()}).map(
            lambda row: json.dumps(row, ensure_ascii=False)
        ),
        st.sampled_from(["", "   ", "\t", "\r"]),
    ),
    max_size=20,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    written=lines,
    chunk=st.integers(1, 80),
    last_newline=st.booleans(),
    bom=st.booleans(),
    crlf=st.booleans(),
    limit=st.none() | st.integers(1, 8),
)
def test_rows_and_lines_are_those_of_the_file_whatever_the_chunk(
    tmp_path: Path, written: list[str], chunk: int, last_newline: bool, bom: bool, crlf: bool, limit: int | None
) -> None:
    path = tmp_path / "any.jsonl"
    end = "\r\n" if crlf else "\n"
    text = end.join(written) + (end if last_newline else "")
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.encode())
    expected = [(n, json.loads(line)) for n, line in enumerate(written, start=1) if line.strip()][:limit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk)
        if not expected:
            with pytest.raises(DataError, match=r"empty|blank"):
                JsonlSource(path, limit=limit)
            return
        source = JsonlSource(path, limit=limit)
        small_chunks = source.fingerprint
    assert [source[i] for i in range(len(source))] == [row for _, row in expected]
    assert [source.location(i) for i in range(len(source))] == [f"{path}:{n}" for n, _ in expected]
    assert JsonlSource(path, limit=limit).fingerprint == small_chunks


def test_rows_are_not_held_in_memory(jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl([{"prompt": f"{i} " + "x" * 4000} for i in range(2000)])
    monkeypatch.setattr(module, "CHUNK_BYTES", 2**16)
    tracemalloc.start()
    try:
        source = JsonlSource(path)
        total = sum(len(source[i]["prompt"]) for i in range(len(source)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 8_000_000
    assert peak < 1_000_000


def test_a_large_file_is_checked_at_its_head_and_then_on_access(
    jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_ALL_BYTES", 100)
    monkeypatch.setattr(module, "CHECK_ROWS", 10)
    path = jsonl('{"prompt": "a"}\n' * 50 + "{broken\n")
    source = JsonlSource(path)
    assert source.checked == 10
    with pytest.raises(DataError) as error:
        source[50]
    assert f"{path}:51:2" in error.value.where


@pytest.mark.parametrize(
    ("content", "what", "where", "mend"),
    [
        ('{"a": 1}\n\n{"a": 1,}\n', "not valid JSON", ":3:9", "Mend or delete"),
        ('{"a": 1}\n[1, 2]\n', "not a JSON object but a list", ":2", "object such as"),
        ('{"a": 1}\nnull\n', "not a JSON object but a null", ":2", "object such as"),
        ('{"a": 1}\n{"a"', "not valid JSON", ":2:5", "Mend or delete"),
        ('[{"a": 1}, {"a": 2}]\n', "one JSON array", ":1", "one object on each line"),
        ('[\n  {"a": 1}\n]\n', "one JSON document", ":1:", "one object on each line"),
        (b'{"a": "\xff"}\n', "not UTF-8", ":1", "UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), "UTF-16", "", "UTF-8"),
        (b"\x1f\x8b\x08\x00", "gzip", "", "gunzip"),
        (b"PAR1....", "Parquet", "", "format: parquet"),
        (b"\x00" * 20 + b"\n", "not valid JSON", ":1:1", "Mend or delete"),
        ("", "empty", "", "one JSON object"),
        ("\n  \n", "only blank lines", "", "one JSON object"),
    ],
)
def test_bad_files_are_named(jsonl: Callable[..., Path], content: Any, what: str, where: str, mend: str) -> None:
    path = jsonl(content)
    with pytest.raises(DataError) as error:
        open_source(DataSource(path=str(path)))
    assert what in error.value.what
    assert error.value.where.startswith(f"{path}{where}")
    assert mend in error.value.mend


def test_an_endless_line_is_refused_before_it_fills_the_memory(
    jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 5000)
    with pytest.raises(DataError, match="longer than"):
        JsonlSource(jsonl('{"a": 1}\n{"a": "' + "x" * 20_000 + '"}\n'))


def test_the_fingerprint_follows_the_content_only(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(100)]
    first = JsonlSource(jsonl(rows)).fingerprint
    assert JsonlSource(jsonl(rows, "copy.jsonl")).fingerprint == first
    rows[50]["prompt"] = "51"
    assert JsonlSource(jsonl(rows)).fingerprint != first


def test_what_lies_beyond_the_limit_is_not_part_of_the_source(jsonl: Callable[..., Path]) -> None:
    rows = [{"prompt": str(i)} for i in range(20)]
    before = open_source(DataSource(path=str(jsonl(rows)), limit=5))
    after = open_source(DataSource(path=str(jsonl([*rows, {"prompt": "more"}])), limit=5))
    assert len(before) == len(after) == 5
    assert before.fingerprint == after.fingerprint
