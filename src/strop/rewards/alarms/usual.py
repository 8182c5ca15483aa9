"""What is usual in a run, and how long something has been unusual; both go into checkpoints as JSON."""

from __future__ import annotations

from dataclasses import dataclass

CALM = 10
"""Usual values in a row after which an alarm that is on goes off."""


@dataclass
class Usual:
    """Mean of a statistic: over all values at first, then one that forgets with a half-life, in values."""

    count: int = 0
    mean: float = 0.0

    def add(self, value: float, half_life: int) -> None:
        self.count += 1
        self.mean += max(1 / self.count, 1 - 0.5 ** (1 / half_life)) * (value - self.mean)


@dataclass
class Streak:
    """How often in a row something was unusual, and whether the alarm is on: it is raised once, until it went off."""

    unusual: int = 0
    usual: int = 0
    on: bool = False

    def add(self, unusual: bool, patience: int) -> bool:
        """Whether this is where the alarm is raised."""
        self.unusual = self.unusual + 1 if unusual else 0
        self.usual = 0 if unusual else self.usual + 1
        if self.usual >= CALM:
            self.on = False
        raised = not self.on and self.unusual >= patience
        self.on = self.on or raised
        return raised
