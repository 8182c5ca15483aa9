"""Sampling ahead with trainer and engines in processes of their own: what versions completions are of, and engines that
are lost at every moment of a step. The runs are driven from this process, so that the moments are those that are meant.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ahead_runs import ages, by_step, clocked, overlap, trained, versions_of
from tiny_runs import HELD_OUT, recipe, weights_of

from strop.cluster.session import Session
from strop.cluster.supervision import WorkerLost
from strop.config.loading import load_config
from strop.loops import processes
from strop.loops.run import Run
from strop.loops.train import train
from strop.publishing.publisher import Publisher
from strop.rollout.journal import Journal

pytestmark = pytest.mark.slow

BOUND = 2
PATIENT = {"timeout": 120.0}
"""A process that ends is found at once; one that only gets no share of a busy machine is not to count as lost."""


@pytest.fixture
def attached(ray_session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs of this process go to the tests' cluster."""

    def session(address: str | None, **_: Any) -> Session:
        found = Session(False, ["the tests' cluster"])
        monkeypatch.setattr(found, "close", lambda: None)
        return found

    monkeypatch.setattr(processes, "open_session", session)
    monkeypatch.chdir(tmp_path)


def ran(cluster: dict[str, Any], **changes: Any) -> Path:
    """The folder of a run; two sequences at a time, so that engines always have something to do."""
    given = {"rewards.verifiers": [{"kind": "regex", "pattern": "[0-4]"}], "rollout.engine.max_sequences": 2, **changes}
    data = recipe(**{"training.optimizer.schedule": "constant", "cluster": {"kind": "ray", **cluster}, **given})
    return train(load_config(None, data=data), recipe=f"{len(list(Path.cwd().iterdir()))}.yaml").folder


def test_without_staleness_two_engines_give_the_parameters_of_one_process(attached: None) -> None:
    """Which are those of the plain loop (`tests/promises/test_p1_one_loop.py`), bit for bit."""
    changes = {"run.steps": 5, "training.mini_batches": 2, "rewards.verifiers": [{"kind": "regex", "pattern": "[0-4]"}]}
    here = train(load_config(None, data=recipe(**changes, **{"run.name": "here"}))).folder
    there = ran({"engines": {"count": 2}}, **{**changes, "rollout.engine.max_sequences": 256})
    assert (there / "logs" / "001" / "engine-1.log").exists()
    assert weights_of(there) == weights_of(here)
    start = (here / "checkpoints" / "step-000000" / "model" / "model.safetensors").read_bytes()
    assert weights_of(here) != start


APART = {"engines": {"count": 2}}
TOGETHER = {"engines": {"placement": "colocated"}}


@pytest.mark.parametrize(
    ("cluster", "every"), [(APART, 2), (TOGETHER, 1)], ids=["engines apart, every second step", "colocated"]
)
def test_each_completion_is_of_one_version_where_it_is_to_be(
    attached: None, cluster: dict[str, Any], every: int
) -> None:
    changes = {"rollout.in_flight_updates": False, "rollout.update_every": every, "rollout.max_new_tokens": 20}
    run = ran(cluster, **{"run.steps": 7, "rollout.max_staleness": BOUND, **changes})
    found = versions_of(run)
    assert all(len(set(versions)) == 1 for versions in found)
    served = {versions[0] for versions in found}
    assert served <= set(range(0, 7, every))
    assert len(served) >= 2
    assert 1 <= max(ages(run)) <= BOUND
    assert min(ages(run)) >= 0
    assert len(trained(run)) == 28
    # The timeline has a lane for each engine; those with weights of their own sample while the trainer trains.
    spans = clocked(run)
    lanes = {lane for phase, lane in spans if phase == "sampling" and lane != "driver"}
    assert lanes == ({"engine 0", "engine 1"} if cluster is APART else {"engine"})
    for lane in lanes:
        assert (overlap(spans["sampling", lane], spans["training", "trainer"]) > 0) == (cluster is APART)


