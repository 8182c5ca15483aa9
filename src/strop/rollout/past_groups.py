"""Groups that were trained before, and which of them a step trains again.

Invariants (tests/rollout/test_past_groups.py):
1. No token of a group that is drawn is more than `max_age` versions old.
2. At most `keep` groups are kept: of those that are not too old, the latest that were trained for the first time.
3. A draw depends on the run's seed, the step and what is kept, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from strop.config.window import PastSettings
from strop.rollout.episode import Episode, Group
from strop.rollout.own_choice import own_select
from strop.rollout.sampling import stream_key, uniforms

STREAM = -2
"""What the streams of these draws begin with; those of samples begin with a group's number or, in evaluations, -1."""
OF_PARTS = -1
"""In the place of a group's number in the draw of a part of the pass rates."""


@dataclass(frozen=True)
class PastGroup:
    """A group that was trained.

    group: what of it was trained. baseline: the most likely completion of its prompt, where one was asked for. version:
    the oldest that sampled a token of it. advantage: mean of |advantage| over its tokens when it was last trained.
    pass_rate: share of its completions that are correct.
    """

    group: Group
    baseline: Episode | None
    version: int
    advantage: float
    pass_rate: float

    @property
    def number(self) -> int:
        """In order of admission; a group has the same number whenever it is trained."""
        return self.group.number

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards, of each role by itself."""
        by_role: dict[str, list[float]] = {}
        for episode in self.group.episodes:
            by_role.setdefault(episode.role, []).append(episode.reward)
        squares = [(reward - sum(own) / len(own)) ** 2 for own in by_role.values() for reward in own]
        return math.sqrt(math.fsum(squares) / max(len(squares), 1))


class PastGroups:
    """Keeps groups, and draws some of them for each step.

    Args:
        settings: `rollout.window.past`. seed: of the run.

    Raises:
        UserError: a function of the user's cannot be imported or called.
    """

    def __init__(self, settings: PastSettings, *, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._kept: dict[int, PastGroup] = {}
        selects: Mapping[str, Callable[[int, Sequence[PastGroup]], list[int]]] = {
            "uniform": self._uniform,
            "priority": self._by_priority,
            "stratified": self._stratified,
        }
        self._select = selects.get(settings.select, self._own_choice)
        self._own = own_select(settings)

    @property
    def kept(self) -> list[PastGroup]:
        """The groups that are kept, in the order in which they were first trained."""
        return list(self._kept.values())

    def take_back(self, groups: Sequence[PastGroup]) -> None:
        """Go on with the groups of a checkpoint, as `kept` gave them."""
        self._kept = {one.number: one for one in groups}

    def add(self, groups: Sequence[PastGroup]) -> None:
        """Keep these, which were trained now for the first time; the oldest go where there is no room."""
        for one in groups:
            self._kept[one.number] = one
        for number in list(self._kept)[: max(0, len(self._kept) - self._settings.keep)]:
            del self._kept[number]

    def trained_again(self, advantages: Mapping[int, float]) -> None:
        """Groups of these numbers were trained again, with such mean |advantage|."""
        for number, advantage in advantages.items():
            if number in self._kept:
                self._kept[number] = replace(self._kept[number], advantage=advantage)

    def draw(self, step: int) -> list[PastGroup]:
        """The past groups of a step, whose trainer has this version, in order of their numbers; the others that are
        too old by now are forgotten.

        Raises:
            RunFailure: the function of the user's returned what it must not.
        """
        self._kept = {n: one for n, one in self._kept.items() if step - one.version <= self._settings.max_age}
        if not self._kept:
            return []
        return [self._kept[number] for number in sorted(self._select(step, self.kept))]

    def _uniform(self, step: int, kept: Sequence[PastGroup]) -> list[int]:
        return [number for _, number in sorted(zip(self._draws(step, kept), _numbers(kept), strict=True))][
            : self._count
        ]

    def _by_priority(self, step: int, kept: Sequence[PastGroup]) -> list[int]:
        """Without putting back, each draw in proportion to the priorities that are left.

        Source: Efraimidis and Spirakis 2006, Weighted random sampling with a reservoir, as exponential clocks.
        """
        rings = []
        for u, one in zip(self._draws(step, kept), kept, strict=True):
            priority = one.advantage if self._settings.priority == "advantage" else one.spread
            weight = priority**self._settings.exponent
            rings.append((-math.log1p(-u) / weight if weight > 0 else math.inf, u, one.number))
        return [number for *_, number in sorted(rings)][: self._count]

    def _stratified(self, step: int, kept: Sequence[PastGroup]) -> list[int]:
        """In turn one of each part of the pass rates that has any left, the parts in an order that is drawn."""
        parts: dict[int, list[tuple[float, int]]] = {}
        for u, one in zip(self._draws(step, kept), kept, strict=True):
            part = min(int(one.pass_rate * self._settings.strata), self._settings.strata - 1)
            parts.setdefault(part, []).append((u, one.number))
        firsts = self._uniforms(step, [(OF_PARTS, part) for part in parts])
        order = [sorted(queue) for _, queue in sorted(zip(firsts, parts.values(), strict=True))]
        places = [(turn, at, number) for at, queue in enumerate(order) for turn, (_, number) in enumerate(queue)]
        return [number for *_, number in sorted(places)][: self._count]

    def _own_choice(self, step: int, kept: Sequence[PastGroup]) -> list[int]:
        assert self._own is not None
        count = min(self._count, len(kept))
        rng = np.random.default_rng(int(stream_key(self._seed, (STREAM, step))))
        return self._own(_numbers(kept), count, list(kept), count, rng)

    @property
    def _count(self) -> int:
        return self._settings.groups

    def _draws(self, step: int, kept: Sequence[PastGroup]) -> list[float]:
        """A number in [0, 1) for each group, which the others that are kept do not change."""
        return self._uniforms(step, [(one.number,) for one in kept])

    def _uniforms(self, step: int, names: Sequence[tuple[int, ...]]) -> list[float]:
        keys = np.array([stream_key(self._seed, (STREAM, step, *name)) for name in names], dtype=np.uint64)
        drawn: list[float] = uniforms(keys, np.zeros(len(names), dtype=np.int64)).tolist()
        return drawn


def _numbers(kept: Sequence[PastGroup]) -> list[int]:
    return [one.number for one in kept]


def oldest_version(group: Group) -> int:
    """The oldest version of the weights that sampled a token of a group."""
    found = [s.versions[s.loss_mask] for episode in group.episodes for s in episode.streams()]
    return min(int(versions.min()) for versions in found if len(versions))
