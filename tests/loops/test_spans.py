"""The timeline of real runs: it has what the metrics have, and shows who worked at the same time."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from ahead_runs import clocked, in_a_thread, overlap, served_apart
from tiny_runs import HELD_OUT, recipe

from strop.config.loading import load_config
from strop.loops.train import train
from strop.tracking.timeline import Span, StepTimeline, joined, read_timeline

LOOP = ("driver", "trainer")
OF_THE_ENGINE = ("sleep", "wake")
BESIDE = ("recording", "evaluating")
"""Phases that have no `time/…`."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(**changes: Any) -> Path:
    return train(load_config(None, data=recipe(**changes))).folder


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines if line["kind"] == "train"}


def sums(line: StepTimeline) -> dict[str, float]:
    """Seconds of the loop's phases within the step, and of checkpoints before it, as `time/…` has them."""
    found: dict[str, float] = defaultdict(float)
    for span in line.spans:
        before = span.start < -1e-6
        if (
            span.phase not in BESIDE
            and (span.lane in LOOP or span.phase in OF_THE_ENGINE)
            and before == (span.phase == "checkpoint")
        ):
            found[f"time/{span.phase}"] += span.seconds
    return dict(found)


def of(line: StepTimeline, phase: str, lane: str) -> list[Span]:
    return [span for span in line.spans if (span.phase, span.lane) == (phase, lane)]


def agree(run: Path) -> list[StepTimeline]:
    """Each step's spans add up to the seconds in its metrics, and lie within it or before it."""
    lines, metrics = read_timeline(run / "timeline.jsonl"), metrics_of(run)
    assert [line.step for line in lines] == list(metrics)
    for line in lines:
        said = {name: value for name, value in metrics[line.step].items() if name.startswith("time/")}
        found = sums(line)
        assert line.seconds == pytest.approx(said.pop("time/step"), abs=2e-6)
        assert found == {name: pytest.approx(seconds, abs=1e-5) for name, seconds in said.items()}
        assert all(span.start < line.seconds for span in line.spans if span.phase != "recording")
    return lines


def test_spans_add_up_to_the_metrics_and_follow_the_loop() -> None:
    began = time.time()
    run = ran(**{"run.steps": 4, "data.eval": HELD_OUT, "evaluation.every": 2, "checkpoint.every": 2})
    lines = agree(run)
    assert began < lines[0].time < lines[1].time < lines[3].time < time.time()
    order = ["sampling", "verifying", "scoring", "training", "publishing", "alarms", "recording"]
    for line in lines:
        loop = [span for span in line.spans if span.lane in LOOP and span.start >= -1e-6]
        assert [span.phase for span in loop] == order
        for first, second in itertools.pairwise(loop):
            assert first.start + first.seconds <= second.start + 1e-5
        # In one process the engine samples while the loop waits for it, and at no other time within the step.
        engine = [(s.start, s.start + s.seconds) for s in of(line, "sampling", "engine") if s.start >= 0]
        waits = [(s.start, s.start + s.seconds) for s in of(line, "sampling", "driver")]
        assert overlap(engine, waits) == pytest.approx(sum(end - start for start, end in joined(engine)), abs=1e-4)
        assert of(line, "verifying", "verifiers")
    # What was done after the line of step 2 is with step 3, before it.
    assert {span.phase for span in lines[2].spans if span.start < 0} >= {"evaluating", "checkpoint"}
    [evaluating] = of(lines[2], "evaluating", "driver")
    assert evaluating.start + evaluating.seconds <= 0
    assert not of(lines[3], "evaluating", "driver")


def test_verifiers_work_beside_the_engine() -> None:
    """Groups of which all are there are scored while others are sampled."""
    changes = {"rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:unhurried"}]}
    run = ran(**{"run.steps": 1, "rollout.engine.max_sequences": 4, **changes})
    agree(run)
    spans = clocked(run)
    assert overlap(spans["verifying", "verifiers"], spans["sampling", "engine"]) > 0


def test_an_engine_of_its_own_samples_while_the_trainer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    served_apart(monkeypatch)
    in_a_thread(monkeypatch)
    changes = {"rollout.max_staleness": 2, "rollout.max_new_tokens": 16, "rollout.engine.max_sequences": 2}
    run = ran(**{"run.steps": 5, "training.optimizer.schedule": "constant", **changes})
    lines = agree(run)
    spans = clocked(run)
    assert overlap(spans["sampling", "engine"], spans["training", "trainer"]) > 0
    # The engine's idle time is what the metrics say.
    for line, metrics in zip(lines, metrics_of(run).values(), strict=True):
        busy = joined([(max(0.0, s.start), s.start + s.seconds) for s in of(line, "sampling", "engine")])
        within = sum(max(0.0, min(end, line.seconds) - start) for start, end in busy)
        assert 1 - within / line.seconds == pytest.approx(metrics["bubble/engine"], abs=0.02)


def test_an_engine_with_the_trainers_weights_rests_meanwhile() -> None:
    changes = {"rollout.max_staleness": 2, "rollout.max_new_tokens": 16, "rollout.engine.max_sequences": 2}
    run = ran(**{"run.steps": 4, "training.optimizer.schedule": "constant", **changes})
    spans = clocked(run)
    assert overlap(spans["sampling", "engine"], spans["training", "trainer"]) == 0.0
    assert all(of(line, "sampling", "engine") for line in agree(run))


def test_a_run_that_goes_on_drops_the_steps_past_its_checkpoint() -> None:
    run = ran(**{"run.steps": 4, "checkpoint.every": 2, "run.name": "one"})
    path = run / "timeline.jsonl"
    first = path.read_bytes().splitlines()
    # As if it had been killed in its fifth step, after a third and fourth that no checkpoint has.
    (run / "checkpoints" / "latest").write_text("step-000002\n")
    with path.open("ab") as file:
        file.write(b'{"step": 5, "ti')
    assert ran(**{"run.steps": 4, "checkpoint.every": 2, "run.name": "one"}) == run
    lines = agree(run)
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert path.read_bytes().splitlines()[:2] == first[:2]
    assert lines[2].time > json.loads(first[3])["time"]


def test_a_run_that_learns_from_examples_has_its_phases() -> None:
    changes = {"supervised": {"method": "sft", "batch_size": 4}, "rewards": None, "rollout": {}}
    lines = agree(ran(**{"run.steps": 3, **changes}))
    for line in lines:
        assert [s.phase for s in line.spans if s.start >= 0] == ["preparing", "training", "recording"]
        assert {s.lane for s in line.spans if s.start >= 0} == {"trainer", "driver"}


def test_a_sleeping_engine_is_seen() -> None:
    for line in agree(ran(**{"rollout.engine.sleep": "always"})):
        [sleep], [wake] = of(line, "sleep", "engine"), of(line, "wake", "engine")
        [training] = of(line, "training", "trainer")
        assert sleep.start + sleep.seconds <= training.start < training.start + training.seconds <= wake.start
