"""The window: the finished, scored groups of a step in order of admission, wherever groups come from."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from strop.rollout.admission import Admission
from strop.rollout.episode import Episode, Group

T = TypeVar("T")
Prompt = TypeVar("Prompt")


class Windows(ABC, Generic[Prompt]):
    """Makes groups within what admission allows; how one is made is for the class that derives from this.

    Args:
        next_prompt: the next prompt in the data's order, or whatever else a group is made of; called once for each
            group, in order of group numbers.
        per_group: completions of a group, for the display.
        admission: the bound on staleness.
        progress: told how many completions of how many are there.
        worth: whether a group is worth training; one that is not is replaced by another prompt's, in the same place of
            the window, at most `max_refills` times. None keeps every group.
    """

    phase = "sampling"
    """What is being done while a window is made, for the display."""

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        *,
        per_group: int,
        admission: Admission,
        progress: Callable[[int, int], None] | None = None,
        worth: Callable[[Group], bool] | None = None,
        max_refills: int = 0,
    ) -> None:
        self._next_prompt = next_prompt
        self._per_group = per_group
        self.admission = admission
        self._progress = progress
        self._worth = worth
        self._max_refills = max_refills if worth is not None else 0
        self._tasks: dict[int, asyncio.Task[Group]] = {}
        self.discarded: list[Group] = []
        """Groups of the last window that were replaced."""
        self.refills = 0
        """How often groups of the last window were replaced."""
        self.baselines: dict[int, Episode] = {}
        """The most likely completion of each group of the last window, by the group's number, where it is asked for."""
        self._completions = self._expected = 0
        self._last_completion = 0.0

    @abstractmethod
    async def make_group(self, number: int, prompt: Prompt, attempt: int = 0) -> Group:
        """The whole group of a number, scored; its baseline, if it has one, is put into `baselines`.

        Args:
            attempt: how often the group in its place has been replaced.
        """

    async def next_window(self, step: int) -> list[Group]:
        """The groups that step number `step` (0 for the first) trains, in order of admission.

        Raises:
            Whatever an engine or verifier raised; the other groups are then cancelled.
        """
        first, size = step * self.admission.groups_per_step, self.admission.groups_per_step
        self._completions, self._expected = 0, size * self._per_group
        self.discarded, self.refills = [], 0
        try:
            for number in self.admission.admit(step):
                prompt = self._next_prompt()
                self._tasks[number] = asyncio.get_running_loop().create_task(self.make_group(number, prompt))
            groups = await asyncio.gather(*(self._tasks[first + n] for n in range(size)))
            groups = await self._replace_worthless(list(groups))
        except BaseException:
            await self.close()
            raise
        for group in groups:
            del self._tasks[group.number]
        self.baselines = {number: episode for number, episode in self.baselines.items() if number >= first}
        return groups

    @property
    def last_completion(self) -> float:
        """`time.perf_counter()` when the last completion of the window was there; what follows is verifying."""
        return self._last_completion

    async def close(self) -> None:
        """Cancel what is running."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await cancel(tasks)

    def _completed(self, count: int = 1) -> None:
        """So many more completions are there, or will never be."""
        self._completions += count
        self._last_completion = time.perf_counter()
        if self._progress is not None:
            self._progress(self._completions, self._expected)

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
            again = [self.make_group(groups[at].number, self._next_prompt(), self.refills) for at in places]
            for at, group in zip(places, await all_or_none(again), strict=True):
                self.discarded.append(groups[at])
                groups[at] = group
        return groups


async def all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all; when one fails the others are cancelled, which `gather` alone leaves running."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        await cancel(running)
        raise


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
