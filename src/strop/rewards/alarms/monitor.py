"""The alarms of a run: statistics of each step against what is usual, with a state that goes into checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.config.alarms import AlarmSettings
from strop.rewards.alarms import statistics
from strop.rewards.alarms.statistics import Found, Outcome
from strop.rewards.alarms.trends import RISE, HeldOut, Jumps, Opinions
from strop.rewards.alarms.usual import Streak, Usual

FEWEST = 4
"""Fewer rewarded completions than this say nothing of a step."""
_RANGE = ("lowest", "highest")
SOLVED = 0.9
"""Accuracy from which it is no wonder that another verifier makes the differences."""


@dataclass(frozen=True)
class Alarm:
    """Something unusual: in which statistic, since `patience` steps ago, and a completion that shows it.

    what: one sentence. group, sample: of the completion in the step's episodes; None where a single one shows nothing.
    """

    name: str
    step: int
    value: float
    limit: float
    what: str
    group: int | None = None
    sample: int | None = None


@dataclass(frozen=True)
class Looked:
    """What a look at a step gave: numbers for the metrics, and the alarms that were raised."""

    metrics: dict[str, float]
    raised: list[Alarm]


@dataclass(frozen=True)
class _Rise:
    """A statistic of rewarded completions that should not rise. says: filled with the value and the usual."""

    measure: Callable[[Sequence[Outcome]], Found | None]
    limit: Callable[[float, float], float]
    says: str


RISES = {
    "repetition": _Rise(
        statistics.repetition,
        lambda usual, by: usual + by,
        "{value:.0%} of the 4-grams in rewarded completions are repeated; usual is {usual:.0%}",
    ),
    "stuffing": _Rise(
        statistics.stuffing,
        lambda usual, by: usual + by,
        "rewarded completions give {value:.1f} different answers each; usual is {usual:.1f}",
    ),
    "length": _Rise(
        statistics.length,
        lambda usual, by: usual * by,
        "rewarded completions have {value:.1f} tokens; usual is {usual:.1f}",
    ),
    "sameness": _Rise(
        statistics.sameness,
        lambda usual, by: usual + by,
        "{value:.0%} of the pairs of rewarded completions to prompts with different answers are the same; usual is "
        "{usual:.0%}",
    ),
}


@dataclass
class State:
    """Everything that later looks depend on."""

    lowest: float = math.inf
    highest: float = -math.inf
    usual: dict[str, Usual] = field(default_factory=dict)
    streaks: dict[str, Streak] = field(default_factory=dict)
    raised: list[Alarm] = field(default_factory=list)
    jumps: Jumps = field(default_factory=Jumps)
    held_out: HeldOut = field(default_factory=HeldOut)
    opinions: Opinions = field(default_factory=Opinions)


class Monitor:
    """Looks at one step after another. Equal steps and settings give equal alarms, whatever is resumed in between."""

    def __init__(self, settings: AlarmSettings) -> None:
        self.settings = settings
        self._state = State()

    @property
    def raised(self) -> list[Alarm]:
        """All alarms of the run so far."""
        return self._state.raised

    def look(
        self,
        step: int,
        outcomes: Sequence[Outcome],
        *,
        held_out: Sequence[tuple[int, float]] = (),
        opinions: Sequence[tuple[Outcome, bool]] = (),
    ) -> Looked:
        """One step.

        Args:
            outcomes: its scored completions.
            held_out: steps that were evaluated before, with the accuracy found.
            opinions: completions that count as correct, and whether the second opinion agrees.
        """
        metrics: dict[str, float] = {}
        alarms: list[Alarm] = []
        if outcomes:
            self._state.lowest = min(self._state.lowest, *(one.reward for one in outcomes))
            self._state.highest = max(self._state.highest, *(one.reward for one in outcomes))
            alarms += self._rises(step, outcomes, metrics)
            alarms += self._dominance(step, outcomes, metrics)
            alarms += self._jump(step, outcomes, metrics)
            alarms += self._held_out(step, outcomes, held_out, metrics)
        alarms += self._opinions(step, opinions, metrics)
        self._state.raised += alarms
        metrics["alarms/on"] = float(sum(streak.on for streak in self._state.streaks.values()))
        metrics["alarms/raised"] = float(len(self._state.raised))
        return Looked(metrics, alarms)

    def state(self) -> dict[str, Any]:
        """What `load` needs, as JSON-ready values."""
        found = dataclasses.asdict(self._state)
        # JSON has no infinity.
        return {name: None if name in _RANGE and math.isinf(value) else value for name, value in found.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken."""
        self._state = State(
            lowest=math.inf if state["lowest"] is None else state["lowest"],
            highest=-math.inf if state["highest"] is None else state["highest"],
            usual={name: Usual(**one) for name, one in state["usual"].items()},
            streaks={name: Streak(**one) for name, one in state["streaks"].items()},
            raised=[Alarm(**one) for one in state["raised"]],
            jumps=Jumps(**state["jumps"]),
            held_out=HeldOut(**state["held_out"]),
            opinions=Opinions(**state["opinions"]),
        )

    def _rises(self, step: int, outcomes: Sequence[Outcome], metrics: dict[str, float]) -> list[Alarm]:
        chosen = statistics.rewarded(outcomes, self._state.lowest)
        alarms = []
        for name, rise in RISES.items():
            by = getattr(self.settings, name)
            found = rise.measure(chosen) if by is not None and len(chosen) >= FEWEST else None
            if found is None:
                continue
            usual = self._usual(name)
            limit = rise.limit(usual.mean, by)
            known = usual.count >= self.settings.baseline_steps
            unusual = known and found.value > limit
            metrics[f"alarms/{name}"] = found.value
            if known:
                metrics[f"alarms/{name}_limit"] = limit
            says = rise.says.format(value=found.value, usual=usual.mean)
            if not unusual:
                usual.add(found.value, self.settings.half_life)
            alarms += self._judge(name, step, unusual, found, limit, says)
        return alarms

    def _dominance(self, step: int, outcomes: Sequence[Outcome], metrics: dict[str, float]) -> list[Alarm]:
        limit = self.settings.dominance
        found = statistics.dominance(outcomes) if limit is not None else None
        if limit is None or found is None:
            return []
        metrics["alarms/dominance"] = found.value
        deciding = [one.components[one.decider] for one in outcomes if one.decider in one.components]
        judged = [one.correct for one in outcomes if one.correct is not None]
        if not deciding or not judged:
            return []
        mean, noise = statistics.mean_and_noise(outcomes)
        decides = math.fsum(deciding) / len(deciding)
        reward, score = self._usual("reward"), self._usual("deciding score")
        known = reward.count >= self.settings.baseline_steps
        risen = mean > reward.mean + 2 * noise and decides <= score.mean
        unusual = known and found.value > limit and risen and sum(judged) / len(judged) < SOLVED
        says = (
            f"{min(1.0, found.value):.0%} of the differences in reward within groups are those of {found.about}; the "
            f"reward has risen from {reward.mean:.3g} to {mean:.3g}, and the score that decides what is correct has "
            f"not ({score.mean:.3g}, now {decides:.3g})"
        )
        if not unusual:
            reward.add(mean, self.settings.half_life)
            score.add(decides, self.settings.half_life)
        return self._judge("dominance", step, unusual, found, limit, says)

    def _jump(self, step: int, outcomes: Sequence[Outcome], metrics: dict[str, float]) -> list[Alarm]:
        if self.settings.jump is None:
            return []
        found = self._state.jumps.add(outcomes, self._spread, first=self.settings.baseline_steps)
        if found is None:
            return []
        value, before, now, sudden = found
        metrics["alarms/jump"] = value
        best = max(outcomes, key=lambda one: one.reward)
        says = f"the mean reward went from {before:.3g} to {now:.3g} within three steps"
        unusual = sudden and value > self.settings.jump
        return self._judge("jump", step, unusual, Found(value, best), self.settings.jump, says, patience=1)

    def _held_out(
        self, step: int, outcomes: Sequence[Outcome], scores: Sequence[tuple[int, float]], metrics: dict[str, float]
    ) -> list[Alarm]:
        found = self._state.held_out.add(scores)
        self._state.held_out.train(statistics.mean_and_noise(outcomes)[0])
        limit = self.settings.held_out
        if limit is None or found is None:
            return []
        metrics["alarms/held_out"] = found.fall
        says = (
            f"held-out accuracy is {found.accuracy:.1%}, down from {found.best:.1%} at step {found.best_step}, while "
            f"the training reward rose from {found.reward_then:.3g} to {found.reward:.3g}"
        )
        unusual = found.fall > limit and found.reward > found.reward_then + RISE * self._spread
        return self._judge("held_out", step, unusual, Found(found.fall), limit, says, patience=2)

    def _opinions(self, step: int, opinions: Sequence[tuple[Outcome, bool]], metrics: dict[str, float]) -> list[Alarm]:
        settings = self.settings.second_opinion
        if settings is None:
            return []
        wrong, asked = self._state.opinions.add([agrees for _, agrees in opinions])
        if not asked:
            return []
        bound = statistics.lower_bound(wrong, asked)
        metrics["alarms/disagreement"] = wrong / asked
        metrics["alarms/disagreement_at_least"] = bound
        example = next((one for one, agrees in opinions if not agrees), None)
        says = f"of {asked} completions that count as correct, the second opinion calls {wrong} wrong"
        unusual = bound > settings.disagreement
        found = Found(wrong / asked, example)
        return self._judge("second_opinion", step, unusual, found, settings.disagreement, says, patience=1)

    @property
    def _spread(self) -> float:
        return self._state.highest - self._state.lowest

    def _usual(self, name: str) -> Usual:
        return self._state.usual.setdefault(name, Usual())

    def _judge(
        self,
        name: str,
        step: int,
        unusual: bool,
        found: Found,
        limit: float,
        says: str,
        *,
        patience: int | None = None,
    ) -> list[Alarm]:
        """The alarm, in the step in which it is raised."""
        streak = self._state.streaks.setdefault(name, Streak())
        if not streak.add(unusual, patience or self.settings.patience):
            return []
        place = (None, None) if found.example is None else (found.example.group, found.example.sample)
        return [Alarm(name, step, found.value, limit, says, *place)]
