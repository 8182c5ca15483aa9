"""`timeline.jsonl` as a file that survives kills and full disks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from strop.tracking.timeline import Span, StepTimeline, TimelineWriter, joined, read_step, read_timeline


def line(step: int, *spans: Span) -> StepTimeline:
    return StepTimeline(step, 1000.0 + step, 2.0, spans or (Span("training", "trainer", 0.5, 1.0),))


def write(path: Path, *steps: int) -> None:
    writer = TimelineWriter(path)
    for step in steps:
        writer.log(line(step))
    writer.close()


def test_lines_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    spans = (Span("sampling", "engine 1", -0.25, 0.75), Span("training", "trainer", 0.5, 1.0))
    writer = TimelineWriter(path)
    writer.log(line(1))
    writer.log(line(12, *spans))
    assert read_timeline(path) == [line(1), line(12, *spans)]
    assert read_step(path, 12) == line(12, *spans)
    assert read_step(path, 2) is None
    assert json.loads(path.read_text().splitlines()[1])["spans"][0] == ["sampling", "engine 1", -0.25, 0.75]


def test_steps_after_a_checkpoint_and_torn_lines_go(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    write(path, 1, 2, 3)
    with path.open("ab") as file:
        file.write(b'{"step": 4, "ti')
    writer = TimelineWriter(path)
    assert [one.step for one in read_timeline(path)] == [1, 2, 3]
    writer.truncate_after(2)
    writer.log(line(3))
    writer.close()
    assert [one.step for one in read_timeline(path)] == [1, 2, 3]
    assert len(path.read_bytes().splitlines()) == 3


def test_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    writer = TimelineWriter(path)
    for seconds in (1.0, 3.0):
        writer.log(StepTimeline(1, 5.0, seconds, ()))
    found = read_step(path, 1)
    assert found is not None
    assert found.seconds == 3.0


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1, "time": 1, "seconds": NaN, "spans": []}',
        '{"step": 1, "time": 1, "seconds": 1, "spans": [["a", "b", 1]]}',
        '{"step": 1, "time": 1, "seconds": 1, "spans": 4}',
        '{"step": 1, "time": 1e999, "seconds": 1, "spans": []}',
        '{"step": 1, ' + "[" * 100_000,
    ],
)
def test_what_is_no_timeline_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text(text + "\n")
    assert read_step(path, 1) is None
    assert read_timeline(path) == []


def test_spans_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"step": 1, "time": 1, "seconds": 1, "spans": [["a", "b", NaN, 1], ["c", "d", 0, 1]]}\n')
    found = read_step(path, 1)
    assert found is not None
    assert [span.phase for span in found.spans] == ["c"]


FULL = """
import resource, signal, sys
from pathlib import Path
from strop.tracking.timeline import Span, StepTimeline, TimelineWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
said = []
writer = TimelineWriter(Path(sys.argv[1]), warn=said.append)
for step in range(100):
    writer.log(StepTimeline(step, 0.0, 1.0, (Span("training", "trainer", 0.0, 1.0),)))
print(len(said), said[0])
"""


def test_a_full_disk_costs_one_warning_and_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files is met by a write as a full disk is."""
    path = tmp_path / "timeline.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 the timeline of steps cannot be written: ")
    assert 1 < len(read_timeline(path)) == len(path.read_bytes().splitlines()) < 100
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_a_file_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    writer = TimelineWriter(tmp_path / "nowhere" / "timeline.jsonl", warn=said.append)
    writer.log(line(1))
    writer.truncate_after(0)
    writer.close()
    assert len(said) == 1
    assert os.listdir(tmp_path) == []


def test_what_spans_cover_together() -> None:
    assert joined([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert joined([]) == []
