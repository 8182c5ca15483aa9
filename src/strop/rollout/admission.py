"""Admission control: the bound on staleness that drops nothing.

Invariants (tests/rollout/test_admission.py has one test for each):
1. Group i starts only when i < (version + 1 + max_staleness) * groups_per_step, `version` being that of the weights
   that are served. Where they are published after each step, it is the number of trained steps.
2. Groups start in order of their number.
3. A token sampled by an admitted group is at most `max_staleness` versions old when its group is trained.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    """How many groups may have started.

    last: the number of groups of the whole run, of which none begins that no step would train; None for no end.
    """

    groups_per_step: int
    max_staleness: int = 0
    started: int = 0
    last: int | None = None

    def limit(self, version: int) -> int:
        """Number of groups that may have started while the weights of a version are served."""
        limit = (version + 1 + self.max_staleness) * self.groups_per_step
        return limit if self.last is None else min(limit, self.last)

    def admit(self, version: int) -> range:
        """Numbers of the groups that start now."""
        chosen = range(self.started, max(self.started, self.limit(version)))
        self.started = chosen.stop
        return chosen

    def step_of(self, group: int) -> int:
        """The step that trains a group."""
        return group // self.groups_per_step
