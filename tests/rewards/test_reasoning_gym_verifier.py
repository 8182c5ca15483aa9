"""The verifier `reasoning_gym`, with the package's own tasks, in worker processes too."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from strop.config.adapted_rewards import ReasoningGymVerifier
from strop.config.data import DataSource
from strop.config.rewards import RewardSettings
from strop.data.gym import open_gym
from strop.rewards.build import build_scorer
from strop.rewards.protocol import Completed, Verdict
from strop.rewards.reasoning_gym import ReasoningGym
from strop.tracking.rollouts import _plain

pytest.importorskip("reasoning_gym")
# Of each kind of answer one: numbers, words, grids, code, JSON, moves, and tasks without a reference answer.
TASKS = (
    "chain_sum",
    "leg_counting",
    "countdown",
    "spell_backward",
    "arc_agi",
    "rearc",
    "codeio",
    "string_synthesis",
    "tower_of_hanoi",
    "decimal_arithmetic",
    "word_ladder",
    "group_anagrams",
    "letter_counting",
    "maze",
)


@functools.cache
def rows(task: str, count: int = 3, **arguments: Any) -> list[dict[str, Any]]:
    found = open_gym(DataSource(path=f"reasoning-gym:{task}", arguments={"size": count, **arguments}))
    return [found[i] for i in range(count)]


@functools.cache
def verifier(**settings: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGymVerifier(kind="reasoning_gym", **settings))


def verdict(row: dict[str, Any], completion: str, **settings: Any) -> Verdict:
    return verifier(**settings).verify([Completed(row["prompt"], completion, row=row)])[0]


def test_right_answers_are_worth_one_even_from_a_file() -> None:
    mixture = open_gym(DataSource(path="reasoning-gym:" + "+".join(TASKS), arguments={"size": 80}))
    seen = set()
    for row in (mixture[i] for i in range(80)):
        assert verdict(row, row["answer"]).score == 1.0, row["task"]
        assert verdict(row, "no").score != 1.0
        # As `strop rollout` writes rows, and as they are read again.
        again = json.loads(json.dumps(row, default=_plain))
        assert verdict(again, row["answer"]).score == 1.0, row["task"]
        seen.add(row["task"])
    assert seen == set(TASKS)


def test_partial_credit_is_the_task_s() -> None:
    row = rows("chain_sum")[0]
    hedged = f"{row['answer']} I think"
    assert verdict(row, hedged).score == pytest.approx(len(row["answer"]) / len(hedged))


def test_what_the_answer_is() -> None:
    row = rows("chain_sum")[0]
    right, wrong = row["answer"], "x"
    tagged = f"<answer>{wrong}</answer> then <answer> {right} </answer> and more"
    assert verdict(row, tagged).score == 1.0
    assert verdict(row, tagged, take="tag").score == 1.0
    assert 0 < verdict(row, tagged, take="whole").score < 1  # type: ignore[operator]
    assert verdict(row, right, take="tag").score == 0.0
    assert verdict(row, f" {right}\n").score == 1.0


def test_arguments_that_scoring_depends_on_travel_with_the_row() -> None:
    exact, loose = (
        rows("decimal_arithmetic", 1, min_num_decimal_places=n, max_num_decimal_places=n)[0] for n in (6, 2)
    )
    assert exact["task_arguments"] != loose["task_arguments"]
    for row in (exact, loose):
        near = str(float(row["answer"]) + 0.001)
        assert verdict(row, row["answer"]).score == 1.0
        assert (verdict(row, near).score == 1.0) == (row is loose)


def test_an_answer_that_the_task_cannot_read_is_wrong_and_said_to_be() -> None:
    found = verdict(rows("prime_factorization")[0], "seven")
    assert (found.score, found.status) == (0.0, "ok")
    assert "ValueError" in found.detail


def test_a_row_of_another_source_is_an_error() -> None:
    for row in ({"prompt": "1+1=", "answer": "2"}, {"prompt": "?", "task": "no_such", "metadata": {}}):
        found = verdict(row, "2")
        assert (found.score, found.status) == (None, "verifier_error")


async def test_in_workers_a_task_that_hangs_is_a_time_out_of_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time, reasoning_gym\n"
        "from reasoning_gym.arithmetic.chain_sum import ChainSumDataset\n"
        "old = ChainSumDataset.score_answer\n"
        "def slow(self, answer, entry):\n"
        "    while answer == 'hang': time.sleep(0.01)\n"
        "    return old(self, answer, entry)\n"
        "ChainSumDataset.score_answer = slow\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = RewardSettings(verifiers=[ReasoningGymVerifier(kind="reasoning_gym", timeout=3.0)], retries=0, workers=1)
    scorer = build_scorer(settings)
    made = rows("chain_sum")
    given = [
        Completed(row["prompt"], text, row=row)
        for row, text in zip(made, (made[0]["answer"], "hang", made[2]["answer"]), strict=True)
    ]
    try:
        found = await asyncio.wait_for(scorer.score(given), 60)
    finally:
        await scorer.close()
    assert [reward.status for reward in found] == ["ok", "timeout", "ok"]
    assert [found[0].total, found[2].total] == [1.0, 1.0]
