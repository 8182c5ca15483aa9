"""Runs whose adapters change their ranks: they resume, and combinations that cannot work are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import recipe, steps_of, weights_of

from strop.config.loading import load_config
from strop.errors import ConfigError, RunFailure, UserError
from strop.loops.train import train

LORA = {"rank": 4, "adaptive": {"target_rank": 2, "tinit": 1, "tfinal": 2, "delta_t": 2}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)


def config_of(kind: str = "grpo", **changes: Any) -> Any:
    changes = {"model.lora": LORA, "run.steps": 6, "checkpoint.every": 2, **changes}
    if kind == "ppo":
        changes |= {"algorithm.name": "ppo", "critic.shared": True, "critic.warmup_steps": 1}
    data = recipe(**changes)
    if kind == "sft":
        del data["rewards"], data["rollout"]
        data["supervised"] = {"method": "sft", "batch_size": 4}
    return load_config(None, data=data)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft"])
@pytest.mark.parametrize("killed_at", [2, 4])
def test_a_stopped_run_goes_on_bit_for_bit(kind: str, killed_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.loops.base_run import BaseRun

    whole = train(config_of(kind, **{"run.name": "whole"}))
    save = BaseRun.save

    def dies(self: Any) -> Path:
        folder = save(self)
        if self.step == killed_at:
            raise RunFailure("stopped")
        return folder

    with monkeypatch.context() as patch:
        patch.setattr(BaseRun, "save", dies)
        with pytest.raises(RunFailure):
            train(config_of(kind, **{"run.name": "parts"}))
    parts = train(config_of(kind, **{"run.name": "parts"}))
    assert weights_of(whole.folder) == weights_of(parts.folder)
    assert steps_of(whole.folder) == steps_of(parts.folder)
    terms = [line["loss/orthogonality"] for kind_, _, line in steps_of(whole.folder) if "loss/orthogonality" in line]
    assert len(terms) == (5 if kind == "ppo" else 6)  # none while the head warms up


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.lora.dora": True}, "peft has no dora for adapters whose ranks move"),
        ({"model.lora.rank_stabilised": True}, "peft has no rank_stabilised"),
        ({"model.lora.adaptive.target_rank": 4}, r"adaptive.target_rank \(4\) must be below rank \(4\)"),
        ({"model.lora.rank": 1, "model.lora.adaptive": {}}, r"adaptive.target_rank \(1\) must be below rank \(1\)"),
        ({"model.lora.adaptive.tinit": 4}, "leave none of the run's 6 updates"),
        ({"run.steps": 3}, "leave none of the run's 3 updates"),
        ({"model.lora.adaptive.beta1": 1.0}, "must be a number above 0 and below 1"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(**changes)


def test_another_number_of_steps_would_move_the_ranks_otherwise() -> None:
    train(config_of(**{"run.name": "run"}))
    with pytest.raises(UserError, match="the ranks of adapters follow it"):
        train(config_of(**{"run.name": "run", "run.steps": 8}))
