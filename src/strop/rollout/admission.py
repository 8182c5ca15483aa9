"""Admission control: the bound on staleness that drops nothing.

Invariants (tests/rollout/test_admission.py has one test for each):
1. Group i starts only when i < (trained_steps + 1 + max_staleness) * groups_per_step.
2. Groups start in order of their number.
3. A token sampled by an admitted group is at most `max_staleness` versions old when its group is trained.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    """How many groups may have started."""

    groups_per_step: int
    max_staleness: int = 0
    started: int = 0

    def limit(self, trained_steps: int) -> int:
        """Number of groups that may have started when so many steps have been trained."""
        return (trained_steps + 1 + self.max_staleness) * self.groups_per_step

    def admit(self, trained_steps: int) -> range:
        """Numbers of the groups that start now."""
        chosen = range(self.started, max(self.started, self.limit(trained_steps)))
        self.started = chosen.stop
        return chosen

    def step_of(self, group: int) -> int:
        """The step that trains a group."""
        return group // self.groups_per_step
