"""Processes that are started to see whether a recipe works are ended when its run does not begin, and when it ends."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_runs import HELD_OUT, recipe

from strop.config.loading import load_config
from strop.errors import UserError
from strop.loops import base_run
from strop.loops.evaluate import evaluate_model
from strop.loops.garbage import OBJECTS, look_rarely
from strop.loops.prepare import prepare
from strop.loops.rollout import rollout
from strop.loops.run import Run
from strop.loops.train import train

PROGRAMS = {"rewards.verifiers": [{"kind": "code", "tests": "answer"}], "data.eval": HELD_OUT}


def sandboxes() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.name() == "bwrap"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return lambda **changes: load_config(None, data=recipe(**PROGRAMS, **changes))


def test_a_sandbox_is_there_while_it_is_prepared_for(config: Any) -> None:
    """Or the other tests would show nothing."""
    with prepare(config()):
        assert sandboxes()
    assert not sandboxes()


@pytest.mark.parametrize("begin", [prepare, train, evaluate_model, lambda given: rollout(given, "out.jsonl")])
def test_a_recipe_that_is_refused_leaves_nothing_behind(config: Any, begin: Any) -> None:
    given = config(model={"path": "nowhere"})
    with pytest.raises(UserError, match="nowhere"):
        begin(given)
    assert not sandboxes()


@pytest.mark.parametrize("begin", [train, evaluate_model])
def test_nor_does_one_whose_model_cannot_be_loaded(config: Any, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        assert sandboxes()
        raise UserError("it is gone")

    monkeypatch.setattr("strop.loops.assembly.load_roles", load)
    with pytest.raises(UserError, match="it is gone"):
        begin(config())
    assert not sandboxes()


def test_nor_do_stages_that_were_looked_at(config: Any, tmp_path: Path) -> None:
    from strop.loops.preflight import _check

    _check(config())
    assert not sandboxes()


@pytest.mark.parametrize("fails", [False, True])
def test_python_looks_for_garbage_as_before_when_a_run_has_ended(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_run, "look_rarely", look_rarely)  # which other tests do without
    during: list[tuple[int, int, int]] = []

    def collected(run: Any) -> Any:
        during.append(gc.get_threshold())
        if fails:
            raise UserError("no more")
        return original(run)

    original = Run.collect
    monkeypatch.setattr(Run, "collect", collected)
    gc.unfreeze()  # what the tests have left out so far: Python cannot tell it from what a run leaves out
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(UserError, match="no more") if fails else nullcontext():
        train(load_config(None, data=recipe(**{"run.steps": 1})))
    assert during[0] == (OBJECTS, *before[1:])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == frozen
