"""Checkpoints that are written while training goes on: what is in them, what waits for them, and how they fail."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import HELD_OUT, recipe, steps_of

from strop.config.loading import load_config
from strop.errors import RunFailure
from strop.loops import base_run
from strop.loops.train import train
from strop.training import checkpoint
from strop.training.background import Background
from strop.training.single import SingleDeviceTrainer
from strop.training.snapshot import in_background

LONGEST = 60.0
SFT = {"supervised": {"method": "sft", "batch_size": 4}, "rewards": None, "rollout": None}
ADAPTIVE = {"rank": 4, "adaptive": {"target_rank": 2, "tinit": 1, "tfinal": 2, "delta_t": 2}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, *, behind: bool, **changes: Any) -> Path:
    data = recipe(
        **{"run.steps": 5, "run.name": name, "checkpoint": {"every": 2, "keep": 9, "in_background": behind}, **changes}
    )
    data = {section: values for section, values in data.items() if values is not None}
    return train(load_config(None, data=data)).folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checkpoints that are written behind begin only when another update has been done; the steps of those."""
    updated, behind = threading.Condition(), []
    counts = {"updates": 0}
    update, save = SingleDeviceTrainer.update, checkpoint.save_checkpoint

    def counting(self: SingleDeviceTrainer, *arguments: Any) -> dict[str, float]:
        found = update(self, *arguments)
        with updated:
            counts["updates"] += 1
            updated.notify_all()
        return found

    def late(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            behind.append(step)
            with updated:
                before = counts["updates"]
                assert updated.wait_for(lambda: counts["updates"] > before, LONGEST)
        return save(folder, step, *arguments, **options)

    monkeypatch.setattr(SingleDeviceTrainer, "update", counting)
    monkeypatch.setattr(base_run, "save_checkpoint", late)
    return behind


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"model.dtype": "bfloat16"}, id="with float32 masters"),
        pytest.param({"model.lora": {"rank": 4, "dropout": 0.1}}, id="with adapters"),
        pytest.param({"model.lora": ADAPTIVE}, id="with adaptive ranks"),
        pytest.param({"algorithm.name": "ppo"}, id="with a critic"),
        pytest.param({"algorithm.name": "ppo", "critic.shared": True}, id="with a value head"),
        pytest.param({"training.optimizer.name": "muon"}, id="with muon"),
        pytest.param({"data.curriculum": {}, "data.train.arguments.count": 8}, id="with a curriculum"),
        pytest.param({"data.eval": HELD_OUT, "evaluation.every": 1}, id="with evaluations"),
        pytest.param(SFT, id="of examples"),
    ],
)
def test_what_is_written_later_is_what_a_foreground_save_writes(changes: dict[str, Any], slow: list[int]) -> None:
    at_once = run("at-once", behind=False, **changes)
    assert slow == []
    later = run("later", behind=True, **changes)
    # The last one has nothing to be written behind.
    assert slow == [0, 2, 4]
    for step in (0, 2, 4, 5):
        ours, theirs = (files_of(folder / "checkpoints" / f"step-{step:06d}") for folder in (later, at_once))
        assert ours.keys() == theirs.keys()
        for name, content in theirs.items():
            assert ours[name] == content, f"step {step}: {name}"
    assert steps_of(later) == steps_of(at_once)
    assert (later / "checkpoints" / "latest").read_text() == "step-000005\n"
    # Something was trained between the checkpoints that were compared.
    models = [files_of(later / "checkpoints" / f"step-{step:06d}" / "model") for step in (0, 2, 4, 5)]
    assert len({model["model.safetensors"] for model in models}) == 4


def test_the_best_are_those_of_a_foreground_run(slow: list[int]) -> None:
    best = {"checkpoint.best": {"metric": "eval/reward", "mode": "max", "keep": 2}, "checkpoint.keep": 1}
    changes = {"data.eval": HELD_OUT, "evaluation.every": 1, "run.steps": 6, "evaluation.temperature": 1.0, **best}
    runs = [run(name, behind=behind, **changes) for name, behind in (("at-once", False), ("later", True))]
    assert slow
    found = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in runs]
    assert found[0] == found[1]
    for pointer in ("best", "latest"):
        texts = [(folder / "checkpoints" / pointer).read_text() for folder in runs]
        assert texts[0] == texts[1]
    manifests = [json.loads((folder / "run.json").read_text()) for folder in runs]
    assert manifests[0]["best"] == manifests[1]["best"]
    assert manifests[1]["best"]["step"]


def failing(monkeypatch: pytest.MonkeyPatch, step: int, begin: Callable[[], None] = lambda: None) -> None:
    """The disk is full when the checkpoint of a step is flushed."""
    flush = checkpoint.sync_path

    def full(path: Path) -> None:
        if f"step-{step:06d}" in str(path):
            begin()
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(path)

    monkeypatch.setattr(checkpoint, "sync_path", full)


