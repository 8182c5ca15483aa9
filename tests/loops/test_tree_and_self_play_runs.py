"""Runs whose episodes branch, and runs in which the policy plays two roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import put, recipe, steps_of

from strop.config.loading import load_config
from strop.errors import UserError
from strop.loops.replay import replay
from strop.loops.train import train
from strop.tracking.episodes import read_episodes


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


def branching(**changes: Any) -> dict[str, Any]:
    data = recipe(
        **{
            "environment": {"kind": "python", "factory": "tiny_worlds:Forks", "max_turn_tokens": 2},
            "rollout": {
                "groups_per_step": 4,
                "group_size": 2,
                "max_new_tokens": 12,
                "tree": {"at": [1], "branches": 3},
            },
            "rewards.verifiers": [{"kind": "environment"}],
        }
    )
    for key, value in changes.items():
        put(data, key, value)
    return data


def test_a_run_with_branches_trains_each_sampled_token_once() -> None:
    summary = train(load_config(None, data=branching()), fresh=True)
    metrics = [line for kind, _, line in steps_of(summary.folder) if kind == "train"]
    assert len(metrics) == 2
    for line in metrics:
        assert line["tokens/trained"] == line["tokens/sampled"]
    records = read_episodes(summary.folder / "episodes" / "step-000001.parquet")
    # Of each tree, the trunk with one leaf, and the other leaves.
    assert len({(record.group, record.sample) for record in records}) == 4 * 2 * 3
    assert len(records) == 4 * 2 * (3 + 1)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp", "dapo", "remax"])
def test_other_algorithms_take_branches_too(algorithm: str) -> None:
    assert train(load_config(None, data=branching(**{"algorithm.name": algorithm})), fresh=True).steps == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"environment": None, "rewards.verifiers": [{"kind": "exact"}]}, "without `environment`"),
        ({"environment.factory": "tiny_worlds:Asks"}, "cannot branch"),
        ({"environment": {"kind": "self_play", "factory": "tiny_worlds:Echoes"}}, "exclude each other"),
        ({"rollout.tree.at": [8]}, "ends before it"),
        ({"rollout.tree.at": [2, 1]}, "in order"),
        ({"rollout.tree.branches": 1}, "whole number of at least 2"),
    ],
)
def test_branches_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        train(load_config(None, data=branching(**changes)), fresh=True)


def test_steps_with_branches_are_not_replayed() -> None:
    summary = train(load_config(None, data=branching()), fresh=True)
    with pytest.raises(UserError, match="environment gave rewards"):
        replay(summary.folder, 1)


def matched(**changes: Any) -> dict[str, Any]:
    data = recipe(
        **{
            "model.create": {"characters": "12=", "hidden_size": 32, "layers": 2, "heads": 2, "context": 32},
            "data.train": {"path": "prompts.jsonl"},
            "environment": {"kind": "self_play", "factory": "tiny_worlds:Copies"},
            "rollout": {"groups_per_step": 8, "group_size": 8, "max_new_tokens": 1},
            "rewards.verifiers": [{"kind": "environment"}],
            "training.optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
            "run.steps": 40,
        }
    )
    for key, value in changes.items():
        put(data, key, value)
    return data


def test_two_roles_learn_to_agree(workplace: Path) -> None:
    (workplace / "prompts.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    summary = train(load_config(None, data=matched()), fresh=True)
    metrics = [line for kind, _, line in steps_of(summary.folder) if kind == "train"]
    assert metrics[0]["reward/role/copier"] < 0.6
    assert sum(line["reward/role/copier"] for line in metrics[-5:]) / 5 > 0.9
    records = read_episodes(summary.folder / "episodes" / "step-000001.parquet")
    assert {record.row["role"] for record in records} == {"writer", "copier"}


def test_a_match_has_no_most_likely_completion(workplace: Path) -> None:
    (workplace / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(UserError, match="a match has none"):
        train(load_config(None, data=matched(**{"algorithm.name": "remax"})), fresh=True)


def test_the_column_of_roles_is_the_matchs_own(workplace: Path) -> None:
    (workplace / "prompts.jsonl").write_text('{"prompt": "1", "role": "x"}\n')
    with pytest.raises(UserError, match="has one already"):
        train(load_config(None, data=matched()), fresh=True)


def test_verifiers_may_be_of_one_role(workplace: Path) -> None:
    (workplace / "prompts.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    verifiers = [
        {"kind": "regex", "name": "ones", "pattern": "1", "when": {"role": "writer"}},
        {"kind": "regex", "name": "twos", "pattern": "2", "when": {"role": "copier"}},
    ]
    summary = train(load_config(None, data=matched(**{"rewards.verifiers": verifiers, "run.steps": 1})), fresh=True)
    for record in read_episodes(summary.folder / "episodes" / "step-000001.parquet"):
        assert list(record.components) == [{"writer": "ones", "copier": "twos"}[record.row["role"]]]
