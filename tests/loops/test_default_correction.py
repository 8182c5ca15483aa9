"""What is corrected where a recipe samples ahead and says nothing of it."""

from __future__ import annotations

from typing import Any

import pytest

from strop.algorithms.policy_gradient import PolicyGradient
from strop.config import Config
from strop.loops.algorithm import make_algorithm


def algorithm_of(staleness: int, **algorithm: Any) -> PolicyGradient:
    config = Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": {"path": "questions.jsonl"}},
            "rewards": {"verifiers": [{"kind": "exact"}]},
            "rollout": {"max_staleness": staleness},
            "algorithm": algorithm,
        }
    )
    made: Any = make_algorithm(config)
    return made


def choices(algorithm: PolicyGradient) -> tuple[Any, ...]:
    return (algorithm.correction, algorithm.correction_high, algorithm.correction_off_policy)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo"])
def test_old_tokens_are_weighed_and_sequences_that_moved_on_are_left_alone(name: str) -> None:
    assert choices(algorithm_of(1, name=name)) == ("truncate", 2.0, 0.1)
    assert algorithm_of(1, name=name).needs_old_logprobs


def test_nothing_is_corrected_without_old_tokens_or_where_the_recipe_says_so() -> None:
    assert choices(algorithm_of(0)) == (None, None, None)
    assert choices(algorithm_of(1, correction={"kind": "none"})) == (None, None, None)


def test_what_a_recipe_says_is_all_there_is() -> None:
    band = {"kind": "band", "low": 0.5, "high": 5.0}
    assert choices(algorithm_of(2, correction=band)) == ("band", 5.0, None)
    assert choices(algorithm_of(2, correction={"off_policy": 0.3})) == (None, None, 0.3)


def test_a_loss_without_advantages_has_the_weights_alone() -> None:
    assert choices(algorithm_of(1, name="gkd", teacher="teacher")) == ("truncate", 2.0, None)


def test_an_algorithm_that_weighs_tokens_itself_is_left_as_it_is() -> None:
    assert choices(algorithm_of(1, name="topr")) == choices(algorithm_of(0, name="topr"))
