"""Real folders and real processes: names, manifest, lock, how runs end."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strop.errors import RunFailure, UserError
from strop.tracking.atomic import replacing, write_text_atomically
from strop.tracking.run_directory import RunDirectory, latest_checkpoint, read_manifest, status_of
from strop.tracking.run_lock import is_locked
from strop.tracking.system import git_state, memory_bytes, versions


def create(folder: Path, name: str = "quick", **more: Any) -> RunDirectory:
    return RunDirectory.create(folder, name, config_yaml="run: {steps: 3}\n", **more)


def start_holder(folder: Path, code: str = "") -> subprocess.Popen[str]:
    """A process that creates the run `quick`, says so, runs `code`, and stays until its standard input is closed."""
    program = (
        "import sys, os, time\n"
        "from strop.tracking.run_directory import RunDirectory\n"
        f"run = RunDirectory.create({str(folder)!r}, 'quick', config_yaml='a: 1\\n')\n"
        "print('ready', flush=True)\n"
        f"{code}\n"
        "sys.stdin.read()\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_names_count_up_and_latest_is_the_highest(tmp_path: Path) -> None:
    assert RunDirectory.latest(tmp_path / "runs", "quick") is None
    runs = [create(tmp_path / "runs") for _ in range(3)]
    assert [run.path.name for run in runs] == ["quick", "quick-2", "quick-3"]
    assert [run.manifest.name for run in runs] == ["quick", "quick-2", "quick-3"]
    shutil.rmtree(runs[1].path)
    fourth = create(tmp_path / "runs")
    assert fourth.path.name == "quick-4"
    assert RunDirectory.latest(tmp_path / "runs", "quick") == fourth.path


def test_other_names_and_copies_are_not_of_the_series(tmp_path: Path) -> None:
    first = create(tmp_path, "quick")
    create(tmp_path, "quick-2")  # a run whose own name is "quick-2"
    create(tmp_path, "quickest")
    shutil.copytree(first.path, tmp_path / "quick-backup")
    (tmp_path / "quick-3").mkdir()  # somebody's folder, empty
    assert RunDirectory.latest(tmp_path, "quick") == first.path
    assert create(tmp_path, "quick").path.name == "quick-4"


def test_names_with_glob_characters(tmp_path: Path) -> None:
    run = create(tmp_path, "a[b]*c")
    assert RunDirectory.latest(tmp_path, "a[b]*c") == run.path


def test_manifest_and_config_are_there_and_nothing_else(tmp_path: Path) -> None:
    run = create(
        tmp_path,
        steps=7,
        config_hash="abc",
        seeds={"run": 3},
        data={"train": "f00d"},
        model={"path": "m", "hash": "h"},
        command=["strop", "train", "quick.yaml"],
        parent="runs/base",
    )
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "run.json", "run.lock"]
    assert [path.name for path in tmp_path.iterdir()] == ["quick"]
    assert run.config_path.read_text() == "run: {steps: 3}\n"
    values = json.loads((run.path / "run.json").read_text())
    assert values["status"] == "running"
    assert (values["steps"], values["config_hash"], values["seeds"]) == (7, "abc", {"run": 3})
    assert (values["data"], values["model"]["hash"], values["parent"]) == ({"train": "f00d"}, "h", "runs/base")
    assert values["command"] == ["strop", "train", "quick.yaml"]
    assert values["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(values["versions"]) >= {"strop", "torch", "transformers"}
    assert values["platform"]["cpus"] >= 1
    assert read_manifest(run.path) == run.manifest


def test_a_folder_that_cannot_be_made_is_a_user_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        create(tmp_path / "file" / "runs")
    assert "run.folder" in caught.value.mend
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_while_creating_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("strop.tracking.run_directory.git_state", broken)
    with pytest.raises(RuntimeError, match="boom"):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_creating_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strop.tracking.run_directory.write_text_atomically", full)
    with pytest.raises(UserError, match="No space left on device"):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_cannot_train_the_same_run(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    assert hear(holder) == "ready"
    try:
        path = RunDirectory.latest(tmp_path, "quick")
        assert path is not None
        assert is_locked(path)
        assert status_of(path, read_manifest(path)) == "running"
        with pytest.raises(UserError) as caught:
            RunDirectory.open(path)
        assert f"process {holder.pid}" in caught.value.what
        assert "--fresh" in caught.value.mend
        assert read_manifest(path).resumed == []  # the refused process wrote nothing
    finally:
        kill(holder)


def test_a_killed_run_is_interrupted_and_can_be_opened_again(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    assert hear(holder) == "ready"
    kill(holder)
    path = tmp_path / "quick"
    assert read_manifest(path).status == "running"
    assert status_of(path, read_manifest(path)) == "interrupted"
    with RunDirectory.open(path) as run:
        assert status_of(path, run.manifest) == "running"
        assert len(run.manifest.resumed) == 1
    assert read_manifest(path).status == "finished"
    assert not is_locked(path)


def test_a_forked_worker_that_outlives_the_trainer_does_not_keep_the_lock(tmp_path: Path) -> None:
    fork = "child = os.fork()\nif child == 0: os.close(1); time.sleep(60); os._exit(0)\nprint(child, flush=True)"
    process = start_holder(tmp_path, fork)
    assert hear(process) == "ready"
    child = int(hear(process))
    try:
        kill(process)
        os.kill(child, 0)  # still there
        RunDirectory.open(tmp_path / "quick").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_look_at_the_lock_does_not_stop_a_run_from_starting(tmp_path: Path) -> None:
    import fcntl
    import threading

    create(tmp_path).close()
    look = os.open(tmp_path / "quick" / "run.lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [look]).start()
    RunDirectory.open(tmp_path / "quick").close()


def test_creators_at_the_same_time_get_different_runs(tmp_path: Path) -> None:
    holders = [start_holder(tmp_path) for _ in range(3)]
    assert [hear(holder) for holder in holders] == ["ready"] * 3
    for holder in holders:
        kill(holder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quick", "quick-2", "quick-3"]


def test_a_name_taken_between_looking_and_renaming_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def rival(source: Path, target: Path) -> None:
        if target.name == "quick":
            target.mkdir()
            (target / "theirs").write_text("precious")
        rename(source, target)

    monkeypatch.setattr(os, "rename", rival)
    run = create(tmp_path)
    assert run.path.name == "quick-2"
    assert read_manifest(run.path).name == "quick-2"
    assert [path.name for path in (tmp_path / "quick").iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (None, "finished", ""),
        (KeyboardInterrupt(), "interrupted", ""),
        (RunFailure("the verifier is broken", where="x"), "failed", "the verifier is broken"),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
    ],
)
def test_the_manifest_says_how_a_run_ended(
    tmp_path: Path, error: BaseException | None, status: str, reason: str
) -> None:
    def run() -> None:
        with create(tmp_path):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    manifest = read_manifest(tmp_path / "quick")
    assert (manifest.status, manifest.error) == (status, reason)
    assert manifest.ended is not None
    assert manifest.ended >= manifest.created


def test_a_manifest_that_cannot_be_written_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        with create(tmp_path):
            monkeypatch.setattr("strop.tracking.run_directory.write_text_atomically", full)
            raise ValueError("the first")

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="the first") as caught:
        fail()
    assert "No space left" in caught.value.__notes__[0]
    assert not is_locked(tmp_path / "quick")


def test_open_and_manifest_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in this folder"):
        RunDirectory.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    run = create(tmp_path)
    run.close()
    (run.path / "run.json").write_text("{broken")
    with pytest.raises(UserError, match="cannot be read") as caught:
        read_manifest(run.path)
    assert caught.value.where.endswith("run.json")


def test_a_folder_that_is_a_lock_is_named(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.close()
    (run.path / "run.lock").unlink()
    (run.path / "run.lock").mkdir()
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        RunDirectory.open(run.path)


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    run = create(tmp_path)
    values = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**values, "from_the_future": 1}))
    assert read_manifest(run.path) == run.manifest


def test_the_latest_checkpoint_needs_its_folder(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert latest_checkpoint(run.path) is None
    folder = run.checkpoints_folder / "step-000004"
    folder.mkdir(parents=True)
    (run.checkpoints_folder / "latest").write_text("step-000004\n")
    assert latest_checkpoint(run.path) == folder
    folder.rmdir()
    assert latest_checkpoint(run.path) is None


def test_a_config_can_be_replaced_on_resume(tmp_path: Path) -> None:
    run = create(tmp_path, steps=3)
    inputs = {"model.path": {"path": "m", "fingerprint": "f"}}
    run.write_config("run: {steps: 9}\n", config_hash="new", steps=9, inputs=inputs)
    assert read_manifest(run.path).steps == 9
    assert run.config_path.read_text() == "run: {steps: 9}\n"


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    write_text_atomically(path, "old")
    program = (
        "import os, signal, pathlib\nfrom strop.tracking.atomic import replacing\n"
        f"with replacing(pathlib.Path({str(path)!r})) as temporary:\n"
        "    temporary.write_text('half of the n'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2  # the torn temporary file is there …
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1  # … until the next write


def test_an_error_in_a_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    write_text_atomically(path, "old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("small.json", "old")]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    settings = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], [*settings, "commit", "-qm", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    changed = git_state(tmp_path)
    assert changed == {"commit": state["commit"], "dirty": True}


def test_memory_follows_what_is_held() -> None:
    before = memory_bytes()["process"]
    # A mapping of its own: the heap of a long test run has room that is counted already.
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(os.urandom(1 << 20) * 64)
        assert memory_bytes()["process"] - before > len(block) // 2


def test_reading_runs_needs_no_heavy_imports() -> None:
    program = (
        "import sys\nimport strop.tracking.runs, strop.tracking.display\n"
        "import strop.tracking.episodes, strop.tracking.trackers\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert versions()["torch"] != ""


def test_times_sort_as_text() -> None:
    from strop.tracking.run_directory import now

    first = now()
    time.sleep(0.002)
    assert first < now()