class Kills:
    """Kills engines at moments of a run, each once, whatever it is set back to."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, name: str, run: Run, *engines: int) -> None:
        if name in self.done:
            return
        self.done.append(name)
        place: Any = run.place
        for index in engines:
            os.kill(place.engines.workers[index].pid, signal.SIGKILL)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Kills:
    """An engine is lost while the trainer computes its second step, two at once while the fourth is sampled, one while
    the checkpoint of the sixth asks what is under way, one while step seven is evaluated, and one while the weights of
    the tenth move."""
    kill = Kills()
    runs: list[Run] = []
    update, collect, score = Run._update, Run.collect, Run._score_held_out
    notes, move = Journal.notes, Publisher._move

    def updating(self: Run, batch: Any) -> Any:
        runs[:] = [self]
        if self.step == 1:
            kill("update", self, 1)
        return update(self, batch)

    async def collecting(self: Run) -> Any:
        if self.step == 3:
            kill("both", self, 0, 1)
        return await collect(self)

    async def noting(self: Journal) -> Any:
        if runs and runs[0].step == 6:
            kill("checkpoint", runs[0], 0)
        return await notes(self)

    async def scoring(self: Run) -> Any:
        asked = asyncio.ensure_future(score(self))
        if self.step == 7:
            await asyncio.sleep(0.05)
            kill("evaluation", self, 1)
        return await asked

    async def moving(self: Publisher, trainer: Any, engines: Any, offer: Any) -> Any:
        if runs and offer.version == 10:
            kill("publication", runs[0], 0)
        return await move(self, trainer, engines, offer)

    monkeypatch.setattr(Run, "_update", updating)
    monkeypatch.setattr(Run, "collect", collecting)
    monkeypatch.setattr(Journal, "notes", noting)
    monkeypatch.setattr(Run, "_score_held_out", scoring)
    monkeypatch.setattr(Publisher, "_move", moving)
    return kill


def test_engines_are_lost_at_every_moment(attached: None, kills: Kills, capfd: pytest.CaptureFixture[str]) -> None:
    steps = 12
    evaluation = {"evaluation.every": 7, "evaluation.samples": 8, "evaluation.temperature": 1.0}
    changes = {"data.eval": HELD_OUT, **evaluation, "rollout.max_new_tokens": 24}
    run = ran(
        {**APART, "supervision": {"restarts": 6, "heartbeat": 0.5, **PATIENT}},
        **{"run.steps": steps, "rollout.max_staleness": BOUND, "checkpoint.every": 3, **changes},
    )
    assert kills.done == ["update", "both", "checkpoint", "evaluation", "publication"]
    told = capfd.readouterr().err
    # Only what a loss in the midst of a publication left half done is not mended on the way; and it counts once.
    assert told.count("going on from the last checkpoint") == 1
    assert told.count("it was started again, and gets the weights anew") in (5, 6)
    assert len(json.loads((run / "run.json").read_text())["resumed"]) == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, steps + 1))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 7, 12]
    found = trained(run)
    assert [entry[:2] for entry in found] == [(1 + group // 4, group) for group in range(4 * steps)]
    assert all(samples == 4 for *_, samples in found)
    assert len({prompt for _, _, prompt, _ in found[:40]}) == 40
    assert 0 <= min(ages(run)) <= max(ages(run)) <= BOUND
    assert {record.status for records in by_step(run).values() for record in records} <= {"stop", "length"}


def test_without_restarts_the_loss_is_named_and_the_same_command_goes_on(
    attached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = Kills()
    collect: Callable[..., Any] = Run.collect

    async def collecting(self: Run) -> Any:
        if self.step == 3:
            kill("once", self, 1)
        return await collect(self)

    monkeypatch.setattr(Run, "collect", collecting)
    changes = {"run.steps": 5, "rollout.max_staleness": BOUND, "checkpoint.every": 2, "rollout.max_new_tokens": 24}
    cluster = {**APART, "supervision": {"restarts": 0, **PATIENT}}
    with pytest.raises(WorkerLost, match="engine 1 is lost") as caught:
        ran(cluster, **changes, **{"run.name": "lost"})
    assert "started again 0 times already (cluster.supervision.restarts)" in caught.value.mend
    assert kill.done == ["once"]
    run = ran(cluster, **changes, **{"run.name": "lost"})
    assert [entry[1] for entry in trained(run)] == list(range(20))
    assert len({entry[2] for entry in trained(run)}) == 20
