"""Tasks of Reasoning Gym as data, made by the package itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

from strop.config.data import DataSource
from strop.data.gym import check_apart, open_gym
from strop.data.sources import detect, open_source
from strop.errors import DataError, MissingExtra

reasoning_gym = pytest.importorskip("reasoning_gym")
SUMS = {"size": 20, "seed": 5, "min_terms": 2, "max_terms": 2, "max_digits": 1}


def source(path: str = "reasoning-gym:chain_sum", **settings: Any) -> Any:
    return open_source(DataSource(path=path, **settings))


def error_of(path: str = "reasoning-gym:chain_sum", **arguments: Any) -> DataError:
    with pytest.raises(DataError) as error:
        source(path, arguments=arguments)
    return error.value


def test_rows_are_those_of_the_package() -> None:
    assert detect("reasoning-gym:chain_sum") == "reasoning_gym"
    found = source(arguments=SUMS)
    made = reasoning_gym.create_dataset("chain_sum", **SUMS)
    assert len(found) == 20
    for row, entry in zip((found[i] for i in range(20)), made, strict=True):
        assert (row["prompt"], row["answer"], row["metadata"]) == (
            entry["question"],
            entry["answer"],
            entry["metadata"],
        )
        assert row["task"] == "chain_sum"
        assert row["task_arguments"] == {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    assert found.columns == ["prompt", "answer", "task", "task_arguments", "metadata"]


def test_a_mixture_is_the_package_s_composite() -> None:
    arguments = {"size": 30, "seed": 3, "chain_sum": {"max_terms": 2, "weight": 3.0}}
    found = source("reasoning-gym:chain_sum+leg_counting", arguments=arguments)
    from reasoning_gym.composite import DatasetSpec

    made = reasoning_gym.create_dataset(
        "composite",
        size=30,
        seed=3,
        datasets=[DatasetSpec("chain_sum", 3.0, {"max_terms": 2}), DatasetSpec("leg_counting", 1.0, {})],
    )
    assert [found[i]["prompt"] for i in range(30)] == [entry["question"] for entry in made]
    tasks = [found[i]["task"] for i in range(30)]
    assert tasks.count("chain_sum") > tasks.count("leg_counting") > 0
    assert {tuple(found[i]["task_arguments"]) for i in range(30)} == {("max_terms",), ()}


def test_the_seed_has_a_default_and_the_limit_makes_fewer() -> None:
    few = source(limit=4)
    made = reasoning_gym.create_dataset("chain_sum", size=500, seed=0)
    assert [few[i]["prompt"] for i in range(len(few))] == [made[i]["question"] for i in range(4)]


def test_rows_are_the_same_in_every_process() -> None:
    """Two of these tasks go through sets, the third draws from Python's own random numbers: left alone, the package
    makes other rows in another process."""
    path = "reasoning-gym:ransom_note+isomorphic_strings+list_functions"
    code = f"""
from strop.config.data import DataSource
from strop.data.gym import open_gym
print(open_gym(DataSource(path="{path}", arguments={{"size": 30}})).fingerprint)
"""
    here = open_gym(DataSource(path=path, arguments={"size": 30})).fingerprint
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == here


def test_a_task_that_there_is_not_is_told_the_nearest() -> None:
    error = error_of("reasoning-gym:chain_sums")
    assert error.what == "Reasoning Gym has no task 'chain_sums'"
    assert "'chain_sum'" in error.mend
    assert "no task" in error_of("reasoning-gym:").what
    assert "a task twice" in error_of("reasoning-gym:chain_sum+chain_sum").what
    assert "no task 'composite'" in error_of("reasoning-gym:composite").what


def test_wrong_arguments_are_told_before_anything_is_made() -> None:
    error = error_of(min_term=2)
    assert (error.where, "'min_terms'" in error.mend) == ("arguments.min_term", True)
    assert "max_terms must be >= min_terms" in error_of(min_terms=9).what
    assert error_of(size=0).where == "arguments.size"
    assert error_of(seed="x").where == "arguments.seed"
    mixed = "reasoning-gym:chain_sum+leg_counting"
    assert error_of(mixed, min_terms=2).where == "arguments.min_terms"
    assert error_of(mixed, chain_sum={"min_term": 2}).where == "arguments.chain_sum.min_term"
    assert error_of(mixed, chain_sum={"seed": 2}).where == "arguments.chain_sum.seed"
    assert error_of(mixed, chain_sum={"weight": 0}).where == "arguments.chain_sum.weight"
    assert error_of(mixed, chain_sum=3).where == "arguments.chain_sum"


def test_held_out_rows_that_are_rows_of_the_training_are_refused() -> None:
    def of(**arguments: Any) -> DataSource:
        return DataSource(path="reasoning-gym:chain_sum", arguments={"size": 100, **arguments})

    with pytest.raises(DataError, match=r"90 held-out rows of 'chain_sum' are rows of the training") as error:
        check_apart(of(seed=0), of(seed=10))
    assert "1200" in error.value.mend
    check_apart(of(seed=0), of(seed=1200))
    check_apart(of(seed=0), of(seed=10, max_terms=3))
    check_apart(of(seed=0), DataSource(path="rows.jsonl"))
    check_apart(of(seed=0), of(seed=100))
    mixture = DataSource(path="reasoning-gym:leg_counting+chain_sum", arguments={"size": 100, "seed": 0})
    with pytest.raises(DataError, match="98 held-out rows of 'chain_sum'"):
        check_apart(of(seed=0), mixture)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(MissingExtra) as error:
        source()
    assert "strop[gym]" in error.value.mend
