"""Promise: what is sampled ahead is trained whatever it took, so that long completions are not thinned out.

A completion takes as long as it has tokens. The collector, its windows, admission and the journal are the real ones;
engine and trainer only let time go by, on a clock that jumps from one event to the next. Beside it a window that
samples ahead without admission and drops what has become too old shows what the tests would see otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
from test_collector import Judge, Letters, Question

from strop.rollout.admission import Admission
from strop.rollout.collector import Collector
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.episode import Group
from strop.rollout.journal import Journal
from strop.rollout.player import Player

S = 2
GROUPS, SIZE, STEPS = 16, 4, 60
PLACES = 96
"""Completions that the engine samples at a time; others wait in order."""
TOKEN = 1.0
"""Seconds a token takes."""
TRAINING = 150.0
"""Seconds a step is trained, about as long as a window is sampled."""
SEEDS = (0, 1, 2)

T = TypeVar("T")


class Skipping(selectors.SelectSelector):
    """Lets the time go by that a loop would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is left that could happen")
        self.now += timeout
        return ready


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, in a loop that never waits."""
    clock = Skipping()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


class Lengths:
    """The length of each completion: prompts differ in what they need, and completions of a prompt do."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, group: int, sample: int) -> int:
        prompt, own = (np.random.default_rng((self._seed, *key)).normal() for key in ((group,), (group, sample)))
        return max(1, round(60 * math.exp(0.7 * prompt + 0.5 * own)))


class Clocked:
    """An engine that takes a while for each token, and goes on with new weights from the next token on."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths, self._places = lengths, asyncio.Semaphore(PLACES)
        self._changes, self._versions = [0.0], [0]
        self.sampled: list[int] = []
        """Lengths of all completions that were begun."""

    def serve(self, version: int) -> None:
        self._changes.append(asyncio.get_running_loop().time())
        self._versions.append(version)

    async def generate(self, request: SampleRequest) -> SampleResult:
        group, sample, _ = request.stream
        length = self._lengths.of(group, sample)
        async with self._places:
            self.sampled.append(length)
            begun = asyncio.get_running_loop().time()
            await asyncio.sleep(length * TOKEN)
        times = begun + TOKEN * np.arange(length)
        versions = np.array(self._versions)[np.searchsorted(self._changes, times, side="right") - 1]
        return SampleResult(np.full(length, sample), np.full(length, -1.0), versions.astype(np.int32), "stop")


class DropsTheStale(Collector):
    """What other frameworks do: so many groups are always under way, whatever version that is for, and a step trains
    the first that have ended, without those which are too old by then."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._numbers = itertools.count()
        self._ended: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self.lost = 0

    def serve(self, version: int) -> None:
        while len(self._tasks) < (S + 1) * self.admission.groups_per_step:
            number = next(self._numbers)
            task = asyncio.get_running_loop().create_task(self.make_group(number, self._next_prompts(1)[0]))
            task.add_done_callback(self._ended.put_nowait)
            self._tasks[number] = task

    async def next_window(self, step: int) -> list[Group]:
        kept: list[Group] = []
        while len(kept) < self.admission.groups_per_step:
            group = (await self._ended.get()).result()
            del self._tasks[group.number]
            self.serve(step)
            fresh = step - oldest(group) <= S
            self.lost += not fresh
            kept += [group] * fresh
        return kept


def versions_of(group: Group) -> np.ndarray:
    """Of all tokens that were sampled."""
    return np.concatenate([turn.versions for episode in group.episodes for turn in episode.turns if turn.sampled])


def oldest(group: Group) -> int:
    return int(versions_of(group).min())


@dataclass
class Account:
    """Of a run: lengths of the completions that were trained, numbers of their groups, ages of their tokens."""

    lengths: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    ages: list[np.ndarray] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    lost: int = 0


@cache
def run(kind: type[Collector], seed: int) -> Account:
    """Some steps of a run that trains what `kind` hands it."""
    return in_virtual_time(_run(kind, seed))


async def _run(kind: type[Collector], seed: int) -> Account:
    engine = Clocked(Lengths(seed))
    prompts = (Question(f"row-{number}", (1, 2, 3)) for number in itertools.count())
    collector = kind(
        Player(Journal(engine), Letters()),  # type: ignore[arg-type]
        Judge(),
        lambda count: list(itertools.islice(prompts, count)),
        settings=SampleSettings(10_000),
        group_size=SIZE,
        admission=Admission(GROUPS, S),
    )
    found = Account()
    collector.serve(0)
    for step in range(STEPS):
        groups = await collector.next_window(step)
        found.numbers += [group.number for group in groups]
        found.lengths += [len(episode.turns[-1].tokens) for group in groups for episode in group.episodes]
        found.ages += [step - versions_of(group) for group in groups]
        await asyncio.sleep(TRAINING)
        engine.serve(step + 1)
        collector.serve(step + 1)
    await collector.close()
    found.sampled = engine.sampled
    found.lost = getattr(collector, "lost", 0)
    return found


def same_law(first: Sequence[int], second: Sequence[int]) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test, by the limit of its distribution."""
    one, other = np.sort(first), np.sort(second)
    at = np.concatenate([one, other])
    shares = [np.searchsorted(sample, at, side="right") / len(sample) for sample in (one, other)]
    distance = np.abs(shares[0] - shares[1]).max()
    scaled = distance * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    if scaled < 0.2:  # where the series needs more terms than are taken, and 1 has a dozen nines
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_that_are_trained_are_those_that_are_sampled(seed: int) -> None:
    found = run(Collector, seed)
    assert len(found.lengths) == GROUPS * SIZE * STEPS >= 2000
    assert same_law(found.lengths, found.sampled) > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_no_token_is_older_than_the_bound_and_no_group_is_lost(seed: int) -> None:
    found = run(Collector, seed)
    assert found.numbers == list(range(GROUPS * STEPS))
    ages = np.concatenate(found.ages)
    assert ages.min() >= 0
    assert ages.max() == S, "the bound was not reached, so that nothing has held it"
    assert ages.mean() > 0.3, "it was not sampled ahead"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_that_drops_the_stale_is_seen_to_lose_the_long(seed: int) -> None:
    found = run(DropsTheStale, seed)
    assert len(found.lengths) == GROUPS * SIZE * STEPS
    assert np.concatenate(found.ages).max() <= S
    assert found.lost > 0
    assert same_law(found.lengths, found.sampled) < 1e-3
    assert np.mean(found.lengths) < 0.95 * np.mean(found.sampled)


def test_the_test_of_laws_knows_what_is_known() -> None:
    draw = np.random.default_rng(0)
    values = [same_law(draw.normal(size=400).tolist(), draw.normal(size=300).tolist()) for _ in range(400)]
    # Where the laws are the same the p-value is uniform; with these sizes a little on the safe side.
    assert 0.005 < np.mean(np.array(values) < 0.05) < 0.08
    assert same_law(draw.normal(size=400).tolist(), draw.normal(0.5, size=400).tolist()) < 1e-3
    assert same_law([1, 2, 3], [1, 2, 3]) == 1.0
    # Half of one sample lies apart from the other: D = 0.5, and 2 exp(-2 D^2 n / 2) but for further terms.
    assert same_law(range(100), range(50, 150)) == pytest.approx(2 * math.exp(-25), rel=1e-6)
