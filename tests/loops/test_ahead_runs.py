"""Runs in one process that sample ahead, and what goes wrong meanwhile: nothing hangs, and nothing is mixed up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import tiny_rewards
from ahead_runs import ages, by_step, in_a_thread, served_apart, trained, versions_of
from tiny_runs import HELD_OUT, recipe

from strop.config.loading import load_config
from strop.errors import RunFailure
from strop.loops.run import Run
from strop.loops.train import train
from strop.rollout.engine import SampleRequest, SampleResult
from strop.rollout.engines.local import LocalEngine
from strop.training.single import SingleDeviceTrainer

BOUND = 2


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(**changes: Any) -> Any:
    given = {"rollout.max_staleness": BOUND, "rollout.max_new_tokens": 16, "rollout.engine.max_sequences": 12}
    given |= {"run.steps": 5, "training.optimizer.schedule": "constant"}
    return load_config(None, data=recipe(**{**given, **changes}))


def lines(run: Path, kind: str) -> list[int]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == kind]


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer computes in a thread and the engine on the event loop, as they do in a process that both share."""
    in_a_thread(monkeypatch)


@pytest.mark.parametrize("in_flight", [True, False], ids=["in flight", "one version"])
def test_an_engine_with_the_trainers_weights_takes_no_step_during_an_update(
    in_threads: None, monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    step, update = LocalEngine._step, SingleDeviceTrainer.update
    updating = False
    steps = {True: 0, False: 0}

    def stepping(self: LocalEngine) -> None:
        steps[updating] += 1
        step(self)

    def changing(self: SingleDeviceTrainer, *given: Any) -> Any:
        nonlocal updating
        updating = True
        try:
            # So that a step that may be taken is taken.
            time.sleep(0.05)
            return update(self, *given)
        finally:
            updating = False

    monkeypatch.setattr(LocalEngine, "_step", stepping)
    monkeypatch.setattr(SingleDeviceTrainer, "update", changing)
    run = train(config_of(**{"rollout.in_flight_updates": in_flight})).folder
    assert steps[True] == 0
    assert steps[False] > 20
    assert 1 <= max(ages(run)) <= BOUND
    mixed = [versions for versions in versions_of(run) if len(set(versions)) > 1]
    assert bool(mixed) == in_flight
    assert [group for _, group, _, _ in trained(run)] == list(range(20))


EVALUATED = {"data.eval": HELD_OUT, "evaluation.every": 2, "run.steps": 6, "checkpoint.every": 1}


def slowly(
    monkeypatch: pytest.MonkeyPatch,
    fails: int | None = None,
    seconds: float = 0.2,
    endless: Collection[int] = (),
) -> list[tuple[int, set[int]]]:
    """Evaluations take some steps' time; the versions that each was of, by its step. fails: at this step. endless: at
    these steps they do not end by themselves."""
    score = Run._score_held_out
    found: list[tuple[int, set[int]]] = []

    async def scoring(self: Run) -> Any:
        step = self.step
        await asyncio.sleep(3600 if step in endless else seconds)
        if step == fails:
            raise RunFailure("the held-out data are gone")
        generate = self.journal._engine.generate
        versions: set[int] = set()

        async def noting(request: SampleRequest) -> SampleResult:
            result = await generate(request)
            if request.stream[0] < 0:
                versions.update(result.versions)
            return result

        monkeypatch.setattr(self.journal._engine, "generate", noting)
        scores = await score(self)
        monkeypatch.setattr(self.journal._engine, "generate", generate)
        found.append((step, versions))
        return scores

    monkeypatch.setattr(Run, "_score_held_out", scoring)
    return found


@pytest.mark.parametrize("every", [1, 2, 3])
def test_evaluations_beside_training_are_of_the_weights_of_their_step(
    in_threads: None, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    served_apart(monkeypatch)
    found = slowly(monkeypatch)
    changes = {**EVALUATED, "evaluation.every": 1 if every == 2 else 2}
    run = train(config_of(**{**changes, "rollout.update_every": every})).folder
    steps = [step for step, _ in found]
    assert steps == list(range(0, 7, changes["evaluation.every"]))
    assert all(versions == {step} for step, versions in found)
    assert lines(run, "eval") == steps
    assert max(ages(run)) <= BOUND


def test_an_evaluation_that_fails_beside_training_ends_the_run_and_is_told(
    in_threads: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    served_apart(monkeypatch)
    score = Run._score_held_out
    slowly(monkeypatch, fails=2)
    with pytest.raises(RunFailure, match="the held-out data are gone"):
        train(config_of(**EVALUATED))
    [run] = Path("runs").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert max(lines(run, "train")) < 6
    # And the same command goes on, with the evaluation that is missing.
    monkeypatch.setattr(Run, "_score_held_out", score)
    assert train(config_of(**EVALUATED)).folder == run
    assert lines(run, "eval") == [0, 2, 4, 6]
    assert lines(run, "train") == list(range(1, 7))
    assert [group for _, group, _, _ in trained(run)] == list(range(24))


def test_an_evaluation_that_a_kill_ended_is_begun_again(in_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is written meanwhile says so; one of later weights waits for the scores."""
    served_apart(monkeypatch)
    endless = {2}
    found = slowly(monkeypatch, seconds=0.0, endless=endless)

    class Killed(Exception):
        pass

    save = Run.save

    async def saving(self: Run) -> Path:
        path = await save(self)
        await self.place.aside(self._settle)
        if self.step == 2 and self._ahead.evaluating == 2:
            raise Killed
        return path

    monkeypatch.setattr(Run, "save", saving)
    with pytest.raises(Killed):
        train(config_of(**EVALUATED))
    assert [step for step, _ in found] == [0]
    endless.clear()
    monkeypatch.setattr(Run, "save", save)
    run = train(config_of(**EVALUATED)).folder
    assert [step for step, _ in found] == [0, 2, 4, 6]
    assert all(versions == {step} for step, versions in found)
    assert lines(run, "eval") == [0, 2, 4, 6]


def test_scores_that_came_after_the_checkpoint_are_not_there_twice(
    in_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_apart(monkeypatch)
    found = slowly(monkeypatch, seconds=0.05)

    class Killed(Exception):
        pass

    record = Run.record

    def recording(self: Run, *given: Any) -> Any:
        metrics = record(self, *given)
        if self.step == 3:
            raise Killed
        return metrics

    async def waiting(self: Run, groups: Any) -> dict[str, float]:
        if self.step == 3:
            await self._ahead.evaluated()
        return {}

    monkeypatch.setattr(Run, "look", waiting)
    monkeypatch.setattr(Run, "record", recording)
    changes = {**EVALUATED, "checkpoint.every": 2}
    with pytest.raises(Killed):
        train(config_of(**changes))
    [run] = Path("runs").iterdir()
    assert lines(run, "eval") == [0, 2]
    monkeypatch.setattr(Run, "record", record)
    train(config_of(**changes))
    assert [step for step, _ in found] == [0, 2, 2, 4, 6]
    assert lines(run, "eval") == [0, 2, 4, 6]
    assert lines(run, "train") == list(range(1, 7))


def test_nothing_is_sampled_before_the_environment_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run goes on with what was under way: its tools may be in a server that is started first."""
    from strop.environments.build import PythonFactory

    opened: list[bool] = []
    early: list[int] = []
    make = PythonFactory.make

    async def opening(self: Any) -> None:
        await asyncio.sleep(0.1)
        opened.append(True)

    def making(self: Any) -> Any:
        if not opened:
            early.append(1)
        return make(self)

    monkeypatch.setattr(PythonFactory, "open", opening, raising=False)
    monkeypatch.setattr(PythonFactory, "make", making)
    world = {
        "environment": {"kind": "python", "factory": "tiny_worlds:Asks"},
        "rewards.verifiers": [{"kind": "environment"}],
    }
    train(config_of(**{**world, "run.steps": 2}))
    opened.clear()
    run = train(config_of(**{**world, "run.steps": 4})).folder
    assert lines(run, "train") == [1, 2, 3, 4]
    assert early == []


def test_an_environment_that_hangs_costs_its_episode_and_nothing_else() -> None:
    import tiny_worlds

    tiny_worlds.Hangs.made = 0
    world = {
        "environment": {"kind": "python", "factory": "tiny_worlds:Hangs", "step_timeout": 0.3},
        "rewards.verifiers": [{"kind": "environment"}],
        "rewards.max_error_share": 0.5,
    }
    run = train(config_of(**world)).folder
    records = [record for records in by_step(run).values() for record in records]
    assert lines(run, "train") == list(range(1, 6))
    late = [record for record in records if record.status == "timeout"]
    assert late
    assert all("longer than 0.3 s for one answer" in record.detail for record in late)
    assert [entry[:2] for entry in trained(run)] == [(1 + group // 4, group) for group in range(20)]
    assert max(ages(run)) <= BOUND


def test_a_verifier_that_hangs_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of later windows are being verified when the run fails."""

    class Stops(Exception):
        pass

    async def looking(self: Run, groups: Any) -> Any:
        while not tiny_rewards.STATE.get("hanging"):
            await asyncio.sleep(0.01)
        raise Stops

    monkeypatch.setattr(Run, "look", looking)
    data = config_of(
        **{"rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:hangs_later"}], "rewards.workers": 64}
    )
    tiny_rewards.STATE.clear()
    started = time.monotonic()
    with pytest.raises(Stops):
        train(data)
    assert time.monotonic() - started < 60
    assert tiny_rewards.STATE["hanging"] >= 1


def test_a_group_that_cannot_be_verified_ahead_ends_the_run() -> None:
    """The error of a window that is not due yet is told, and not waited with."""
    tiny_rewards.STATE.clear()
    with pytest.raises(RunFailure, match="returned 3 numbers for 4"):
        train(config_of(**{"rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:one_short"}]}))


def test_replayed_steps_are_those_of_the_run() -> None:
    from strop.loops.replay import replay

    run = train(config_of(**{"checkpoint.every": 1, "checkpoint.keep": 9})).folder
    assert list(replay(run, 4).differences) == []
