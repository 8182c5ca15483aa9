"""A file of metrics followed while it grows: each byte is read once, whatever happens to the file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from strop.tracking import metrics_tail
from strop.tracking.metrics import MetricsWriter, read_metrics
from strop.tracking.metrics_tail import CHUNK, MetricsTail


def line(step: int, kind: str = "train", **metrics: float | None) -> bytes:
    return json.dumps({"step": step, "time": step / 2, "kind": kind, "metrics": metrics}).encode() + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(tail: MetricsTail, name: str = "loss") -> list[int]:
    tail.poll()
    return tail.column("train", name)[0]


def test_what_was_read_is_not_read_again(path: Path) -> None:
    tail = MetricsTail(path)
    assert steps(tail) == []
    for step in range(1, 200):
        with path.open("ab") as file:
            file.write(line(step, loss=1.0))
        assert steps(tail) == list(range(1, step + 1))
        tail.poll()
    assert (tail.lines_read, tail.bytes_read) == (199, path.stat().st_size)


def test_a_line_counts_when_it_is_ended(path: Path) -> None:
    whole = line(1, loss=1.0) + line(2, loss=2.0)
    tail = MetricsTail(path)
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end]) if end == 0 else path.open("ab").write(whole[end - 1 : end])
        assert steps(tail) == list(range(1, whole[:end].count(b"\n") + 1))


def test_metrics_that_come_later_are_missing_before(path: Path) -> None:
    path.write_bytes(line(1, a=1.0) + line(2, b=2.0) + line(2, "eval", c=3.0) + line(3, a=None, b=3.0))
    news = MetricsTail(path).news("", ["a", "b", "c", "d"])
    found = json.loads(json.dumps(news.kinds).replace("NaN", "null"))
    assert found == {
        "train": [[1, 2, 3], [0.5, 1.0, 1.5], {"a": [1.0, None, None], "b": [None, 2.0, 3.0]}],
        "eval": [[2], [1.0], {"c": [3.0]}],
    }


def test_it_is_what_the_reader_reads(path: Path) -> None:
    writer = MetricsWriter(path)
    for step in range(1, 20):
        writer.log(step, {"loss": 1 / step, "odd": float("nan") if step % 2 else 1.0})
        writer.log(step, {"eval/loss": 2 / step}, kind="eval")
    writer.close()
    tail = MetricsTail(path)
    tail.poll()
    for record in read_metrics(path):
        known = {name: value for name, value in record.metrics.items() if value == value}
        assert tail.line(record.kind, record.step) == (record.time, known)


def test_a_cut_a_new_and_a_rewritten_file_are_read_anew(path: Path) -> None:
    path.write_bytes(b"".join(line(step, loss=1.0) for step in range(1, 6)))
    tail = MetricsTail(path)
    before = tail.news("", ["loss"]).cursor
    path.write_bytes(line(1, loss=1.0))  # Cut.
    assert (steps(tail), tail.news(before, ["loss"]).reset) == ([1], True)
    other = path.with_name("other")
    other.write_bytes(line(1, loss=1.0) + line(2, loss=9.0))
    other.replace(path)  # Another file, as after a resume.
    assert steps(tail) == [1, 2]
    path.write_bytes(line(1, loss=1.0) + line(2, loss=8.0) + line(3, loss=8.0))  # Longer, and not what it was.
    assert steps(tail) == [1, 2, 3]
    assert tail.column("train", "loss")[1] == [1.0, 8.0, 8.0]
    path.unlink()
    assert steps(tail) == []
    path.write_bytes(line(7, loss=1.0))
    assert steps(tail) == [7]


def test_lines_longer_than_what_is_read_at_once(path: Path) -> None:
    metrics = {f"metric/{number:06d}": float(number) for number in range(CHUNK // 20)}
    path.write_bytes(line(1, **metrics) * 3)
    assert path.stat().st_size > 3 * CHUNK
    assert steps(MetricsTail(path), "metric/000007") == [1, 1, 1]


def test_a_file_without_ends_of_lines_is_not_held_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_tail, "LONGEST", 2 * CHUNK)
    path.write_bytes(line(1, loss=1.0) + bytes(10 * CHUNK))
    tail = MetricsTail(path)
    assert steps(tail) == [1]
    assert tail.bytes_read < 5 * CHUNK


def test_only_what_is_asked_for_is_kept(path: Path) -> None:
    path.write_bytes(line(1, loss=1.0, other=2.0) + line(2, other=2.0) + line(3, loss=3.0))
    tail = MetricsTail(path, only=["loss"])
    assert steps(tail) == [1, 2, 3]
    assert tail.names() == {"train": ["loss"]}
    assert tail.line("train", 2) == (1.0, {})
    assert tail.line("train", 3) == (1.5, {"loss": 3.0})


def test_threads_that_ask_at_once_see_each_line_once(path: Path) -> None:
    path.write_bytes(b"")
    tail = MetricsTail(path)
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            tail.news("", ["loss"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    writer = MetricsWriter(path)
    for step in range(1, 300):
        writer.log(step, {"loss": 1.0})
    writer.close()
    done.set()
    for thread in threads:
        thread.join()
    assert steps(tail) == list(range(1, 300))
    assert tail.lines_read == 299
