"""The scorer: sums, time-outs, retries, injected faults and the error budget (P6: a failure is not a wrong answer)."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.config.rewards import RewardSettings
from strop.errors import RunFailure, UserError
from strop.rewards.build import build_scorer
from strop.rewards.composition import CompositeScorer, check_errors
from strop.rewards.protocol import Completed, Reward, Verdict


class Fake:
    """A verifier that answers by a function of the batch and counts its calls."""

    def __init__(self, name: str, answer: Callable[[Sequence[Completed]], list[Verdict]]) -> None:
        self.name = name
        self.answer = answer
        self.calls: list[list[str]] = []

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        self.calls.append([item.completion for item in completed])
        return self.answer(completed)


def always(*verdicts: Verdict) -> Callable[[Sequence[Completed]], list[Verdict]]:
    return lambda completed: [verdicts[index % len(verdicts)] for index in range(len(completed))]


def crash(completed: Sequence[Completed]) -> list[Verdict]:
    raise ValueError("injected")


def scorer(*fakes: Fake, weights: Sequence[float] = (), **settings: Any) -> CompositeScorer:
    entries = [
        {"kind": "exact", "name": fake.name, "weight": weights[i] if weights else 1.0} for i, fake in enumerate(fakes)
    ]
    return CompositeScorer(list(fakes), RewardSettings.model_validate({"verifiers": entries, **settings}))


def completions(count: int) -> list[Completed]:
    return [Completed(prompt="", completion=str(index)) for index in range(count)]


async def test_the_total_is_the_weighted_sum() -> None:
    a, b = Fake("a", always(Verdict(1.0), Verdict(0.0))), Fake("b", always(Verdict(0.5)))
    rewards = await scorer(a, b, weights=[2.0, -1.0]).score(completions(2))
    assert [reward.total for reward in rewards] == [1.5, -0.5]
    assert [reward.correct for reward in rewards] == [True, False]
    assert rewards[0].components == {"a": 1.0, "b": 0.5}
    assert {reward.status for reward in rewards} == {"ok"}


async def test_correct_at_is_about_the_first_verifier() -> None:
    a, b = Fake("a", always(Verdict(0.5))), Fake("b", always(Verdict(9.0)))
    assert (await scorer(a, b).score(completions(1)))[0].correct is False
    assert (await scorer(a, b, correct_at=0.5).score(completions(1)))[0].correct is True


async def test_a_verifier_that_does_not_apply_is_left_out() -> None:
    a, b = Fake("a", always(Verdict(None))), Fake("b", always(Verdict(0.5)))
    (reward,) = await scorer(a, b).score(completions(1))
    assert (reward.total, reward.components, reward.correct, reward.status) == (0.5, {"b": 0.5}, None, "ok")
    (nothing,) = await scorer(a).score(completions(1))
    assert nothing.status == "verifier_error"
    assert math.isnan(nothing.total)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, 1e200, -1e16])
async def test_a_score_that_is_no_number_is_an_error(score: float) -> None:
    a, b = Fake("a", always(Verdict(1.0))), Fake("b", always(Verdict(score)))
    (reward,) = await scorer(a, b).score(completions(1))
    assert (reward.status, reward.failed, reward.components, reward.correct) == (
        "verifier_error",
        "b",
        {"a": 1.0},
        None,
    )
    assert math.isnan(reward.total)


async def test_so_is_a_component_that_is_none_and_texts_are_such_as_files_can_hold() -> None:
    (reward,) = await scorer(Fake("a", always(Verdict(1.0, components={"b": 1e308})))).score(completions(1))
    assert (reward.status, reward.detail) == ("verifier_error", "a: component 'b' is 1e+308")
    odd = Verdict(1.0, detail="\ud800 odd", components={"\ud800": 0.5})
    (reward,) = await scorer(Fake("a", always(odd))).score(completions(1))
    assert (reward.total, reward.status) == (1.0, "ok")
    assert "odd" in reward.detail
    f"{reward.detail} {reward.components}".encode()


async def test_a_sum_that_overflows_is_an_error() -> None:
    (reward,) = await scorer(Fake("a", always(Verdict(1e14))), weights=[1e300]).score(completions(1))
    assert (reward.status, math.isnan(reward.total)) == ("verifier_error", True)


async def test_a_crash_is_an_error_with_its_line() -> None:
    (reward,) = await scorer(Fake("a", crash)).score(completions(1))
    assert reward.status == "verifier_error"
    assert reward.detail.startswith("a: ValueError: injected (")
    assert "test_scorer.py:" in reward.detail


async def test_sys_exit_in_a_verifier_is_an_error() -> None:
    (reward,) = await scorer(Fake("a", lambda completed: sys.exit(1))).score(completions(1))
    assert reward.status == "verifier_error"


async def test_no_failure_is_ever_a_reward_of_zero() -> None:
    """Injected faults: 5 % crash, 5 % hang, 5 % are NaN; every other reward is what it would be without them."""
    draw = random.Random(7)
    faults = {index: draw.choices(["", "crash", "hang", "nan"], [85, 5, 5, 5])[0] for index in range(200)}
    assert set(faults.values()) == {"", "crash", "hang", "nan"}
    released = threading.Event()

    def answer(completed: Sequence[Completed]) -> list[Verdict]:
        (item,) = completed
        fault = faults[int(item.completion)]
        if fault == "crash":
            raise RuntimeError("injected")
        if fault == "hang":
            released.wait(60)
        return [Verdict(math.nan if fault == "nan" else 1.0)]

    judge = scorer(Fake("judge", answer), timeout=0.5, retries=0, workers=8)
    try:
        rewards = [r for (r,) in await asyncio.gather(*(judge.score([item]) for item in completions(200)))]
    finally:
        released.set()
    expected = {"": "ok", "crash": "verifier_error", "hang": "timeout", "nan": "verifier_error"}
    assert [reward.status for reward in rewards] == [expected[faults[index]] for index in range(200)]
    assert all(reward.total == 1.0 if reward.status == "ok" else math.isnan(reward.total) for reward in rewards)


async def test_only_what_failed_is_asked_again() -> None:
    tries: dict[str, int] = {}

    def answer(completed: Sequence[Completed]) -> list[Verdict]:
        for item in completed:
            tries[item.completion] = tries.get(item.completion, 0) + 1
        return [
            Verdict(None, "verifier_error", "not yet")
            if int(item.completion) % 2 and tries[item.completion] < 3
            else Verdict(float(item.completion))
            for item in completed
        ]

    judge = Fake("judge", answer)
    rewards = await scorer(judge, retries=2).score(completions(4))
    assert [reward.total for reward in rewards] == [0.0, 1.0, 2.0, 3.0]
    assert judge.calls == [["0", "1", "2", "3"], ["1", "3"], ["1", "3"]]
    tries.clear()
    rewards = await scorer(Fake("judge", answer), retries=1).score(completions(2))
    assert [reward.status for reward in rewards] == ["ok", "verifier_error"]


async def test_a_run_failure_passes_and_is_not_retried() -> None:
    def answer(completed: Sequence[Completed]) -> list[Verdict]:
        raise RunFailure("wrong count")

    judge = Fake("judge", answer)
    with pytest.raises(RunFailure, match="wrong count"):
        await scorer(judge, Fake("other", always(Verdict(1.0))), retries=3).score(completions(1))
    assert len(judge.calls) == 1


async def test_a_verifier_that_breaks_its_contract_stops_the_run() -> None:
    with pytest.raises(RunFailure, match="1 verdicts for 2 completions"):
        await scorer(Fake("a", lambda completed: [Verdict(1.0)])).score(completions(2))


async def test_a_hang_does_not_hold_up_the_others() -> None:
    released = threading.Event()

    def hang(completed: Sequence[Completed]) -> list[Verdict]:
        released.wait(60)
        return [Verdict(1.0) for _ in completed]

    def quick_after_hang(completed: Sequence[Completed]) -> list[Verdict]:
        return hang(completed) if completed[0].completion == "0" else [Verdict(1.0)]

    judge = scorer(Fake("judge", quick_after_hang), timeout=0.2, retries=1, workers=1)
    try:
        rewards = [r for (r,) in await asyncio.gather(*(judge.score([item]) for item in completions(4)))]
    finally:
        released.set()
    assert [reward.status for reward in rewards] == ["timeout", "ok", "ok", "ok"]


async def test_a_verdict_in_time_counts_though_the_loop_was_busy() -> None:
    go = threading.Event()

    def answer(completed: Sequence[Completed]) -> list[Verdict]:
        go.wait(60)
        return [Verdict(1.0)]

    judge = Fake("judge", answer)
    question = asyncio.create_task(scorer(judge, timeout=0.2, retries=0).score(completions(1)))
    while not judge.calls:
        await asyncio.sleep(0)
    go.set()
    time.sleep(0.4)  # A training step, say, which does not let the loop run.
    assert (await question)[0].status == "ok"


async def test_at_most_so_many_calls_at_once() -> None:
    lock = threading.Lock()
    together = threading.Barrier(3)
    running = most = 0

    def answer(completed: Sequence[Completed]) -> list[Verdict]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(30)  # Passed only by three calls that run at the same time.
        with lock:
            running -= 1
        return [Verdict(1.0)]

    judge = scorer(Fake("judge", answer), workers=3)
    rewards = await asyncio.gather(*(judge.score([item]) for item in completions(12)))
    assert [reward.status for (reward,) in rewards] == ["ok"] * 12
    assert most == 3


def test_one_scorer_serves_several_event_loops() -> None:
    judge = scorer(Fake("judge", always(Verdict(1.0))), workers=1)

    async def both() -> list[Any]:
        return await asyncio.gather(*(judge.score(completions(1)) for _ in range(3)))

    assert len(asyncio.run(both())) == len(asyncio.run(both())) == 3


def test_a_hang_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    (tmp_path / "hanging_rewards.py").write_text(
        "import time\ndef reward(completions, **kwargs):\n    while True:\n        time.sleep(0.01)\n"
    )
    program = """
