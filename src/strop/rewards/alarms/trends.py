"""What can only be seen over several steps: jumps of the reward, held-out scores, second opinions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.rewards.alarms.statistics import Outcome, mean_and_noise

WITHIN = 3
"""Steps within which a move is a jump."""
BEFORE = 5
"""Steps before them that say how much the reward moves otherwise."""
SURE = 4.0
"""Standard errors that a jump has to have."""
CALMER = 5.0
"""Standard deviations, of the mean rewards in the steps before, that a jump has to have. A steady rise has 3.5."""
RISE = 0.1
"""Share of the range of rewards by which the training reward has to be higher where a held-out score is lower."""
RECENT = 20
"""Steps of which second opinions count."""


@dataclass
class Jumps:
    """Mean rewards of the last steps, with their standard errors."""

    means: list[float] = field(default_factory=list)
    noises: list[float | None] = field(default_factory=list)
    steps: int = 0

    def add(self, outcomes: Sequence[Outcome], spread: float, *, first: int) -> tuple[float, float, float, bool] | None:
        """The rise within the last steps as a share of `spread`, the mean before and now, and whether it is sudden.

        None in the first steps, and while all rewards are equal.

        Args:
            spread: range of all rewards so far.
            first: steps after which moves count, beside those that a comparison takes.
        """
        mean, noise = mean_and_noise(outcomes)
        self.means = [*self.means, mean][-(BEFORE + WITHIN) :]
        # JSON has no infinity, which is the error of a single group.
        self.noises = [*self.noises, None if math.isinf(noise) else noise][-(BEFORE + WITHIN) :]
        self.steps += 1
        if len(self.means) < BEFORE + WITHIN or self.steps <= first + WITHIN or spread <= 0:
            return None
        earlier = self.means[:BEFORE]
        before = math.fsum(earlier) / BEFORE
        # One step may be lucky; a jump is one that stays.
        now = min(self.means[-2:])
        move = now - before
        errors = [math.inf if one is None else one for one in self.noises]
        error = math.sqrt(errors[-1] ** 2 + math.fsum(one * one for one in errors[:BEFORE]) / BEFORE**2)
        deviation = math.sqrt(math.fsum((one - before) ** 2 for one in earlier) / (BEFORE - 1))
        sudden = move > SURE * error and move > CALMER * deviation
        return move / spread, before, now, sudden


@dataclass(frozen=True)
class Fall:
    """An evaluation against the best one so far. reward, reward_then: mean training reward of the steps before each."""

    accuracy: float
    best: float
    best_step: int
    fall: float
    reward: float
    reward_then: float


@dataclass
class HeldOut:
    """The best evaluation so far, and the training reward since the last one."""

    last_step: int = -1
    best: float | None = None
    best_step: int = 0
    reward_then: float | None = None
    rewards: list[float] = field(default_factory=list)

    def train(self, reward: float) -> None:
        """A step has been trained."""
        self.rewards.append(reward)

    def add(self, scores: Sequence[tuple[int, float]]) -> Fall | None:
        """What a new evaluation says; None where there is none, or no step was trained before it.

        Where the best one is that before the first step, the reward of the steps after it stands in.
        """
        new = [(step, accuracy) for step, accuracy in scores if step > self.last_step and math.isfinite(accuracy)]
        if not new:
            return None
        step, accuracy = new[-1]
        reward = math.fsum(self.rewards) / len(self.rewards) if self.rewards else None
        self.last_step, self.rewards = step, []
        if self.best is None or accuracy >= self.best:
            self.best, self.best_step, self.reward_then = accuracy, step, reward
        if reward is None:
            return None
        if self.reward_then is None:
            self.reward_then = reward
        return Fall(accuracy, self.best, self.best_step, self.best - accuracy, reward, self.reward_then)


@dataclass
class Opinions:
    """How many were asked, and how many were called wrong, in each of the last steps."""

    asked: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)

    def add(self, agree: Sequence[bool]) -> tuple[int, int]:
        """Wrong and asked in the last steps, this one included."""
        self.asked = [*self.asked, len(agree)][-RECENT:]
        self.wrong = [*self.wrong, sum(not one for one in agree)][-RECENT:]
        return sum(self.wrong), sum(self.asked)