def test_a_full_disk_is_told_and_the_checkpoint_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 2)
    with pytest.raises(RunFailure, match="the checkpoint of step 2 could not be written: the disk is full") as caught:
        run("full", behind=True)
    assert "the previous checkpoint is intact" in caught.value.mend
    folder = Path("runs/full").absolute()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-000000"]
    assert (folder / "checkpoints" / "latest").read_text() == "step-000000\n"
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    # It came before anything was saved again, and the same command goes on when there is room.
    assert max(step for _, step, _ in steps_of(folder)) <= 4
    monkeypatch.undo()
    monkeypatch.chdir(folder.parents[1])
    went_on, quiet = run("full", behind=True), run("quiet", behind=False)
    assert steps_of(went_on) == steps_of(quiet)
    ours, theirs = (files_of(folder / "checkpoints" / "step-000005") for folder in (went_on, quiet))
    assert ours == theirs


@pytest.mark.parametrize("error", [KeyboardInterrupt, RunFailure("the verifier is gone")])
def test_whatever_ends_a_run_waits_for_the_checkpoint(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    update, save = SingleDeviceTrainer.update, checkpoint.save_checkpoint

    def interrupted(self: SingleDeviceTrainer, *arguments: Any) -> dict[str, float]:
        if self.optimizer.updates == 2:
            ended.set()
            raise error
        return update(self, *arguments)

    def late(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        if step == 2:
            assert ended.wait(LONGEST)
        return save(folder, step, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SingleDeviceTrainer, "update", interrupted)
        patch.setattr(base_run, "save_checkpoint", late)
        with pytest.raises(error if isinstance(error, type) else RunFailure) as caught:
            run("ended", behind=True)
    assert isinstance(error, type) or caught.value is error
    assert (Path("runs/ended/checkpoints") / "latest").read_text() == "step-000002\n"
    assert steps_of(run("ended", behind=True)) == steps_of(run("quiet", behind=False))


def test_a_failure_of_the_disk_is_what_ends_a_run_that_fails_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many ranks the one ends the others, and their loss would be told instead."""
    failing(monkeypatch, 2)
    update = SingleDeviceTrainer.update

    def broken(self: SingleDeviceTrainer, *arguments: Any) -> dict[str, float]:
        if self.optimizer.updates == 2:
            raise RunFailure("another rank was lost")
        return update(self, *arguments)

    monkeypatch.setattr(SingleDeviceTrainer, "update", broken)
    with pytest.raises(RunFailure, match="the disk is full"):
        run("both", behind=True)


def test_what_the_loop_waited_is_in_the_metrics() -> None:
    folder = run("timed", behind=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    waited = {line["step"]: line["metrics"].get("time/checkpoint") for line in lines if line["kind"] == "train"}
    # After steps 0, 2 and 4; that of step 5 comes after the last line.
    assert [step for step, seconds in waited.items() if seconds] == [1, 3, 5]


def test_where_a_copy_fits_and_pays() -> None:
    mib = 1 << 20
    assert in_background("auto", 64 * mib, 256 * mib)[0]
    assert not in_background("auto", 64 * mib - 1, 1 << 40)[0]
    behind, why = in_background("auto", 64 * mib, 255 * mib)
    assert not behind
    assert "64 MiB" in why
    assert in_background(True, 1 << 40, 0)[0]
    assert not in_background(False, 64 * mib, 1 << 40)[0]


def test_auto_asks_for_the_memory(monkeypatch: pytest.MonkeyPatch, slow: list[int]) -> None:
    asked: list[int] = []

    def room(setting: Any, needed: int, free: int) -> tuple[bool, str]:
        asked.append(needed)
        assert free > 1 << 20
        return setting == "auto", "there is room"

    monkeypatch.setattr(base_run, "in_background", room)
    data = recipe(**{"run.steps": 3, "checkpoint.every": 2})
    folder = train(load_config(None, data=data)).folder
    assert slow == [0, 2]
    # A copy has each weight and two moments, in float32; there are none before the first update.
    weights = (folder / "checkpoints" / "step-000003" / "state" / "trainable.safetensors").stat().st_size
    assert asked[0] == pytest.approx(weights, rel=0.1)
    assert asked[1] == pytest.approx(3 * weights, rel=0.1)


def test_one_piece_of_work_at_a_time_and_a_failure_is_raised_once() -> None:
    work = Background("test")
    assert not work.wait()
    go, done = threading.Event(), []
    work.start(lambda: done.append(go.wait(LONGEST)))
    assert not work.ended
    with pytest.raises(AssertionError, match="one piece of work"):
        work.start(lambda: None)
    go.set()
    assert work.wait()
    assert done == [True]

    def fail() -> None:
        raise OSError("gone")

    work.start(fail)
    with pytest.raises(OSError, match="gone"):
        work.wait()
    assert not work.wait()