import asyncio
from strop.config.rewards import RewardSettings
from strop.rewards.build import build_scorer
from strop.rewards.protocol import Completed
verifiers = [{"kind": "python", "function": "hanging_rewards:reward"}]
scorer = build_scorer(RewardSettings.model_validate({"verifiers": verifiers, "timeout": 0.2}))
print(asyncio.run(scorer.score([Completed("", "")]))[0].status)
"""
    source = Path(sys.modules["strop.rewards.build"].__file__ or "").parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "timeout"), ended.stderr


async def test_every_kind_is_built_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe_rewards.py").write_text("def half(completions):\n    return [0.5] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    verifiers = [
        {"kind": "numeric", "weight": 10},
        {"kind": "exact"},
        {"kind": "regex", "pattern": "(?P<answer>[0-9]+)"},
        {"kind": "format", "tags": ["answer"], "name": "shape"},
        {"kind": "python", "function": "recipe_rewards:half"},
    ]
    built = build_scorer(RewardSettings.model_validate({"verifiers": verifiers}))
    right, wrong = await built.score(
        [Completed("", "<answer>12</answer>", answer=12), Completed("", "<answer>13</answer>", answer=12)]
    )
    assert right.components == {"numeric": 1.0, "exact": 0.0, "regex": 1.0, "shape": 1.0, "python": 0.5}
    assert (right.total, right.correct) == (12.5, True)
    assert (wrong.total, wrong.correct) == (1.5, False)
    await built.close()


def test_a_mistake_is_told_with_its_key() -> None:
    verifiers = [{"kind": "exact"}, {"kind": "regex", "pattern": "("}]
    with pytest.raises(UserError) as caught:
        build_scorer(RewardSettings.model_validate({"verifiers": verifiers}))
    assert caught.value.where == "rewards.verifiers.1.pattern"


SETTINGS = RewardSettings.model_validate({"verifiers": [{"kind": "exact"}], "max_error_share": 0.1})
GOOD = Reward(1.0, {"judge": 1.0}, True)


def bad(verifier: str = "judge", status: Any = "verifier_error", detail: str = "judge: broken") -> Reward:
    return Reward(math.nan, {}, None, status, detail, failed=verifier)


def test_the_budget_after_the_first_step() -> None:
    check_errors([GOOD] * 9 + [bad()], first_step=False, settings=SETTINGS)
    check_errors([], first_step=False, settings=SETTINGS)
    exactly = SETTINGS.model_copy(update={"max_error_share": 0.29})
    check_errors([GOOD] * 71 + [bad()] * 29, first_step=False, settings=exactly)
    with pytest.raises(RunFailure, match="2 of 10"):
        check_errors([GOOD] * 8 + [bad()] * 2, first_step=False, settings=SETTINGS)


def test_no_failure_in_the_first_step() -> None:
    check_errors([GOOD] * 10, first_step=True, settings=SETTINGS)
    with pytest.raises(RunFailure, match="first step"):
        check_errors([GOOD] * 99 + [bad()], first_step=True, settings=SETTINGS)


def test_the_failure_names_the_verifier_the_count_and_the_first_detail() -> None:
    rewards = [GOOD] * 4 + [bad("other"), bad(detail="judge: the first"), bad(detail="judge: x"), bad(status="timeout")]
    with pytest.raises(RunFailure) as caught:
        check_errors(rewards, first_step=False, settings=SETTINGS)
    for part in ("'judge'", "3 of 8", "verifier_error 2", "timeout 1", "1 more", "10%", "First: judge: the first"):
        assert part in caught.value.what


def test_time_outs_are_mended_by_time() -> None:
    with pytest.raises(RunFailure) as caught:
        check_errors([bad(status="timeout")], first_step=False, settings=SETTINGS)
    assert "rewards.timeout" in caught.value.mend


async def test_a_completion_to_which_no_verifier_applies_asks_for_a_verifier() -> None:
    verifiers = [{"kind": "exact", "when": {"role": "seller"}}]
    judged = build_scorer(RewardSettings.model_validate({"verifiers": verifiers}))
    rows = [{"role": "seller"}, {"role": "buyer"}, {"role": "buyer"}]
    rewards = await judged.score([Completed(prompt="", completion="1", answer="1", row=row) for row in rows])
    assert [reward.status for reward in rewards] == ["ok", "verifier_error", "verifier_error"]
    with pytest.raises(RunFailure) as caught:
        check_errors(rewards, first_step=True, settings=SETTINGS)
    assert "no verifier applies to 2 of 3 completions" in caught.value.what
    assert "every role" in caught.value.mend
    assert caught.value.where == "rewards.verifiers"


@pytest.mark.parametrize("status", ["environment_error", "timeout"])
def test_an_environment_that_failed_is_told_as_one(status: Any) -> None:
    with pytest.raises(RunFailure) as caught:
        check_errors([GOOD, bad("environment", status)], first_step=True, settings=SETTINGS)
    assert "the environment failed in 1 of 2 episodes" in caught.value.what
    assert caught.value.where == "environment"
    assert ("environment.step_timeout" in caught.value.mend) == (status == "timeout")


def test_a_verifier_called_environment_is_not_the_environment() -> None:
    with pytest.raises(RunFailure) as caught:
        check_errors([GOOD, bad("environment")], first_step=True, settings=SETTINGS)
    assert "the verifier 'environment' could not score 1 of 2 completions" in caught.value.what
    assert caught.value.where == "rewards.verifiers, environment"


@dataclass(frozen=True)
class Marked(Completed):
    """One of a user's own, with the `__init__` that `dataclass` writes."""

    mark: str = ""


def test_ids_are_a_list_however_they_were_given() -> None:
    given = Completed("p", "c", completion_ids=np.array([1, 2]))
    derived = Marked("p", "c", completion_ids=np.array([1, 2]))  # type: ignore[arg-type]
    for item in (derived, given, pickle.loads(pickle.dumps(given)), replace(given, finish="length"), deepcopy(given)):
        assert item.completion_ids == [1, 2]
        assert all(type(one) is int for one in item.completion_ids)
    assert given == Completed("p", "c", completion_ids=[1, 2])
    assert Completed("p", "c").completion_ids == ()
