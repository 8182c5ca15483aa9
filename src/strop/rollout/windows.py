"""The window: the finished, scored groups of a step, wherever groups come from.

They are those that were admitted first, or chosen by a `Readiness` (`rollout/window_order.py`).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from strop.rollout.admission import Admission
from strop.rollout.busy import Busy
from strop.rollout.episode import Episode, Group
from strop.rollout.together import all_or_none, cancel
from strop.rollout.window_order import Readiness

Prompt = TypeVar("Prompt")


@dataclass(frozen=True)
class Admitted(Generic[Prompt]):
    """What a group is made of, and the version of the weights that was served when it began."""

    prompt: Prompt
    version: int


class Windows(ABC, Generic[Prompt]):
    """Makes groups within what admission allows; how one is made is for the class that derives from this.

    Args:
        next_prompts: so many next prompts in the data's order, or whatever else groups are made of; those of groups
            that begin together are asked for together, in order of group numbers.
        per_group: completions of a group, for the display.
        admission: the bound on staleness.
        progress: told how many completions of how many are there.
        worth: whether a group is worth training; one that is not is replaced by another prompt's, in the same place of
            the window, at most `max_refills` times. None keeps every group.
        order: which groups that are under way a window takes; None for those that were admitted first.
    """

    phase = "sampling"
    """What is being done while a window is made, for the display."""

    def __init__(
        self,
        next_prompts: Callable[[int], Sequence[Prompt]],
        *,
        per_group: int,
        admission: Admission,
        progress: Callable[[int, int], None] | None = None,
        worth: Callable[[Group], bool] | None = None,
        max_refills: int = 0,
        order: Readiness | None = None,
    ) -> None:
        self._next_prompts = next_prompts
        self._per_group = per_group
        self.admission = admission
        self._progress = progress
        self._worth = worth
        self._max_refills = max_refills if worth is not None else 0
        self.order = order
        self._version: int | None = None
        self._admitted: dict[int, Admitted[Prompt]] = {}
        self._tasks: dict[int, asyncio.Task[Group]] = {}
        self.discarded: list[Group] = []
        """Groups of the last window that were replaced."""
        self.refills = 0
        """How often groups of the last window were replaced."""
        self.baselines: dict[int, Episode] = {}
        """The most likely completion of each group of the last window, by the group's number, where it is asked for."""
        self._completions: Counter[int] = Counter()
        self._due: frozenset[int] = frozenset()
        self._done = self._expected = 0
        self._last_completion = 0.0
        self.verifying = Busy()
        """When completions were scored."""

    @abstractmethod
    async def make_group(self, number: int, prompt: Prompt, attempt: int = 0) -> Group:
        """The whole group of a number, scored, with its baseline if it has one.

        Args:
            attempt: how often the group in its place has been replaced.
        """

    def serve(self, version: int) -> None:
        """The weights of a version are served from now on; groups begin that may be made ahead."""
        self._version = version
        if self.admission.max_staleness:
            self._begin()

    async def next_window(self, step: int) -> list[Group]:
        """The groups that step number `step` (0 for the first) trains, in order of admission.

        Raises:
            Whatever an engine or verifier raised; the other groups are then cancelled.
        """
        size = self.admission.groups_per_step
        self._expected = size * self._per_group
        self.discarded, self.refills = [], 0
        if self._version is None or not self.admission.max_staleness:
            self._version = step
        try:
            self._begin()
            if len(self._tasks) < size:
                raise RuntimeError(f"step {step} needs {size} groups, and {len(self._tasks)} were admitted")
            self._wait_for(await self._choose(step, size))
            groups = await asyncio.gather(*(self._tasks[number] for number in sorted(self._due)))
            groups = await self._replace_worthless(list(groups))
            self._raise_failures()
        except BaseException:
            await self.close()
            raise
        for number in self._due:
            del self._tasks[number], self._admitted[number], self._completions[number]
        self.baselines = {group.number: group.baseline for group in groups if group.baseline is not None}
        return groups

    @property
    def under_way(self) -> dict[int, Admitted[Prompt]]:
        """What groups were begun for that no step has trained, by their numbers."""
        return dict(self._admitted)

    @property
    def window_metrics(self) -> dict[str, float]:
        """How the groups of the last window were chosen."""
        return {} if self.order is None else self.order.metrics

    def take_back(self, admitted: Mapping[int, Admitted[Prompt]]) -> None:
        """Make these groups again, as `under_way` gave them. Each begins with the next version or window that admits
        it, which is later than before where the bound is smaller now."""
        self._admitted = dict(sorted(admitted.items()))

    @property
    def last_completion(self) -> float:
        """`time.perf_counter()` when the last completion of the window was there; what follows is verifying."""
        return self._last_completion

    async def close(self) -> None:
        """Cancel what is running."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await cancel(tasks)

    def _begin(self) -> None:
        """Begin the groups that the version which is served admits."""
        assert self._version is not None
        numbers = self.admission.admit(self._version)
        for number, prompt in zip(numbers, self._prompts(len(numbers)), strict=True):
            self._admitted[number] = Admitted(prompt, self._version)
        loop, limit = asyncio.get_running_loop(), self.admission.limit(self._version)
        for number, one in self._admitted.items():
            if number < limit and number not in self._tasks:
                self._tasks[number] = loop.create_task(self.make_group(number, one.prompt))

    def _prompts(self, count: int) -> Sequence[Prompt]:
        prompts = self._next_prompts(count)
        if len(prompts) != count:
            raise ValueError(f"{count} prompts were asked for, and {len(prompts)} came")
        return prompts

    async def _choose(self, step: int, size: int) -> list[int]:
        """The numbers of the groups of a window."""
        if self.order is None:
            return sorted(self._tasks)[:size]
        # Until it is known which, completions of all of them count for the display.
        self._wait_for(self._tasks)
        return await self.order.choose(step, self._tasks, {n: self._admitted[n].version for n in self._tasks})

    def _raise_failures(self) -> None:
        """Raise what went wrong with a group of a later window: it would be the same then."""
        for task in self._tasks.values():
            if task.done():
                task.result()

    def _completed(self, number: int, count: int = 1) -> None:
        """So many more completions of a group are there, or will never be."""
        self._completions[number] += count
        if number not in self._due:
            return
        self._last_completion = time.perf_counter()
        self._done += count
        if self._progress is not None:
            self._progress(min(self._done, self._expected), self._expected)

    def _wait_for(self, numbers: Iterable[int]) -> None:
        """Completions of these groups are what the display counts."""
        self._due = frozenset(numbers)
        self._done = sum(self._completions[number] for number in self._due)

    async def _replace_worthless(self, groups: list[Group]) -> list[Group]:
        """Make groups of other prompts in place of those that are not worth training: dynamic sampling.

        Each round draws its prompts in order of the places, after the whole window is known, so the data's order does
        not depend on which group was done first. The last group of a place stays, whatever it is.
        """
        while self._worth is not None and self.refills < self._max_refills:
            places = [at for at, group in enumerate(groups) if not self._worth(group)]
            if not places:
                break
            self.refills += 1
            self._expected += len(places) * self._per_group
            prompts = zip(places, self._prompts(len(places)), strict=True)
            again = [self.make_group(groups[at].number, prompt, self.refills) for at, prompt in prompts]
            for at, group in zip(places, await all_or_none(again), strict=True):
                self.discarded.append(groups[at])
                groups[at] = group
        return groups
