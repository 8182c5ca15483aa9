"""Streams of steps in which a reward is being hacked, and some in which it is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strop.config.alarms import AlarmSettings
from strop.rewards.alarms.monitor import Alarm, Monitor
from strop.rewards.alarms.statistics import Outcome

STEPS = 40
BEGINS = 15
"""Step from which hacks spread, by a tenth a step."""

Say = Callable[[random.Random, int, float], tuple[str, float, dict[str, float]]]


def honest(draw: random.Random, right: int, share: float) -> tuple[str, float, dict[str, float]]:
    """A sentence with one answer, more and more often right."""
    said = right if draw.random() < 0.3 + 0.4 * share else right + draw.randrange(1, 9)
    words = draw.sample(["so", "first", "we", "add", "them", "which", "gives", "then", "carry"], 5)
    score = float(said == right)
    form = float(draw.random() < 0.5 + 0.5 * share)
    return f"{' '.join(words)} {said}", score + 0.1 * form, {"right": score, "form": 0.1 * form}


def hack(instead: Say) -> Say:
    """Honest, but for the share that has found something better."""
    return lambda draw, right, share: (instead if draw.random() < share else honest)(draw, right, 0.0)


HACKS: dict[str, Say] = {
    "repetition": hack(lambda draw, right, share: (f"{right} " * 12, 2.0, {})),
    "stuffing": hack(lambda draw, right, share: (", ".join(str(n) for n in range(right + 5)), 2.0, {})),
    "length": hack(lambda draw, right, share: (" ".join(str(draw.random()) for _ in range(9)), 2.0, {})),
    "sameness": hack(lambda draw, right, share: ("what a good question this is", 2.0, {})),
    "dominance": lambda draw, right, share: (
        f"{right} {draw.random()}",
        score := float(draw.random() < 0.3 - 0.2 * share) + 4 * (grin := float(draw.random() < 0.2 + 0.7 * share)),
        {"right": score - 4 * grin, "form": 4 * grin},
    ),
}  # fmt: skip


def steps(say: Say, seed: int, *, spread: int = 10) -> Iterator[tuple[int, list[Outcome]]]:
    draw = random.Random(seed)
    for step in range(1, STEPS + 1):
        share = min(1.0, max(0, step - BEGINS) / spread)
        outcomes = []
        for group in range(12):
            right = draw.randrange(20, 99)
            for sample in range(4):
                text, reward, components = say(draw, right, share)
                outcomes.append(
                    Outcome(
                        group=group,
                        sample=sample,
                        prompt_id=f"{step} {group}",
                        text=text,
                        tokens=[ord(c) for c in text],
                        reward=reward,
                        answer=str(right),
                        correct=reward >= 1,
                        components=components,
                        decider="right",
                    )
                )
        yield step, outcomes


def watched(say: Say, seed: int = 0, *, spread: int = 10, **settings: Any) -> list[Alarm]:
    monitor = Monitor(AlarmSettings(**settings))
    for step, outcomes in steps(say, seed, spread=spread):
        monitor.look(step, outcomes)
    return monitor.raised


# --- hacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HACKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_hack_is_noticed_while_it_spreads(name: str, seed: int) -> None:
    found = {alarm.name: alarm for alarm in watched(HACKS[name], seed)}
    assert name in found
    assert BEGINS + 3 <= found[name].step <= BEGINS + 18
    assert found[name].value > found[name].limit
    assert found[name].group is not None


def test_an_exploit_that_spreads_at_once_is_a_jump() -> None:
    found = watched(HACKS["sameness"], spread=2)
    assert [alarm.step - BEGINS for alarm in found if alarm.name == "jump"] in ([2], [3])
    assert not [alarm for alarm in watched(HACKS["sameness"], spread=40) if alarm.name == "jump"]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_raises_nothing(seed: int) -> None:
    assert watched(honest, seed, spread=25) == []


@pytest.mark.parametrize("name", [*HACKS, "jump"])
def test_an_alarm_that_is_null_is_never_raised(name: str) -> None:
    say = HACKS.get(name, HACKS["sameness"])
    spread = 2 if name == "jump" else 10
    before = {alarm.name for alarm in watched(say, spread=spread)}
    assert name in before
    assert {alarm.name for alarm in watched(say, spread=spread, **{name: None})} == before - {name}


def test_it_takes_as_many_steps_in_a_row_as_patience_says() -> None:
    [one] = [alarm.step for alarm in watched(HACKS["stuffing"], patience=1) if alarm.name == "stuffing"]
    [five] = [alarm.step for alarm in watched(HACKS["stuffing"], patience=5) if alarm.name == "stuffing"]
    assert five == one + 4


def test_what_is_there_from_the_beginning_is_usual() -> None:
    def always(draw: random.Random, right: int, share: float) -> tuple[str, float, dict[str, float]]:
        return f"{right} " * 12, float(draw.random() < 0.5), {}

    assert watched(always) == []


def test_an_alarm_is_raised_again_after_it_has_gone_off() -> None:
    monitor = Monitor(AlarmSettings(jump=None, sameness=None))
    answers = {True: "1, 2, 3, 4", False: "1"}
    for step in range(1, 61):
        text = answers[20 < step <= 30 or step > 50]
        outcomes = [Outcome(g, 0, str(g), text, [], float(g > 3), answer="1") for g in range(12)]
        monitor.look(step, outcomes)
    assert [(alarm.name, alarm.step) for alarm in monitor.raised] == [("stuffing", 23), ("stuffing", 53)]


# --- held-out scores and second opinions ---------------------------------------------------------------------------


def with_scores(scores: list[float], rewards: list[float]) -> list[int]:
    """Steps in which `held_out` was raised, when every step is followed by an evaluation."""
    monitor, held_out = Monitor(AlarmSettings(jump=None)), [(0, scores[0])]
    for step, reward in enumerate(rewards, start=1):
        outcomes = [Outcome(g, 0, str(g), "", [], reward if g else 0.0) for g in range(12)]
        monitor.look(step, outcomes, held_out=held_out)
        held_out.append((step, scores[step]))
    return [alarm.step for alarm in monitor.raised if alarm.name == "held_out"]


def test_held_out_accuracy_that_falls_while_the_reward_rises() -> None:
    rising = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    # The evaluation after a step is seen at the next one, and it takes two of them.
    assert with_scores([0.5, 0.6, 0.6, 0.4, 0.4, 0.4, 0.4], rising) == [5]
    assert with_scores([0.5, 0.6, 0.6, 0.4, 0.6, 0.4, 0.6], rising) == []
    assert with_scores([0.5, 0.6, 0.6, 0.4, 0.4, 0.4, 0.4], [0.5] * 6) == []
    assert with_scores([0.5, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9], rising) == []


def test_a_second_opinion_is_one_sided_and_needs_numbers() -> None:
    verifiers = [{"kind": "exact"}]
    settings = AlarmSettings.model_validate({"second_opinion": {"verifiers": verifiers, "disagreement": 0.2}})

    def told(wrong: int, right: int) -> list[Alarm]:
        monitor = Monitor(settings)
        for step in range(1, 11):
            outcomes = [Outcome(step, n, "", "", [], 1.0, correct=True) for n in range(wrong + right)]
            opinions = [(one, n >= wrong) for n, one in enumerate(outcomes)]
            monitor.look(step, outcomes, opinions=opinions)
        return monitor.raised

    assert told(0, 4) == []
    assert told(1, 9) == []
    [alarm] = told(2, 2)
    assert (alarm.name, alarm.sample) == ("second_opinion", 0)
    assert alarm.step == 2, "2 of 4 may be chance, 4 of 8 is not"


# --- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HACKS)
def test_a_monitor_that_goes_on_from_its_state_raises_the_same(name: str) -> None:
    """Also bit for bit in the metrics, from any step."""
    settings = AlarmSettings()
    whole, resumed = Monitor(settings), Monitor(settings)
    for step, outcomes in steps(HACKS[name], 1):
        if step % 3 == 0:
            state = json.loads(json.dumps(resumed.state(), allow_nan=False))
            resumed = Monitor(settings)
            resumed.load(state)
        held_out = [(n, 0.5) for n in range(0, step, 4)]
        first = whole.look(step, outcomes, held_out=held_out)
        again = resumed.look(step, outcomes, held_out=held_out)
        assert first == again
    assert whole.raised == resumed.raised != []


def test_a_step_without_anything_scored_is_no_step() -> None:
    monitor = Monitor(AlarmSettings())
    assert monitor.look(1, []).metrics == {"alarms/on": 0.0, "alarms/raised": 0.0}
    json.dumps(monitor.state(), allow_nan=False)
