"""`metrics.jsonl` as a file that survives kills, and the fan-out."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.config.run import TrackingSettings
from strop.errors import MissingExtra, RunFailure, UserError
from strop.tracking.metrics import MetricsRecord, MetricsWriter, read_metrics
from strop.tracking.run_directory import RunDirectory
from strop.tracking.trackers import TensorBoard, check_trackers, flattened, open_trackers


class Recorder:
    """A sink that keeps what it gets, and fails at the steps it is told to."""

    name = "recorder"

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.got: list[tuple[int, str, dict[str, float]]] = []
        self.failing = failing
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float], kind: str) -> None:
        if step in self.failing:
            raise ConnectionError(f"gone at {step}")
        self.got.append((step, kind, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def positions(path: Path) -> list[tuple[str, int]]:
    return [(record.kind, record.step) for record in read_metrics(path)]


def write_run(path: Path, *, steps: int, warmup: int = 0) -> None:
    """A run of the usual order: warm-up, evaluation, steps with an evaluation after each second one."""
    writer = MetricsWriter(path)
    for step in range(1, warmup + 1):
        writer.log(step, {"loss": 1 / step}, kind="warmup")
    writer.log(0, {"accuracy": 0.1}, kind="eval")
    for step in range(1, steps + 1):
        writer.log(step, {"reward/mean": step / 10})
        if step % 2 == 0:
            writer.log(step, {"accuracy": step / 10}, kind="eval")
    writer.close()


def test_lines_are_strict_json_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, clock=lambda: 12.0)
    writer.log(
        1, {"a": 0.5, "count": 3, "nan": math.nan, "inf": math.inf, "t": torch.tensor(2.0), "n": np.float32(1.5)}
    )
    writer.log(2, {}, kind="eval")
    writer.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "step": 1,
        "time": 12.0,
        "kind": "train",
        "metrics": {"a": 0.5, "count": 3, "nan": None, "inf": None, "t": 2.0, "n": 1.5},
    }
    first, second = read_metrics(path)
    assert math.isnan(first.metrics["nan"])
    assert second == MetricsRecord(2, 12.0, "eval", {})
    assert read_metrics(path, kind="eval") == [second]


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.log(1, {"a": 1.0})
    assert positions(tmp_path / "m.jsonl") == [("train", 1)]


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**53), 2**53)))
def test_any_numbers_under_any_names(metrics: dict[str, float]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        writer = MetricsWriter(Path(folder) / "m.jsonl")
        writer.log(1, metrics)
        (record,) = read_metrics(Path(folder) / "m.jsonl")
        writer.close()
    assert list(record.metrics) == list(metrics)
    for name, value in metrics.items():
        if math.isfinite(value):
            assert record.metrics[name] == value
        else:
            assert math.isnan(record.metrics[name])


def test_what_is_not_a_number_is_named_and_writes_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="'text' is 'three'"):
        writer.log(1, {"good": 1.0, "text": "three"})
    assert (tmp_path / "m.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "ti', b'{"step": 3, "time": 1, "kind": "train", "metrics": {}}', b"x" * 200_000]
)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    write_run(path, steps=2)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert positions(path) == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    writer = MetricsWriter(path)
    assert path.read_bytes() == whole
    writer.log(3, {})
    writer.close()
    assert positions(path)[-1] == ("train", 3)


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step"')
    MetricsWriter(path).close()
    assert path.read_bytes() == b""


def test_resume_drops_what_came_later(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_run(path, steps=5, warmup=8)
    warmup = [("warmup", step) for step in range(1, 9)]
    writer = MetricsWriter(path)
    writer.truncate_after(3)
    kept = [*warmup, ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3)]
    assert positions(path) == kept
    writer.log(4, {})
    assert positions(path) == [*kept, ("train", 4)]
    writer.truncate_after(0)
    assert positions(path) == [*warmup, ("eval", 0)]
    writer.truncate_after(6, kind="warmup")
    assert positions(path) == warmup[:6]
    writer.close()


def test_resume_in_the_middle_of_the_warmup_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_run(path, steps=2, warmup=4)
    writer = MetricsWriter(path)
    writer.truncate_after(4, kind="warmup")
    assert [kind for kind, _ in positions(path)] == ["warmup"] * 4 + ["eval"]


def test_a_broken_line_in_the_middle_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_run(path, steps=2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0\0\0\n", b'{"step": 1}\n', *lines[1:]]))
    expected = [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    assert positions(path) == expected
    MetricsWriter(path).truncate_after(2)
    assert path.read_bytes() == b"".join(lines)


def test_a_writer_killed_at_any_moment_loses_no_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    program = (
        "import pathlib\nfrom strop.tracking.metrics import MetricsWriter\n"
        f"writer = MetricsWriter(pathlib.Path({str(path)!r}))\n"
        "step = 0\nwhile True:\n    step += 1\n    writer.log(step, {'a': 0.5})\n    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(50):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0].splitlines()
    steps = [record.step for record in read_metrics(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= int(said[-1] if said else 50)


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    program = (
        "import pathlib, resource\nfrom strop.errors import RunFailure\n"
        "from strop.tracking.metrics import MetricsWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        f"writer = MetricsWriter(pathlib.Path({str(path)!r}))\n"
        "try:\n    for step in range(1, 100): writer.log(step, {'a': 0.5})\n"
        "except RunFailure as error:\n    print(error.block())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "the metrics cannot be written" in done.stdout
    assert str(path) in done.stdout
    assert path.read_bytes().endswith(b"\n")
    steps = [record.step for record in read_metrics(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert steps


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="Is a directory") as caught:
        MetricsWriter(tmp_path)
    assert caught.value.where == str(tmp_path)


def test_a_sink_that_does_not_close_is_told_and_the_others_close(tmp_path: Path) -> None:
    class Stuck(Recorder):
        def close(self) -> None:
            raise TimeoutError("no answer")

    fine, warnings = Recorder(), []
    MetricsWriter(tmp_path / "m.jsonl", [Stuck(), fine], warn=warnings.append).close()
    assert warnings == ["recorder did not close: TimeoutError: no answer"]
    assert fine.closed == 1


def test_sinks_get_finite_numbers_only(tmp_path: Path) -> None:
    sink = Recorder()
    writer = MetricsWriter(tmp_path / "m.jsonl", [sink])
    writer.log(1, {"a": 1.0, "b": math.nan}, kind="eval")
    writer.close()
    writer.close()
    assert sink.got == [(1, "eval", {"a": 1.0})]
    assert sink.closed == 1


def test_a_sink_that_fails_warns_and_is_switched_off_after_three_in_a_row(tmp_path: Path) -> None:
    flaky, gone, fine = Recorder((1, 2, 4, 5)), Recorder((2, 3, 4, 5)), Recorder()
    gone.name, fine.name = "gone", "fine"
    warnings: list[str] = []
    writer = MetricsWriter(tmp_path / "m.jsonl", [flaky, gone, fine], warn=warnings.append)
    for step in range(1, 7):
        writer.log(step, {"a": float(step)})
    assert [step for step, _, _ in flaky.got] == [3, 6]
    assert [step for step, _, _ in gone.got] == [1]
    assert [step for step, _, _ in fine.got] == [1, 2, 3, 4, 5, 6]
    assert len(read_metrics(tmp_path / "m.jsonl")) == 6
    assert any(text.startswith("gone is switched off") for text in warnings)
    assert not any(text.startswith("recorder is switched off") for text in warnings)
    assert "gone did not take the metrics of step 3: ConnectionError: gone at 3" in warnings


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "events")
    for step in range(1, 51):
        board.log(step, {"loss": 1.0}, "warmup")
    for step in range(1, 5):
        board.log(step, {"reward/mean": step / 10}, "train")
    board.log(4, {"accuracy": 0.4}, "eval")
    board.close()
    again = TensorBoard(tmp_path / "events", resumed_at=2)
    again.log(3, {"reward/mean": 0.9}, "train")
    again.close()
    seen = scalars(tmp_path / "events")
    assert seen["reward/mean"] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert seen.get("eval/accuracy", []) == []
    # The warm-up has steps of its own, and none of them is forgotten.
    assert len(scalars(tmp_path / "events" / "warmup")["warmup/loss"]) == 50


def test_tensorboard_gets_the_numbers_of_a_line_in_one_event(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    board = TensorBoard(tmp_path / "events")
    numbers = {f"part/{number}": number / 7 for number in range(30)}
    for step in (1, 2):
        board.log(step, numbers, "train")
    board.close()
    (file,) = (tmp_path / "events").iterdir()
    told = [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert [(event.step, len(event.summary.value)) for event in told] == [(1, 30), (2, 30)]
    expected = {name: [(1, round(value, 4)), (2, round(value, 4))] for name, value in numbers.items()}
    assert scalars(tmp_path / "events") == expected


def test_tensorboard_shows_what_was_logged_at_once(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "events", resumed_at=2)
    for step in range(3, 6):
        board.log(step, {"loss": float(step)}, "train")
        assert scalars(tmp_path / "events")["loss"][-1] == (step, float(step))
    board.close()


def make_run(folder: Path) -> RunDirectory:
    return RunDirectory.create(folder, "quick", config_yaml="a: 1\n")


def test_trackers_follow_the_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert open_trackers(TrackingSettings(tensorboard=False), run, config={}) == []
    (board,) = open_trackers(TrackingSettings(), run, config={})
    assert not run.events_folder.exists()  # nothing is written before there is something to write
    board.log(1, {"a": 1.0}, "train")
    board.close()
    assert scalars(run.events_folder) == {"a": [(1, 1.0)]}


@pytest.mark.parametrize(("key", "extra"), [("wandb_project", "wandb"), ("mlflow_uri", "mlflow")])
def test_a_missing_extra_is_named_at_once(key: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        check_trackers(TrackingSettings(**{key: "somewhere"}))
    assert f"strop[{extra}]" in caught.value.mend
    assert f"tracking.{key}" in caught.value.what


def test_a_server_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("strop.tracking.trackers.getproxies", dict)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UserError, match="does not answer") as caught:
            check_trackers(TrackingSettings(mlflow_uri=address))
    assert address in caught.value.where


def test_flattened() -> None:
    assert flattened({"a": {"b": {"c": 1}}, "d": [2]}) == {"a.b.c": 1, "d": [2]}


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path)
    settings = TrackingSettings(tensorboard=False, wandb_project="strop-test")
    for resumed_at in (None, 2):
        (sink,) = open_trackers(settings, run, config={"run": {"steps": 3}}, resumed_at=resumed_at)
        sink.log(3, {"a": 1.0}, "warmup")
        sink.log(1, {"a": 1.0}, "train")
        sink.close()
    assert all(run.manifest.id in path.name for path in (run.path / "wandb").glob("offline-run-*"))
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))


def test_mlflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = str(tmp_path / "mlruns")
    run = make_run(tmp_path)
    settings = TrackingSettings(tensorboard=False, mlflow_uri=uri)
    for steps, resumed_at in (((1, 2), None), ((3,), 2)):
        (sink,) = open_trackers(settings, run, config={"run": {"steps": 3}}, resumed_at=resumed_at)
        for step in steps:
            sink.log(step, {"reward/mean": step / 10, "odd (name)": 1.0}, "train")
        sink.close()
    client = MlflowClient(tracking_uri=uri)
    found = client.get_run(run.manifest.trackers["mlflow"])
    assert found.info.status == "FINISHED"
    assert found.data.params["run.steps"] == "3"
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.1), (2, 0.2), (3, 0.3)]
