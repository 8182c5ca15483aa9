"""Environments that live in workers: which episode lives in which, and what happens to it when a worker is lost.

The episodes of a lost worker are begun again from their prompts; draws are keyed by the sample, so the samples are the
same. Whose environment ends its worker again and again is found out: an episode with which the worker was busy when it
was lost is suspected, and the last of `TRIES` it gets alone in a worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from strop.cluster.environment_line import EnvironmentLine, Gone, Life
from strop.cluster.environment_lodging import Lodging
from strop.cluster.handle import WorkerHandle
from strop.cluster.router import prompt_key
from strop.cluster.supervision import Supervisor, WorkerLost, show_on_stderr
from strop.errors import RunFailure, StropError
from strop.rollout.asking import Failed, Home, as_it_is
from strop.rollout.episode import Episode, Status

TRIES = 3
"""How often a worker may be lost while it is busy with an episode; before the last the episode is alone in it."""

Restart = Callable[[int, WorkerLost], Awaitable[WorkerHandle]]


@dataclass
class _Site:
    """A worker, and the episodes that live in it. mending: while it is started again."""

    index: int
    line: EnvironmentLine
    lives: set[Life] = field(default_factory=set)
    mending: asyncio.Task[None] | None = None


@dataclass
class _Case:
    """A loss whose cause is not known yet, and the episodes that may have been it."""

    loss: WorkerLost
    suspects: set[Life]


class RemoteEnvironments:
    """A `Home` of environments in workers.

    All episodes of a prompt that are played at a time live in one worker; a new prompt goes to the one with the fewest.

    A restart counts against `supervision.restarts` once it is known that no environment was to blame: when the worker
    was busy with none, or all that it was busy with have been played. What an environment did is not counted.

    Args:
        workers: at least one, which hold an `EnvironmentHost` each. limit: seconds that an environment may take for one
            answer. restart: starts the worker of an index again and makes its host.
    """

    def __init__(self, workers: list[WorkerHandle], supervisor: Supervisor, *, limit: float, restart: Restart) -> None:
        self._supervisor, self._limit, self._restart = supervisor, limit, restart
        self.sites: list[_Site] = []
        for index, worker in enumerate(workers):
            self.sites.append(_Site(index, self._line(index, worker)))
        self._homes: dict[tuple[int, ...], _Site] = {}
        self._playing: Counter[tuple[int, ...]] = Counter()
        self._cases: list[_Case] = []
        self._alone = 0
        self._fatal: StropError | None = None
        self._moved = asyncio.Event()

    async def played(
        self, stream: tuple[int, ...], episode: Episode, play: Callable[[Home, Episode], Awaitable[list[Episode]]]
    ) -> list[Episode]:
        """See `Home.played`.

        An environment that has ended its worker `TRIES` times gives the episode the status `environment_error`.

        Raises:
            WorkerLost: workers were lost too often.
        """
        life = Life(prompt_key(stream))
        self._playing[life.key] += 1
        try:
            found = await self._until_played(life, episode, play)
            self._acquit(life)
            return found
        except Failed:
            self._acquit(life)
            raise
        finally:
            self._dismiss(life)
            self._playing[life.key] -= 1
            if not self._playing[life.key]:
                del self._playing[life.key]
                self._homes.pop(life.key, None)

    async def make(self) -> Any:
        raise AssertionError("environments are made in the home that `played` gives")

    async def ask(
        self, asked: Any, method: str, *given: Any, check: Callable[[Any], Any] = as_it_is, bounded: bool = True
    ) -> Any:
        raise AssertionError("environments are asked in the home that `played` gives")

    async def close(self, environment: Any) -> None:
        raise AssertionError("environments are closed in the home that `played` gives")

    async def end(self) -> None:
        """Close everything in the workers; their processes are ended by who started them."""
        mending = [site.mending for site in self.sites if site.mending is not None]
        for task in mending:
            task.cancel()
        await asyncio.gather(*mending, return_exceptions=True)
        await asyncio.gather(*(site.line.close() for site in self.sites))

    # An episode.

    async def _until_played(
        self, life: Life, episode: Episode, play: Callable[[Home, Episode], Awaitable[list[Episode]]]
    ) -> list[Episode]:
        while True:
            alone = life.deaths >= TRIES - 1
            self._alone += alone
            site: _Site | None = None
            begun = episode.fork(episode.sample)
            try:
                site = await self._settle(life, alone=alone)
                return await play(Lodging(site.line, life), begun)
            except Gone:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise asyncio.CancelledError from None
            finally:
                self._alone -= alone
                if site is not None:
                    site.lives.discard(life)
                self._news()
            if life.deaths >= TRIES:
                self._convict(life)
                # With what was said in the last try.
                failure = _blame(life)
                failure.mark(begun)
                show_on_stderr(
                    f"{episode.prompt_id}, sample {episode.sample}: {failure.detail}; restarts are not counted"
                )
                return [begun]

    async def _settle(self, life: Life, *, alone: bool) -> _Site:
        while True:
            for each in self.sites:
                each.line.look()
            if self._fatal is not None:
                raise self._fatal
            site = self._free(life, alone=alone)
            if site is not None:
                site.lives.add(life)
                return site
            await self._moved.wait()

    def _free(self, life: Life, *, alone: bool) -> _Site | None:
        """A worker that takes an episode now."""
        # The last one is kept for those that must be alone, as long as there are any.
        last = self.sites[-1]
        if alone:
            return last if last.mending is None and not last.lives else None
        home = self._homes.get(life.key)
        others = [site for site in self.sites if not (self._alone and site is last)]
        if home is None or home not in others:
            if not others:
                return None
            home = min(others, key=lambda site: (len(site.lives), site.index))
            self._homes[life.key] = home
        return home if home.mending is None else None

    # A loss.

    def _line(self, index: int, worker: WorkerHandle) -> EnvironmentLine:
        return EnvironmentLine(
            worker,
            self._limit,
            lambda: bool(self.sites[index].lives),
            lambda loss, busy, stuck: self._lost(self.sites[index], loss, busy, stuck),
        )

    def _lost(self, site: _Site, loss: WorkerLost, busy: set[Life], stuck: bool) -> None:
        for life in busy:
            life.deaths, life.stuck, life.why = life.deaths + 1, stuck, loss.why
        lives, site.lives = site.lives, set()
        try:
            if busy:
                self._cases.append(_Case(loss, set(busy)))
            if not busy or not self._supervisor.settings.restarts:
                self._supervisor.spend_restart(loss)
        except WorkerLost as lost:
            self._fatal = lost
            self._news()
            return
        site.mending = asyncio.get_running_loop().create_task(self._mend(site, loss, len(lives)))

    async def _mend(self, site: _Site, loss: WorkerLost, count: int) -> None:
        try:
            site.line = self._line(site.index, await self._restart(site.index, loss))
            again = f"{count} {'episode that was' if count == 1 else 'episodes that were'} in it"
            show_on_stderr(f"{loss.what}\n  it was started again; begun again: {again}")
        except StropError as error:
            self._fatal = error
        except Exception as error:
            self._fatal = RunFailure(f"{loss.role} {loss.rank} could not be started again: {error}")
            self._fatal.__cause__ = error
        finally:
            site.mending = None
            self._news()

    def _acquit(self, life: Life) -> None:
        """An episode has been played: it did not do it. Losses of which nobody is suspected any more are counted.

        Raises:
            WorkerLost: there were too many.
        """
        for case in self._dismiss(life):
            if not case.suspects:
                try:
                    self._supervisor.spend_restart(case.loss)
                except WorkerLost as lost:
                    self._fatal = lost
                    self._news()
                    raise

    def _dismiss(self, life: Life) -> list[_Case]:
        """No longer suspect an episode; returns the cases that it was suspected in."""
        found = [case for case in self._cases if life in case.suspects]
        for case in found:
            case.suspects.discard(life)
        self._cases = [case for case in self._cases if case.suspects]
        return found

    def _convict(self, life: Life) -> None:
        """An episode did it: all losses that it was suspected of are explained."""
        self._cases = [case for case in self._cases if life not in case.suspects]

    def _news(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def _blame(life: Life) -> Failed:
    tries = f"{TRIES} times, the last time alone in it"
    if life.stuck:
        return Failed(Status.TIMEOUT, f"the environment has blocked the event loop of its process {tries}: {life.why}")
    return Failed(Status.ENVIRONMENT_ERROR, f"the environment has ended its process {tries}: {life.why}")
