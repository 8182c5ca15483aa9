"""Which of the groups that are under way a step trains, where it is not simply those that were admitted first.

Invariants (tests/rollout/test_window_order.py), whatever is ready when, and whatever is chosen:
1. A group that began under version v is trained at the latest by step v + max_staleness: it is due then.
2. Nothing is dropped: each group is trained exactly once.
3. A step trains `groups_per_step` groups.

They go together, because at most `groups_per_step` groups are due at a step: when version v is served, at most
(v + 1 + max_staleness) * groups_per_step groups have ever begun, and before step v + max_staleness all but
`groups_per_step` of these have been trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.rollout.episode import Group
from strop.rollout.own_choice import OwnChoice

KEY = "rollout.window.order"


@dataclass(frozen=True)
class ReadyGroup:
    """A group that is complete.

    number: in order of admission. version: of the weights that were served when it began. spare: how many steps more
    it could wait; at least 1, because one that cannot wait is not asked about.
    """

    number: int
    group: Group
    version: int
    spare: int


class Readiness:
    """Groups that are complete go first; of these, those that were admitted first, or which a function chooses.

    Args:
        groups_per_step, max_staleness: those of admission.
        own: asked with a list of `ReadyGroup` in order of admission, and how many of them to choose.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, own: OwnChoice | None = None) -> None:
        self._size, self._bound, self._own = groups_per_step, max_staleness, own
        self._bias = LengthBias()
        self.metrics: dict[str, float] = {}
        """Of the last choice: see docs/window.md."""

    async def choose(
        self, step: int, tasks: Mapping[int, asyncio.Task[Group]], versions: Mapping[int, int]
    ) -> list[int]:
        """The numbers of the groups that a step trains, in order of admission; they are complete.

        Args:
            tasks: what makes each group that is under way. versions: of the weights under which it began.

        Raises:
            Whatever a group failed with. RunFailure: the function returned what it must not.
        """
        due = [number for number in sorted(tasks) if versions[number] + self._bound <= step]
        free = self._size - len(due)
        assert free >= 0, f"{len(due)} groups are due at step {step}, which trains {self._size}"
        others = [number for number in sorted(tasks) if number not in due]
        await _complete(tasks, due, others, free)
        ready = [number for number in others if tasks[number].done()]
        chosen = ready[:free]
        if self._own is not None and free:
            groups = [ReadyGroup(n, tasks[n].result(), versions[n], versions[n] + self._bound - step) for n in ready]
            chosen = self._own(ready, free, groups, free)
        window = sorted([*due, *chosen])
        passed_over = sum(number not in window for number in tasks if number < window[-1])
        self.metrics = {"window/passed_over": float(passed_over), "window/due": float(len(due))}
        self.metrics |= self._bias.of(window, {number: tasks[number].result() for number in window}, set(tasks))
        return window


async def _complete(tasks: Mapping[int, asyncio.Task[Group]], due: list[int], others: list[int], free: int) -> None:
    """Wait until all groups that are due are complete, and so many of the others."""
    while True:
        for task in tasks.values():
            if task.done():
                # What went wrong with any group is told now: it would be the same later.
                task.result()
        if all(tasks[number].done() for number in due) and sum(tasks[n].done() for n in others) >= free:
            return
        await asyncio.wait([t for t in tasks.values() if not t.done()], return_when=asyncio.FIRST_COMPLETED)


@dataclass
class LengthBias:
    """How much shorter what was chosen is than what could have been.

    The mean length of the completions that a step chose, divided by that of all groups which were under way when it
    chose, those among them that were not complete included. It is known when the last of these is trained, at most
    max_staleness steps later: nothing is guessed.
    """

    _lengths: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(tokens, completions) of groups that were chosen, as long as a choice needs them."""
    _open: list[tuple[list[int], set[int]]] = field(default_factory=list)

    def of(self, window: list[int], groups: Mapping[int, Group], among: set[int]) -> dict[str, float]:
        """Take in the choice of a step; returns the mean of what is known now of earlier choices, or of this one."""
        for number, group in groups.items():
            self._lengths[number] = (sum(e.sampled_tokens() for e in group.episodes), len(group.episodes))
        self._open.append((window, among))
        known = [choice for choice in self._open if choice[1] <= self._lengths.keys()]
        self._open = [choice for choice in self._open if choice not in known]
        found = [self._mean(chosen) / max(self._mean(could), 1e-9) for chosen, could in known]
        needed = set().union(*(could for _, could in self._open))
        self._lengths = {number: lengths for number, lengths in self._lengths.items() if number in needed}
        return {"window/length_bias": sum(found) / len(found)} if found else {}

    def _mean(self, numbers: list[int] | set[int]) -> float:
        tokens, completions = (sum(self._lengths[number][at] for number in numbers) for at in (0, 1))
        return tokens / max(completions, 1)


def make_order(order: str, *, groups_per_step: int, max_staleness: int) -> Readiness | None:
    """What `rollout.window.order` says; None for the order of admission.

    Raises:
        UserError: a function cannot be imported or called.
    """
    if order == "admission":
        return None
    own = None if order == "ready" else OwnChoice(order, where=KEY, takes=("groups", "count"))
    return Readiness(groups_per_step, max_staleness, own)
