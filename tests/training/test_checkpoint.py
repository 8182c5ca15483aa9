"""Checkpoints: whole or not at all, whatever happens while one is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.errors import RunFailure
from strop.training import checkpoint
from strop.training.checkpoint import (
    best_checkpoints,
    latest_checkpoint,
    point_best,
    read_state,
    save_checkpoint,
)


def writer(step: int, size: int = 1000) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "model").mkdir()
        save_file({"w": torch.full((size,), float(step))}, folder / "model" / "weights.safetensors")
        return {"step": step, "cursor": {"row": 10 * step}}

    return write


def holds(folder: Path, step: int) -> bool:
    """Whether `latest` is the whole checkpoint of a step."""
    found = latest_checkpoint(folder)
    assert found is not None
    values = load_file(found / "model" / "weights.safetensors")["w"]
    return found.name == f"step-{step:06d}" and read_state(found)["step"] == step and bool((values == step).all())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert latest_checkpoint(folder) is None
    path = save_checkpoint(folder, 7, writer(7), keep=2)
    assert path == folder / "step-000007"
    assert holds(folder, 7)
    assert read_state(path) == {"step": 7, "cursor": {"row": 70}}
    assert names(folder) == ["latest", "step-000007"]
    assert (folder / "latest").read_text() == "step-000007\n"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 999_999, 1_000_000):
        save_checkpoint(tmp_path, step, writer(step), keep=2)
    assert names(tmp_path) == ["latest", "step-1000000", "step-999999"]
    assert holds(tmp_path, 1_000_000)


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, step, writer(step), keep=2)
    # Somebody points `latest` at the older one, or the run died between the rename and the pointer.
    (tmp_path / "latest").write_text("step-000005\n")
    for step in (6, 7):
        save_checkpoint(tmp_path, step, writer(step), keep=1)
        assert holds(tmp_path, step)
    save_checkpoint(tmp_path, 10, writer(10), keep=1)
    assert names(tmp_path) == ["latest", "step-000010"]
    assert holds(tmp_path, 10)


def test_the_same_step_again_leaves_the_latest_alone_and_replaces_what_nothing_points_at(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, writer(3), keep=2)
    save_checkpoint(tmp_path, 4, writer(4), keep=2)
    assert (
        save_checkpoint(tmp_path, 4, failing_write(RuntimeError("written again")), keep=2) == tmp_path / "step-000004"
    )
    assert holds(tmp_path, 4)
    (tmp_path / "latest").write_text("step-000003\n")
    (tmp_path / "step-000004" / "model" / "weights.safetensors").unlink()
    save_checkpoint(tmp_path, 4, writer(4), keep=2)
    assert holds(tmp_path, 4)
    assert names(tmp_path) == ["latest", "step-000003", "step-000004"]


def failing_write(error: BaseException) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        writer(2)(folder)
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the model would not move"),
        OSError(errno.ENOSPC, "No space left on device"),
        RunFailure("the model could not be written: No space left on device"),
    ],
    ids=["other", "full", "wrapped"],
)
def test_a_failing_writer_leaves_the_old_checkpoint(tmp_path: Path, error: Exception) -> None:
    save_checkpoint(tmp_path, 1, writer(1), keep=1)
    with pytest.raises(RunFailure) as caught:
        save_checkpoint(tmp_path, 2, failing_write(error), keep=1)
    full = "No space" in str(error)
    assert ("the disk is full" in caught.value.what) == full
    assert ("free some space" in caught.value.mend) == full
    assert caught.value.__cause__ is error
    assert holds(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-000001"]
    save_checkpoint(tmp_path, 2, writer(2), keep=1)
    assert holds(tmp_path, 2)


@pytest.mark.parametrize("place", ["state", "flush", "rename", "pointer", "replace"])
def test_a_failure_of_the_disk_anywhere_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save_checkpoint(tmp_path, 1, writer(1), keep=1)
    full = OSError(errno.ENOSPC, "No space left on device")
    write_text, replace, flush = Path.write_text, Path.replace, checkpoint.sync_path

    def failing(original: Any, when: Callable[[Path], bool]) -> Any:
        def call(path: Path, *args: Any, **kwargs: Any) -> Any:
            if when(path):
                raise full
            return original(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if place == "state":
            patch.setattr(Path, "write_text", failing(write_text, lambda path: path.name == "state.json"))
        elif place == "flush":
            patch.setattr(checkpoint, "sync_path", failing(flush, lambda path: path.suffix == ".safetensors"))
        elif place == "rename":
            patch.setattr(Path, "rename", failing(Path.rename, lambda path: True))
        elif place == "pointer":
            patch.setattr(Path, "write_text", failing(write_text, lambda path: "latest" in path.name))
        else:
            patch.setattr(Path, "replace", failing(replace, lambda path: True))
        with pytest.raises(RunFailure, match="the disk is full"):
            save_checkpoint(tmp_path, 2, writer(2), keep=1)
    assert holds(tmp_path, 1)
    assert not [name for name in names(tmp_path) if "000002" in name], "it takes the space that is lacking"
    save_checkpoint(tmp_path, 2, writer(2), keep=1)
    assert holds(tmp_path, 2)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A real file system of one mebibyte."""
    folder = Path("/tmp") / f"strop-small-disk-{os.getpid()}"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        if mounted.returncode != 0:
            pytest.skip("needs the right to mount a tmpfs")
        yield folder
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.skipif(shutil.which("mount") is None or not sys.platform.startswith("linux"), reason="mounts a tmpfs")
def test_a_full_disk_leaves_the_old_checkpoint(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    save_checkpoint(folder, 1, writer(1, size=100_000), keep=1)
    with pytest.raises(RunFailure, match="the disk is full") as caught:
        save_checkpoint(folder, 2, writer(2, size=200_000), keep=1)
    assert "free some space" in caught.value.mend
    assert holds(folder, 1)
    assert names(folder) == ["latest", "step-000001"]
    save_checkpoint(folder, 2, writer(2, size=100_000), keep=1)
    assert holds(folder, 2)


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from strop.training import checkpoint

    place, folder = sys.argv[1], Path(sys.argv[2])

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def write(target):
        (target / "big").write_bytes(b"x" * 100_000)
        if place == "write":
            die()
        return {"step": 2}

    if place == "flush":
        checkpoint.sync_path = die
    elif place == "rename":
        Path.rename = die
    elif place == "pointer":
        checkpoint._point = die
    elif place == "replace":
        Path.replace = die
    elif place == "prune":
        checkpoint._all = die
    checkpoint.save_checkpoint(folder, 2, write, keep=1)
""")


@pytest.mark.parametrize("place", ["write", "flush", "rename", "pointer", "replace", "prune"])
def test_kill_9_while_writing_leaves_a_whole_checkpoint(tmp_path: Path, place: str) -> None:
    save_checkpoint(tmp_path, 1, writer(1), keep=1)
    done = subprocess.run([sys.executable, "-c", KILLED, place, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    if place == "prune":
        assert read_state(tmp_path / "step-000002") == {"step": 2}
        assert (tmp_path / "latest").read_text() == "step-000002\n"
    else:
        assert holds(tmp_path, 1)
    # The next one is then written over what was left.
    step = 3 if place == "prune" else 2
    save_checkpoint(tmp_path, step, writer(step), keep=1)
    assert holds(tmp_path, step)
    assert names(tmp_path) == ["latest", f"step-{step:06d}"]


def test_what_an_earlier_death_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".step-000002.partial" / "model"
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, 3, writer(3), keep=1)
    assert names(tmp_path) == ["latest", "step-000003"]


@pytest.mark.parametrize("damage", ["missing", "incomplete"])
def test_a_pointer_to_what_is_not_there_says_what_is(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, writer(step), keep=2)
    if damage == "missing":
        shutil.rmtree(tmp_path / "step-000002")
    else:
        (tmp_path / "step-000002" / "state" / "state.json").unlink()
    with pytest.raises(RunFailure, match="step-000002") as caught:
        latest_checkpoint(tmp_path)
    assert "step-000001" in caught.value.mend
    # The mend works.
    (tmp_path / "latest").write_text("step-000001")
    assert holds(tmp_path, 1)
    shutil.rmtree(tmp_path / "step-000001")
    shutil.rmtree(tmp_path / "step-000002", ignore_errors=True)
    with pytest.raises(RunFailure) as caught:
        latest_checkpoint(tmp_path)
    assert "--fresh" in caught.value.mend


def test_state_that_is_not_json_is_a_failure_that_leaves_the_old_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, writer(1), keep=1)
    with pytest.raises(RunFailure, match="not JSON serializable"):
        save_checkpoint(tmp_path, 2, lambda _: {"bad": object()}, keep=1)
    assert holds(tmp_path, 1)
    assert json.loads((tmp_path / "step-000001" / "state" / "state.json").read_text())["step"] == 1


# --- the best ------------------------------------------------------------------------------------------------------


def test_the_best_stay_beside_the_newest_and_the_pointer_names_the_first(tmp_path: Path) -> None:
    ranking: list[int] = []
    for step, place in ((1, 0), (2, 0), (3, 2), (4, 1), (5, 4)):
        ranking.insert(place, step)
        save_checkpoint(tmp_path, step, writer(step), keep=1, ranking=ranking, keep_best=2)
    assert ranking == [2, 4, 1, 3, 5]
    assert names(tmp_path) == ["best", "latest", "step-000002", "step-000004", "step-000005"]
    assert (tmp_path / "best").read_text() == "step-000002\n"
    assert holds(tmp_path, 5)
    assert best_checkpoints(tmp_path, ranking, 9) == [2, 4, 5]
    # One that is asked for no longer is pruned with the others, and the pointer never names what is not there.
    save_checkpoint(tmp_path, 6, writer(6), keep=1)
    assert names(tmp_path) == ["latest", "step-000006"]


def test_a_step_that_is_to_be_saved_counts_among_those_that_are(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, writer(1), keep=1, ranking=[1], keep_best=1)
    assert best_checkpoints(tmp_path, [2, 1], 1) == [1]
    assert best_checkpoints(tmp_path, [2, 1], 1, planned=2) == [2]
    assert best_checkpoints(tmp_path, [1, 2], 1, planned=2) == [1]


def test_a_pointer_to_the_best_that_cannot_be_written_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, writer(1), keep=1, ranking=[1], keep_best=1)
    real = checkpoint._point

    def failing(folder: Path, name: str, pointer: str) -> None:
        if pointer == "best":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, name, pointer)

    monkeypatch.setattr(checkpoint, "_point", failing)
    with pytest.raises(RunFailure, match="the disk is full"):
        save_checkpoint(tmp_path, 2, writer(2), keep=1, ranking=[2, 1], keep_best=1)
    assert holds(tmp_path, 2)
    assert names(tmp_path) == ["best", "latest", "step-000001", "step-000002"]
    monkeypatch.undo()
    assert point_best(tmp_path, [2, 1], 1) == [2]
    assert (tmp_path / "best").read_text() == "step-000002\n"
