"""A curriculum in a run: what a window tells it, which prompts then come, and that a run goes on with what it knew."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import HELD_OUT, episodes_of, recipe, steps_of, weights_of

from strop.config import Config
from strop.config.loading import load_config
from strop.data.curriculum import Curriculum
from strop.errors import UserError
from strop.loops.curriculum import has_passed, record_window
from strop.loops.prepare import prepare
from strop.loops.replay import replay
from strop.loops.train import train
from strop.rollout.episode import Episode, Group, Status

ROWS = 12
RARELY = [{"kind": "regex", "pattern": "[0-4]$"}]
# Half of the prompts are always passed, the others never: what they begin with decides.
DECIDED = {
    "rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:first_digit"}],
    "data.curriculum": {"passes_at": 0.45},
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


def of_a_curriculum(**changes: Any) -> dict[str, Any]:
    given = {
        "data.train.arguments.count": ROWS,
        "data.curriculum": {},
        "rewards.verifiers": RARELY,
        "rollout.group_size": 2,
        "run.steps": 12,
        "run.name": "r",
    }
    return recipe(**{**given, **changes})


def trained(**changes: Any) -> Path:
    return train(load_config(None, data=of_a_curriculum(**changes)), fresh=True).folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [metrics for kind, _, metrics in steps_of(run) if kind == "train"]


def prompts_of(run: Path) -> list[str]:
    """The prompt of each group that was trained, in order."""
    return [record.prompt_id for record in episodes_of(run) if record.sample == 0]


# What a window tells


def config_with(**changes: Any) -> Config:
    return load_config(None, data=of_a_curriculum(**changes))


def episode(reward: float, correct: bool | None, status: Status = Status.STOP, *, row: int = 0) -> Episode:
    return Episode(0, 0, prompt_id=f"row-{row:06d}", status=status, reward=reward, correct=correct)


def test_what_is_correct_has_passed_and_what_could_not_be_verified_is_nothing() -> None:
    config = config_with()
    assert has_passed(episode(0.2, True), config) is True
    assert has_passed(episode(1.0, False, Status.LENGTH), config) is False
    for status in (Status.VERIFIER_ERROR, Status.TIMEOUT, Status.ENVIRONMENT_ERROR, Status.ABORTED):
        assert has_passed(episode(math.nan, None, status), config) is None
    # The verifier that says what is correct does not apply to the row.
    assert has_passed(episode(1.0, None), config) is True
    assert has_passed(episode(0.9, None), config) is False


def test_a_threshold_of_the_reward_goes_before_what_is_correct() -> None:
    config = config_with(**{"data.curriculum": {"passes_at": 0.5}})
    assert has_passed(episode(0.5, False), config) is True
    assert has_passed(episode(0.4, True), config) is False


def test_replaced_groups_are_told_first_and_failures_not_at_all() -> None:
    config = config_with(**{"data.curriculum": {"memory": 1}})
    assert config.data.curriculum is not None
    found = Curriculum(config.data.curriculum, 4, seed=0, group_size=2)
    right, wrong = episode(1.0, True), episode(0.0, False)
    failed = episode(math.nan, None, Status.VERIFIER_ERROR)
    groups = [Group(0, "row-000001", [right, wrong]), Group(1, "row-000002", [failed, failed])]
    discarded = [Group(0, "row-000001", [wrong, wrong]), Group(1, "row-000003", [right, failed])]
    record_window(found, groups, discarded, config)
    # Of row 1 the later group is remembered; row 2 has no attempt, and row 3 has one where two are needed.
    assert [found.standing(row)[0] for row in range(4)] == ["unknown", "open", "unknown", "unknown"]
    record_window(found, [Group(2, "row-000003", [right, right])], [], config)
    assert found.standing(3)[0] == "solved"


# In a run


def test_every_prompt_is_tried_or_counted_and_the_run_never_stands_still(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(**DECIDED, **{"tracking.display": "plain"})
    prompts, metrics = prompts_of(run), metrics_of(run)
    # Nothing is known in the first epoch; after it, all is.
    assert Counter(prompts[:ROWS]) == Counter(f"row-{row:06d}" for row in range(ROWS))
    assert len(prompts) == 12 * 4
    skipped = [step["curriculum/skipped_solved"] + step["curriculum/skipped_failed"] for step in metrics]
    assert skipped[:3] == [0, 0, 0]
    assert min(skipped[3:]) > 0
    assert [step["curriculum/known"] for step in metrics[:4]] == [4, 8, 12, 12]
    assert metrics[-1]["curriculum/solved"] + metrics[-1]["curriculum/failed"] == ROWS
    assert 0 < metrics[-1]["curriculum/solved"] < ROWS
    assert metrics[-1]["curriculum/pass_rate"] == metrics[-1]["curriculum/solved"] / ROWS
    latest = run / "checkpoints" / "step-000012" / "state"
    cursor = json.loads((latest / "state.json").read_text())["prompts"]["cursor"]
    assert cursor["epoch"] * ROWS + cursor["position"] == len(prompts) + sum(skipped)
    assert capsys.readouterr().out.count("the curriculum has run out of prompts") == 1


def test_it_trains_on_other_prompts_than_without_and_says_nothing_while_some_are_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_it = trained(**{"tracking.display": "plain"})
    without = trained(**{"data.curriculum": None})
    assert "run out of prompts" not in capsys.readouterr().out
    assert prompts_of(with_it)[:ROWS] == prompts_of(without)[:ROWS]
    assert prompts_of(with_it) != prompts_of(without)
    assert not any(name.startswith("curriculum/") for name in metrics_of(without)[-1])
    # The share of groups that teach nothing is what it is for.
    flat = [sum(step["advantage/zero_share"] for step in metrics_of(run)[3:]) for run in (with_it, without)]
    assert flat[0] < flat[1]


def test_held_out_prompts_are_those_of_the_data() -> None:
    runs = [trained(**{"data.eval": HELD_OUT, "run.steps": 1, "data.curriculum": on}) for on in ({}, None)]
    assert [line for line in steps_of(runs[0]) if line[0] == "eval"] == [
        line for line in steps_of(runs[1]) if line[0] == "eval"
    ]


def test_more_steps_are_those_that_a_longer_run_would_have_had() -> None:
    changes = {"algorithm.without_spread": "resample", "algorithm.max_refills": 2, "checkpoint.every": 5}
    whole = trained(**changes, **{"run.name": "whole"})
    trained(**changes, **{"run.name": "parts", "run.steps": 5})
    parts = train(load_config(None, data=of_a_curriculum(**changes, **{"run.name": "parts"}))).folder
    assert steps_of(whole) == steps_of(parts)
    assert prompts_of(whole) == prompts_of(parts)
    assert weights_of(whole) == weights_of(parts)
    skipped = sum(value for step in metrics_of(whole) for name, value in step.items() if "skipped" in name)
    assert skipped > 10
    # Groups that were replaced are known too.
    assert metrics_of(whole)[0]["curriculum/known"] > 4


def test_a_step_can_be_trained_again() -> None:
    run = trained(**{"checkpoint.every": 1, "checkpoint.keep": 20})
    found = replay(run, 9)
    assert found.equal, found.differences
    assert not any("curriculum" in name for name in found.before)


# Where it has no effect


def offline() -> dict[str, Any]:
    data = of_a_curriculum(**{"data.train": {"path": "rows.jsonl"}, "offline": {}})
    del data["rewards"], data["rollout"]
    return data


def supervised() -> dict[str, Any]:
    data = of_a_curriculum(**{"supervised": {"method": "sft"}})
    del data["rewards"], data["rollout"]
    return data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(offline(), "`data.curriculum` has no effect with `offline`", id="offline"),
        pytest.param(supervised(), "`data.curriculum` has no effect with `supervised`", id="supervised"),
        pytest.param(
            of_a_curriculum(**{"data.curriculum": {"min_attempts": 5}}), "no prompt ever gets 5 attempts", id="attempts"
        ),
    ],
)
def test_where_it_would_change_nothing_it_is_refused(data: dict[str, Any], says: str, place: Path) -> None:
    with pytest.raises(UserError) as error:
        train(load_config(None, data=data))
    assert says in str(error.value)
    assert list(place.iterdir()) == []


def test_attempts_that_can_be_had_are_accepted() -> None:
    prepare(config_with(**{"data.curriculum": {"min_attempts": 4}}))
