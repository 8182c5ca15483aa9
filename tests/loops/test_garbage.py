"""What is in memory when a run begins is left out of garbage collection while it goes on, and no longer."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tiny_runs import recipe

from strop.config.loading import load_config
from strop.loops import base_run
from strop.loops.train import train

COUNTS: list[int] = []


def frozen(completions: list[str], **_: object) -> list[float]:
    COUNTS.append(gc.get_freeze_count())
    return [0.0] * len(completions)


def test_memory_is_frozen_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_run, "gc", gc)
    COUNTS.clear()
    verifier = {"kind": "python", "function": "test_garbage:frozen"}
    train(load_config(None, data=recipe(**{"rewards.verifiers": [verifier]})))
    assert COUNTS
    assert min(COUNTS) > 100_000
    assert gc.get_freeze_count() == 0
