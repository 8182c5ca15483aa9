"""Promise 6: a failed verifier is not a wrong answer. Faults are injected into a reward function of a real run."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_rewards
import torch
from tiny_runs import episodes_of, recipe, steps_of

from strop.config.loading import load_config
from strop.errors import RunFailure
from strop.loops.online import open_run
from strop.loops.train import train
from strop.rollout.episode import Status


def faulty(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """In the second step: the first call crashes, the second hangs, the third has NaN for two, the rest is well."""
    state = tiny_rewards.STATE
    with tiny_rewards.LOCK:
        calls = state["calls"] = state.get("calls", 0) + 1
    fault = state.get("faults", {}).get(calls)
    if fault == "crash":
        raise KeyError("answer")
    if fault == "hang":
        time.sleep(state["hang"])
    scores = tiny_rewards.spread(prompts, completions)
    return [math.nan, *scores[1:3], math.nan] if fault == "nan" else scores


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_rewards, "faulty", faulty, raising=False)
    tiny_rewards.STATE.clear()


def faults(*kinds: str, step: int = 2, **changes: Any) -> dict[str, Any]:
    """A recipe in which the first calls of a step fail; a step has four, one for each group."""
    tiny_rewards.STATE["faults"] = dict(enumerate(kinds, start=4 * step - 3))
    tiny_rewards.STATE["hang"] = 1.0
    rewards = {"verifiers": [{"kind": "python", "function": "tiny_rewards:faulty"}], "retries": 0}
    return recipe(rewards=rewards, **{"rollout.groups_per_step": 4, "run.steps": 3, **changes})


def test_failures_have_a_status_and_are_in_no_baseline() -> None:
    data = faults("crash", "hang", "nan", **{"rewards.timeout": 0.25, "rewards.max_error_share": 0.8})

    async def work() -> tuple[torch.Tensor, torch.Tensor, Counter[str], Path]:
        async with open_run(load_config(None, data=data)) as run:
            await run.begin()
            for _ in range(2):
                groups = await run.collect()
                batch = await run.build_batch(groups)
                if run.step == 1:
                    found = batch.advantages
                    statuses = Counter(str(e.status) for g in groups for e in g.episodes if not e.status.trainable)
                stats = await run.update(batch)
                run.step += 1
                await run.publish()
                run.record(groups, batch, stats)
            # The same window without the episodes that failed.
            run.step -= 1
            for group in groups:
                group.episodes = [e for e in group.episodes if e.status in (Status.STOP, Status.LENGTH)]
            alone = (await run.build_batch(groups)).advantages
            run.step += 1
            assert found is not None
            assert alone is not None
            return found, alone, statuses, run.folder

    found, alone, statuses, folder = asyncio.run(work())
    assert statuses == {"verifier_error": 6, "timeout": 4}
    assert torch.equal(found, alone)
    assert found.abs().max() > 0

    records = [record for record in episodes_of(folder) if record.group >= 4]
    failed = [record for record in records if record.status in ("verifier_error", "timeout")]
    assert len(records) == 16
    assert len(failed) == 10
    for record in failed:
        assert math.isnan(record.reward)
        assert record.correct is None
        assert record.advantages is None
        assert record.detail
    assert {record.group for record in failed if record.status == "timeout"} == {
        record.group for record in failed if "within 0.25 s" in record.detail
    }
    metrics = steps_of(folder)[1][2]
    assert metrics["errors/share"] == 10 / 16
    scored = [record.reward for record in records if not math.isnan(record.reward)]
    assert metrics["reward/mean"] == pytest.approx(sum(scored) / len(scored))


def test_too_many_failures_stop_the_run_and_keep_its_checkpoint() -> None:
    with pytest.raises(RunFailure, match=r"max_error_share allows 10%") as caught:
        train(load_config(None, data=faults("nan", **{"checkpoint.every": 1})))
    assert "2 of 16 completions" in str(caught.value)
    assert "tiny_rewards:faulty returned nan" in str(caught.value)
    [run] = Path("runs").iterdir()
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-000001"
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert [step for _, step, _ in steps_of(run)] == [1]


def test_a_share_within_the_budget_goes_on() -> None:
    train(load_config(None, data=faults("nan", **{"rewards.max_error_share": 0.125})))


def test_in_the_first_step_none_may_fail() -> None:
    with pytest.raises(RunFailure, match="in the first step of a run none may fail"):
        train(load_config(None, data=faults("nan", step=1, **{"rewards.max_error_share": 1.0})))


def test_a_verifier_that_recovers_is_asked_again() -> None:
    data = faults("crash", step=1, **{"data.train.arguments.count": 40})
    data["rewards"]["retries"] = 1
    summary = train(load_config(None, data=data))
    assert all(record.status in ("stop", "length") for record in episodes_of(summary.folder))
