"""What `strop runs` says, read from real run folders."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from strop.errors import UserError
from strop.tracking.metrics import MetricsWriter
from strop.tracking.run_directory import RunDirectory
from strop.tracking.runs import list_runs, print_runs, show_run


def make_run(folder: Path, name: str, *, steps: int = 3) -> RunDirectory:
    run = RunDirectory.create(
        folder, name, config_yaml="a: 1\n", steps=10, config_hash="cafe", model={"path": "tiny"}, seeds={"run": 5}
    )
    writer = MetricsWriter(run.metrics_path)
    writer.log(9, {"loss": 0.5}, kind="warmup")
    writer.log(0, {"accuracy": 0.25}, kind="eval")
    for step in range(1, steps + 1):
        writer.log(step, {"reward/mean": step / 10, "accuracy": step / 20, "loss": float("nan")})
    writer.log(2, {"accuracy": 0.875}, kind="eval")
    writer.log(steps, {"accuracy": 0.75}, kind="eval")
    writer.close()
    return run


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nothing") == []
    (tmp_path / "notes").mkdir()
    (tmp_path / ".quick.new-abc").mkdir()
    (tmp_path / ".quick.new-abc" / "run.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("[]")
    assert list_runs(tmp_path) == []


def test_runs_with_their_last_step_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path, "old").close()
    make_run(tmp_path, "failed").close("failed", error="boom")
    running = make_run(tmp_path, "running", steps=4)
    runs = list_runs(tmp_path)
    assert [run.name for run in runs] == ["running", "failed", "old"]
    assert [run.status for run in runs] == ["running", "failed", "finished"]
    newest = runs[0]
    assert (newest.step, newest.steps, newest.reward, newest.accuracy) == (4, 10, 0.4, 0.2)
    running.close()


def test_a_run_whose_process_is_gone_is_interrupted(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom strop.tracking.run_directory import RunDirectory\n"
        f"RunDirectory.create({str(tmp_path)!r}, 'gone', config_yaml='')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    (run,) = list_runs(tmp_path)
    assert (run.status, run.step, run.reward) == ("interrupted", 0, None)
    assert "gone: interrupted, step 0 of 0" in show_run(run.path)


def test_time_worked_leaves_pauses_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "paused", config_yaml="")
    run.update(created="2030-01-01T00:00:00+00:00", resumed=["2030-01-02T00:00:00+00:00"])
    start = 1893456000.0
    times = iter([start + 10, start + 60, start + 86400 + 5, start + 86400 + 30])
    writer = MetricsWriter(run.metrics_path, clock=lambda: next(times))
    for step in range(1, 5):
        writer.log(step, {})
    writer.close()
    run._lock.release()  # type: ignore[union-attr]  # as if the process were gone
    (info,) = list_runs(tmp_path)
    assert (info.status, info.seconds) == ("interrupted", 90.0)


def test_the_table(tmp_path: Path) -> None:
    make_run(tmp_path, "quick").close()
    console = Console(file=io.StringIO(), width=80)
    print_runs(list_runs(tmp_path), console)
    print_runs([], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    header, row, empty = text.splitlines()
    assert header.split() == ["run", "status", "step", "reward", "accuracy", "started", "time"]
    assert row.split()[:6] == ["quick", "finished", "3/10", "0.300", "15.0", "%"]
    assert "strop train" in empty


def test_a_long_name_and_markup_in_the_table(tmp_path: Path) -> None:
    make_run(tmp_path, "[red]" + "x" * 60).close()
    console = Console(file=io.StringIO(), width=200)
    print_runs(list_runs(tmp_path), console)
    assert "[red]" + "x" * 60 in console.file.getvalue()  # type: ignore[attr-defined]


def test_everything_about_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs", "quick")
    checkpoint = run.checkpoints_folder / "step-000003"
    checkpoint.mkdir(parents=True)
    (run.checkpoints_folder / "latest").write_text("step-000003")
    run.close("failed", error="the verifier is broken")
    RunDirectory.open(run.path).close()
    monkeypatch.chdir(tmp_path)
    text = show_run("runs/quick")
    for part in (
        "quick: finished, step 3 of 10",
        "resumed",
        "path tiny",
        "run 5",
        "torch ",
        "evaluation (step 0 → 3)",
        "25.0 % → 75.0 % (+50.0)",
        "accuracy 87.5 % at step 2",
        "▁▅█",
        "0.100 to 0.300",
        "runs/quick/checkpoints/step-000003/model",
        "strop sample runs/quick",
    ):
        assert part in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_wrong_name_gets_the_nearest(tmp_path: Path) -> None:
    make_run(tmp_path, "quickstart").close()
    with pytest.raises(UserError) as caught:
        show_run(tmp_path / "quikstart")
    assert str(tmp_path / "quickstart") in caught.value.mend


def test_a_manifest_with_a_broken_date_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "quick")
    run.manifest = dataclasses.replace(run.manifest, created="yesterday")
    run.close()
    with pytest.raises(UserError, match="manifest cannot be read"):
        show_run(run.path)
    assert list_runs(tmp_path) == []
