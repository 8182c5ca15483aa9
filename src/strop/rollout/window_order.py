"""Which of the groups that are under way a step trains, where it is not simply those that were admitted first.

Invariants (tests/rollout/test_window_order.py), whatever is ready when, and whatever is chosen:
1. A group that began under version v is trained at the latest by step v + max_staleness, its deadline.
2. Nothing is dropped: each group is trained exactly once.
3. A step trains `groups_per_step` groups.

To keep a later step from having more groups due than it trains, a step looks ahead: of the groups with a deadline up to
step d, all but those must go now that the steps behind it, up to d, have room for. So it can always be done: sampling
runs ahead by `ahead` < max_staleness steps, and so there are never more than (ahead + 1) * groups_per_step groups under
way. What is left, max_staleness - ahead, is how many steps a group may be passed over; in order of admission it is 0,
for every group is then trained at its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.rollout.episode import Group
from strop.rollout.own_choice import OwnChoice

KEY = "rollout.window.order"


@dataclass(frozen=True)
class ReadyGroup:
    """A group that is complete.

    number: in order of admission. version: of the weights that were served when it began. spare: how many steps more
    it can wait; one with 0 goes now, whatever is chosen.
    """

    number: int
    group: Group
    version: int
    spare: int


class Readiness:
    """Groups that are complete go first; of these, those that were admitted first, or which a function chooses.

    Args:
        groups_per_step: of admission. max_staleness: the bound, which has to be larger than that of admission.
        own: asked with a list of `ReadyGroup` in order of admission, and how many of them to choose. What the bound
            demands goes before what it chooses.
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
        demands = self._demands(step, versions)
        await _complete(tasks, demands)
        ready = [number for number in sorted(tasks) if tasks[number].done()]
        wanted = ready
        if self._own is not None:
            groups = [ReadyGroup(n, tasks[n].result(), versions[n], versions[n] + self._bound - step) for n in ready]
            wanted = self._own(ready, self._size, groups, self._size)
        window = sorted(_allowed([*wanted, *(n for n in ready if n not in wanted)], demands))
        self.metrics = {
            "window/forced": float(len(set(window) - set(wanted[: self._size]))),
            "window/passed_over": float(sum(n not in window for n in tasks if n < window[-1])),
        }
        self.metrics |= self._bias.of(window, {number: tasks[number].result() for number in window}, set(tasks))
        return window

    def _demands(self, step: int, versions: Mapping[int, int]) -> list[tuple[set[int], int]]:
        """(groups, how many of them must go now), by deadline; each set holds the one before, the last holds all."""
        found = []
        for version in sorted(set(versions.values())):
            urgent = {number for number, began in versions.items() if began <= version}
            found.append((urgent, len(urgent) - (version + self._bound - step) * self._size))
        assert max(least for _, least in found) <= self._size, f"step {step} cannot train all that is due: {found}"
        return [*found[:-1], (found[-1][0], self._size)]


async def _complete(tasks: Mapping[int, asyncio.Task[Group]], demands: Sequence[tuple[set[int], int]]) -> None:
    """Wait until there is a choice that meets the demands."""
    while True:
        done = {number for number, task in tasks.items() if task.done()}
        for number in done:
            # What went wrong with any group is told now: it would be the same later.
            tasks[number].result()
        if all(len(done & urgent) >= least for urgent, least in demands):
            return
        await asyncio.wait([t for t in tasks.values() if not t.done()], return_when=asyncio.FIRST_COMPLETED)


def _allowed(wanted: Sequence[int], demands: Sequence[tuple[set[int], int]]) -> list[int]:
    """The first of these, as far as the demands leave it to that: the first ones themselves, if these meet them."""
    chosen: list[int] = []
    for urgent, least in demands:
        more = [number for number in wanted if number in urgent and number not in chosen]
        chosen += more[: max(0, least - len(chosen))]
    return chosen


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
