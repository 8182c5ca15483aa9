"""Runs with `rollout.window`: past groups resume bit for bit, orders keep a bound, branches go ahead of training."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_runs import observe, put, recipe, steps_of, weights_of
from typer.testing import CliRunner

from strop.cli import app
from strop.config.loading import load_config
from strop.loops.replay import replay
from strop.loops.train import train
from strop.tracking.episodes import read_episodes


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


PAST = {"groups": 3, "keep": 9, "max_age": 4}
WORLD = {
    "environment": {"kind": "python", "factory": "tiny_worlds:Forks", "max_turn_tokens": 2},
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 12,
    "rollout.tree": {"at": [1], "branches": 3},
    "rewards.verifiers": [{"kind": "environment"}],
}
MATCH = {
    "environment": {
        "kind": "self_play",
        "factory": "tiny_worlds:Echoes",
        "arguments": {"turns": 4},
        "max_turn_tokens": 3,
    },
    "rollout.max_new_tokens": 8,
    "rewards.verifiers": [{"kind": "environment"}],
}


def command_line(data: dict[str, Any], *overrides: str, code: int = 0) -> Any:
    Path("recipe.yaml").write_text(yaml.safe_dump(data))
    result = CliRunner().invoke(app, ["train", "recipe.yaml", *overrides])
    assert result.exit_code == code, result.output
    return result


def records_by_step(run: Path) -> dict[int, list[Any]]:
    return {int(p.stem[5:]): read_episodes(p) for p in sorted((run / "episodes").glob("step-*.parquet"))}


# --- past groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="uniform"),
        pytest.param(
            {
                "rollout.window.past.select": "priority",
                "rollout.window.past.priority": "advantage",
                "algorithm.name": "reinforce_pp",
            },
            id="priority",
        ),
        pytest.param({"rollout.window.past.select": "stratified", "algorithm.name": "ppo"}, id="stratified, critic"),
        pytest.param(
            {"rollout.window.past.select": "tiny_choices:any_past", "algorithm.name": "remax"}, id="own, greedy"
        ),
        pytest.param({**WORLD, "rollout.window.past.select": "priority"}, id="branches"),
        pytest.param(MATCH, id="roles"),
    ],
)
def test_a_run_with_past_groups_resumes_bit_for_bit(changes: dict[str, Any]) -> None:
    data = recipe(**{"rollout.window.past": PAST, **changes})
    command_line(data, "run.name=whole", "run.steps=6")
    command_line(data, "run.name=parts", "run.steps=2")
    command_line(data, "run.name=parts", "run.steps=6")
    whole, parts = Path("runs/whole"), Path("runs/parts")
    assert steps_of(whole) == steps_of(parts)
    assert weights_of(whole) == weights_of(parts)
    assert repr(records_by_step(whole)) == repr(records_by_step(parts))
    assert any(line["window/past_share"] > 0 for kind, _, line in steps_of(whole) if kind == "train")


def test_past_groups_come_in_addition_and_are_told_apart() -> None:
    found = observe(recipe(**{"rollout.window.past": PAST, "run.steps": 6}))
    assert found.run is not None
    metrics = {step: line for kind, step, line in found.parts["metrics"] if kind == "train"}
    sampled: dict[int, dict[int, list[Any]]] = {}
    for step, records in records_by_step(found.run).items():
        groups = defaultdict(list)
        for record in records:
            groups[record.group].append(record)
        fresh = {number for number, own in groups.items() if not own[0].past}
        past = {number for number, own in groups.items() if own[0].past}
        # Admission is what it is without them.
        assert fresh == set(range(4 * (step - 1), 4 * step))
        assert len(past) == (0 if step == 1 else 3)
        line = metrics[step]
        assert line["window/past_share"] == pytest.approx(len(past) / len(groups))
        assert line["window/past_kept"] == min(9, 4 * step)
        assert line["groups/trained"] == line["groups/kept"] == 4
        assert line["staleness/max"] == 0
        assert line["tokens/sampled"] == sum(int(r.loss_mask.sum()) for n in fresh for r in groups[n])
        assert line["tokens/trained"] == sum(int(r.loss_mask.sum()) for r in records)
        rewards = [r.reward for n in fresh for r in groups[n]]
        assert line["reward/mean"] == pytest.approx(np.mean(rewards))
        ages = [step - 1 - v for n in past for r in groups[n] for v in r.versions[r.loss_mask].tolist()]
        assert all(1 <= age <= 4 for age in ages)
        if past:
            assert line["window/past_age_mean"] == pytest.approx(np.mean(ages))
        for number in past:
            for then, now in zip(sampled[number], groups[number], strict=True):
                # Trained again as it was sampled; only what the trainer thinks of it is another.
                assert then.completion_text == now.completion_text
                assert (then.reward, then.status, then.row) == (now.reward, now.status, now.row)
                for name in ("tokens", "loss_mask", "versions", "sampler_logprobs"):
                    assert np.array_equal(getattr(then, name), getattr(now, name), equal_nan=True)
                inside = then.loss_mask
                assert not np.array_equal(then.trainer_logprobs[inside], now.trainer_logprobs[inside])
        sampled |= {number: groups[number] for number in fresh}


def test_what_past_groups_change_is_what_is_trained_and_not_what_is_drawn_first() -> None:
    plain = observe(recipe(**{"run.steps": 1}))
    with_past = observe(recipe(**{"run.steps": 1, "rollout.window.past": PAST, "algorithm.correction.kind": "none"}))
    assert plain.parts["completions"] == with_past.parts["completions"]
    first, second = (parts["parameters"] for parts in (plain.parts, with_past.parts))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_past_tokens_are_corrected_unless_the_recipe_says_otherwise() -> None:
    data = recipe(**{"rollout.window.past": PAST, "run.steps": 3})
    corrected = observe(data)
    put(data, "algorithm.correction", {"kind": "none"})
    bare = observe(data)
    put(data, "algorithm.correction", {"kind": "truncate", "high": 2.0, "off_policy": 0.1})
    said = observe(data)
    last = {name: seen.parts["metrics"][-1][2] for name, seen in {"corrected": corrected, "bare": bare}.items()}
    assert last["corrected"]["mismatch/weight_max"] > 1
    assert not math.isclose(last["corrected"]["loss"], last["bare"]["loss"])
    assert corrected.parts["metrics"] == said.parts["metrics"]


def test_each_mini_batch_gets_past_groups() -> None:
    from strop.loops.past import Past
    from strop.rollout.episode import Group

    past = Past(load_config(None, data=recipe(**{"rollout.window.past": PAST})))
    past.give([Group(n, "", []) for n in (1, 2)], {})
    assert [g.number for g in past.join([Group(n, "", []) for n in (8, 9, 10, 11)], 2)] == [8, 1, 9, 10, 2, 11]
    found = observe(recipe(**{"rollout.window.past": PAST, "training.mini_batches": 2, "run.steps": 3}))
    assert found.error is None


def test_groups_that_teach_nothing_are_not_kept() -> None:
    data = recipe(**{"rollout.window.past": PAST, "run.steps": 3, "algorithm.without_spread": "drop"})
    put(data, "rewards.verifiers", [{"kind": "regex", "pattern": "[0-4]$"}])
    found = observe(data)
    assert found.run is not None
    kept = 0
    for step, records in records_by_step(found.run).items():
        by_group = defaultdict(set)
        for record in records:
            if not record.past:
                by_group[record.group].add(record.reward)
        kept += sum(len(rewards) > 1 for rewards in by_group.values())
        [line] = [line for kind, at, line in found.parts["metrics"] if kind == "train" and at == step]
        assert line["window/past_kept"] == min(kept, 9)
    assert 0 < kept < 12


@pytest.mark.parametrize("algorithm", ["grpo", "remax"])
def test_a_step_with_past_groups_is_replayed_bit_for_bit(algorithm: str) -> None:
    data = recipe(**{"rollout.window.past": PAST, "run.steps": 4, "algorithm.name": algorithm})
    put(data, "checkpoint", {"every": 1, "keep": 9})
    summary = train(load_config(None, data=data), fresh=True)
    found = replay(summary.folder, 4)
    assert found.equal, found.differences
    assert found.now["window/past_share"] > 0


# --- orders --------------------------------------------------------------------------------------------------------

AHEAD = {"rollout.max_staleness": 3, "run.steps": 8, "rollout.max_new_tokens": 12}


@pytest.mark.parametrize("order", ["admission", "ready", "tiny_choices:latest"])
@pytest.mark.parametrize("in_flight", [True, False])
def test_whatever_the_order_nothing_is_dropped_and_the_bound_holds(order: str, in_flight: bool) -> None:
    data = recipe(**{**AHEAD, "rollout.in_flight_updates": in_flight})
    put(data, "rollout.window", {"order": order})
    found = observe(data)
    assert found.run is not None
    assert found.error is None
    lines = [line for kind, _, line in found.parts["metrics"] if kind == "train"]
    assert max(line["staleness/max"] for line in lines) <= 3
    records = records_by_step(found.run)
    numbers = [number for step in records for number in sorted({record.group for record in records[step]})]
    assert sorted(numbers) == list(range(4 * 8))
    assert (numbers == sorted(numbers)) or order != "admission"
    if order == "tiny_choices:latest":
        assert numbers != sorted(numbers)
    told = ("window/forced" in lines[-1], any("window/length_bias" in line for line in lines))
    assert told == ((False, False) if order == "admission" else (True, True))


@pytest.mark.parametrize(
    ("window", "ahead"),
    [({}, 3), ({"order": "ready"}, 2), ({"order": "ready", "slack": 2}, 1), ({"order": "tiny_choices:latest"}, 2)],
)
def test_what_an_order_may_pass_over_is_taken_from_what_sampling_runs_ahead(
    window: dict[str, Any], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.rollout.windows import Windows

    furthest = 0
    serve = Windows.serve

    def noting(self: Any, version: int) -> None:
        nonlocal furthest
        serve(self, version)
        furthest = max(furthest, self.admission.started - 4 * version)

    monkeypatch.setattr(Windows, "serve", noting)
    found = observe(recipe(**{**AHEAD, "rollout.window": window}))
    assert found.error is None
    assert furthest == 4 * (ahead + 1)


def test_ready_is_warned_of_at_the_start() -> None:
    data = recipe(**{**AHEAD, "run.steps": 2, "tracking.display": "plain"})
    put(data, "rollout.window", {"order": "ready"})
    result = command_line(data)
    assert "trains short completions first" in " ".join(result.output.split())
    put(data, "rollout.window", {"order": "admission"})
    assert "short completions" not in command_line(data, "run.name=other").output


def test_a_run_in_another_order_resumes_with_what_was_under_way() -> None:
    data = recipe(**AHEAD)
    put(data, "rollout.window", {"order": "ready", "past": {"groups": 2, "max_age": 6}})
    command_line(data, "run.name=parts", "run.steps=3")
    command_line(data, "run.name=parts", "run.steps=8")
    records = records_by_step(Path("runs/parts"))
    numbers = [n for step in records for n in {record.group for record in records[step] if not record.past}]
    assert sorted(numbers) == list(range(4 * 8))
    assert all(
        step - 1 - int(record.versions[record.loss_mask].min()) <= (6 if record.past else 3)
        for step, found in records.items()
        for record in found
        if record.loss_mask.any()
    )


@pytest.mark.parametrize("order", ["admission", "ready"])
@pytest.mark.parametrize("fan_out", [WORLD, MATCH], ids=["branches", "roles"])
def test_episodes_that_fan_out_are_trained_whole_ahead_of_training(fan_out: dict[str, Any], order: str) -> None:
    data = recipe(**{**fan_out, "rollout.max_staleness": 2, "run.steps": 6, "rollout.window.order": order})
    found = observe(data)
    assert found.run is not None
    assert found.error is None
    lines = [line for kind, _, line in found.parts["metrics"] if kind == "train"]
    records = records_by_step(found.run)
    assert sorted(n for step in records for n in {r.group for r in records[step]}) == list(range(4 * 6))
    assert max(line["staleness/max"] for line in lines) > 0
    for line, own in zip(lines, records.values(), strict=True):
        assert line["staleness/max"] <= 2
        # Each sampled token is in one stream, in which it is trained.
        assert line["tokens/trained"] == line["tokens/sampled"] == sum(int(r.loss_mask.sum()) for r in own)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout.window.order": "ready"}, r"`rollout.window.order` has no effect with rollout.max_staleness: 0"),
        ({"rollout.window.order": "tiny_choices:latest"}, r"`rollout.window.order` has no effect"),
        ({"rollout.window.order": "ready", "rollout.max_staleness": 1}, "lets no group wait for another"),
        ({"rollout.window.order": "reday", **AHEAD}, 'did you mean "ready"'),
        ({"rollout.window.order": "tiny_choices:missing", **AHEAD}, "has no function 'missing'"),
        ({"rollout.window.order": "tiny_choices:alone", **AHEAD}, "cannot be called as"),
        ({"rollout.window.slack": 1, **AHEAD}, r"`rollout.window.slack` has no effect with order: admission"),
        ({"rollout.window": {"order": "ready", "slack": 3}, **AHEAD}, r"has to be less than max_staleness \(3\)"),
        ({"rollout.window": {"order": "ready"}, **AHEAD, "rollout.update_every": 4}, r"can be at most 3 here"),
        ({"rollout.window.past": {}}, r"rollout.window.past.groups"),
        ({"rollout.window.past": {"groups": 3, "keep": 2}}, r"keep \(2\) is less than groups \(3\)"),
        ({"rollout.window.past": {**PAST, "max_age": 3}, **AHEAD}, r"has to be more than max_staleness \(3\)"),
        ({"rollout.window.past": {**PAST, "exponent": 2.0}}, r"past.exponent` has no effect with select: uniform"),
        (
            {"rollout.window.past": {**PAST, "priority": "advantage"}},
            r"past.priority` has no effect with select: uniform",
        ),
        ({"rollout.window.past": {**PAST, "strata": 3}}, r"past.strata` has no effect with select: uniform"),
        ({"rollout.window.past": {**PAST, "select": "tiny_choices:latest"}}, r"rollout.window.past.select"),
        ({"rollout.window.past": PAST, "offline": {}}, r"`rollout.window.past` has no effect with `offline`"),
        ({"rollout.window.order": "ready", "offline": {}}, r"`rollout.window.order` has no effect with `offline`"),
    ],
)
def test_what_cannot_be_or_changes_nothing_is_refused(changes: dict[str, Any], says: str) -> None:
    import re

    found = observe(recipe(**changes))
    assert found.run is None
    assert re.search(says, str(found.error)), found.error


def test_a_function_that_returns_what_it_must_not_ends_the_run_with_the_place() -> None:
    found = observe(recipe(**{**AHEAD, "rollout.window.order": "tiny_choices:unknown"}))
    assert "rollout.window.order" in str(found.error)
    assert "not everything is the number of a group" in str(found.error)
