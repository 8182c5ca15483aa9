"""The collector: windows in order of admission, whole groups in order of samples, and what a failure does."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from strop.rewards.protocol import Completed, Reward
from strop.rollout.admission import Admission
from strop.rollout.collector import Collector, apply_reward, reward_of
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.episode import Episode, Status
from strop.rollout.player import Player


@dataclass(frozen=True)
class Question:
    prompt_id: str
    tokens: tuple[int, ...]
    prompt: Any = "question"
    answer: Any = "7"
    row: dict[str, Any] = field(default_factory=lambda: {"prompt": "question", "answer": "7", "hint": "none"})


WORTHLESS = ("row-0", "row-2", "row-3")


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


class SlowestFirst:
    """An engine whose later requests are done earlier; a request in `fails` raises after two turns of the loop."""

    def __init__(self, fails: tuple[int, ...] | None = None) -> None:
        self.fails = fails
        self.asked: list[tuple[int, ...]] = []
        self.done: list[tuple[int, ...]] = []
        self.cancelled: list[tuple[int, ...]] = []

    async def generate(self, request: SampleRequest) -> SampleResult:
        group, sample = request.stream[:2]
        self.asked.append(request.stream)
        try:
            turns = 2 if request.stream == self.fails else 60 - 8 * group - sample
            for _ in range(turns):
                await asyncio.sleep(0)
            if request.stream == self.fails:
                raise RuntimeError("the engine broke")
        except asyncio.CancelledError:
            self.cancelled.append(request.stream)
            raise
        self.done.append(request.stream)
        size = 1 + sample
        return SampleResult(
            [10 * group + sample] * size, [-1.0] * size, [0] * size, "length" if sample == 1 else "stop"
        )


class Judge:
    """Rewards a completion by its first token; what `verdict` says otherwise goes first."""

    def __init__(self, verdict: Callable[[Completed], Reward | None] = lambda _: None) -> None:
        self.verdict = verdict
        self.seen: list[Completed] = []

    async def score(self, completed: Sequence[Completed]) -> list[Reward]:
        self.seen += completed
        return [
            self.verdict(c)
            or Reward(float(c.completion_ids[0]), {"judge": float(c.completion_ids[0])}, True, detail="fine")
            for c in completed
        ]

    async def close(self) -> None: ...


def collector_of(engine: Any, judge: Any = None, *, per_step: int = 3, size: int = 4, **options: Any) -> Collector:
    numbers = itertools.count()
    draw = lambda: (lambda n: Question(f"row-{n}", (1, 2, n)))(next(numbers))  # noqa: E731
    return Collector(
        Player(engine, Letters()),
        judge or Judge(),
        lambda count: [draw() for _ in range(count)],
        settings=SampleSettings(8),
        group_size=size,
        admission=Admission(per_step, options.pop("max_staleness", 0)),
        **options,
    )


async def test_windows_come_in_order_of_admission_and_groups_in_order_of_samples() -> None:
    engine, seen = SlowestFirst(), []
    collector = collector_of(engine, progress=lambda done, of: seen.append((done, of)))
    for step in range(2):
        groups = await collector.next_window(step)
        assert [g.number for g in groups] == [3 * step, 3 * step + 1, 3 * step + 2]
        for group in groups:
            assert group.prompt_id == f"row-{group.number}"
            for sample, episode in enumerate(group.episodes):
                assert (episode.group, episode.sample) == (group.number, sample)
                assert episode.prompt_id == group.prompt_id
                stream = episode.streams()[0]
                assert stream.tokens.tolist() == [1, 2, group.number, *[10 * group.number + sample] * (1 + sample)]
                assert int(stream.loss_mask.sum()) == 1 + sample
                assert episode.reward == 10 * group.number + sample
                assert episode.status == (Status.LENGTH if sample == 1 else Status.STOP)
                assert episode.completion == Letters().decode([10 * group.number + sample] * (1 + sample))
    assert engine.done != engine.asked, "the engine was to finish in another order than it was asked in"
    # Randomness belongs to the sample: each has a stream of its own, in its group's name.
    assert sorted(engine.asked) == [(g, s, 0) for g in range(6) for s in range(4)]
    assert seen == [(n, 12) for n in range(1, 13)] * 2


async def test_no_group_starts_before_it_is_admitted() -> None:
    engine = SlowestFirst()
    collector = collector_of(engine)
    await collector.next_window(0)
    assert {stream[0] for stream in engine.asked} == {0, 1, 2}

    engine = SlowestFirst()
    collector = collector_of(engine, max_staleness=1)
    groups = await collector.next_window(0)
    assert [g.number for g in groups] == [0, 1, 2]
    assert {stream[0] for stream in engine.asked} == {0, 1, 2, 3, 4, 5}
    assert [g.number for g in await collector.next_window(1)] == [3, 4, 5]
    await collector.close()


async def test_the_verifier_sees_the_whole_row_and_the_sampled_tokens() -> None:
    judge = Judge()
    await collector_of(SlowestFirst(), judge, per_step=1, size=2).next_window(0)
    second = judge.seen[1]
    assert (second.prompt, second.answer, second.row["hint"]) == ("question", "7", "none")
    assert second.completion_ids == [1, 1]
    assert second.finish == "length"


@pytest.mark.parametrize("status", ["verifier_error", "timeout"])
async def test_what_could_not_be_verified_has_a_status_and_no_reward(status: Any) -> None:
    def verdict(completed: Completed) -> Reward | None:
        if completed.completion_ids[0] % 10 != 2:
            return None
        return Reward(math.nan, {"format": 1.0}, None, status, "judge: broke", failed="judge")

    groups = await collector_of(SlowestFirst(), Judge(verdict)).next_window(0)
    for group in groups:
        for episode in group.episodes:
            if episode.sample == 2:
                assert episode.status == status
                assert not episode.status.trainable
                assert math.isnan(episode.reward)
                assert episode.correct is None
                assert episode.components == {"format": 1.0}
                assert episode.detail == "judge: broke"
            else:
                assert episode.status.trainable
                assert episode.reward == 10 * group.number + episode.sample


class Aborting(SlowestFirst):
    async def generate(self, request: SampleRequest) -> SampleResult:
        result = await super().generate(request)
        if request.stream[1] != 0:
            return result
        return SampleResult(result.tokens, result.logprobs, result.versions, "aborted")


async def test_an_aborted_completion_is_not_verified() -> None:
    judge = Judge()
    groups = await collector_of(Aborting(), judge, per_step=1).next_window(0)
    assert [e.status for e in groups[0].episodes] == ["aborted", "length", "stop", "stop"]
    assert math.isnan(groups[0].episodes[0].reward)
    assert len(judge.seen) == 3


async def test_a_failing_engine_cancels_everything_else() -> None:
    engine = SlowestFirst(fails=(1, 2, 0))
    collector = collector_of(engine)
    with pytest.raises(RuntimeError, match="the engine broke"):
        await collector.next_window(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not engine.done
    assert len(engine.cancelled) == 11, "the failing group's own siblings too"


async def test_a_failing_verifier_call_cancels_everything_else() -> None:
    def verdict(completed: Completed) -> Reward | None:
        raise ValueError("the scorer broke")

    engine = SlowestFirst()
    with pytest.raises(ValueError, match="the scorer broke"):
        await collector_of(engine, Judge(verdict)).next_window(0)
    finished = len(engine.done)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(engine.done) == finished
    assert len(engine.done) + len(engine.cancelled) == 12


async def test_cancelling_a_window_cancels_its_samples() -> None:
    engine = SlowestFirst()
    task = asyncio.create_task(collector_of(engine).next_window(0))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        await asyncio.sleep(0)
    assert not engine.done
    assert len(engine.cancelled) == 12


@pytest.mark.parametrize("status", ["verifier_error", "timeout"])
def test_a_failed_reward_comes_back_as_it_was_written(status: Any) -> None:
    episode = Episode(0, 0, status=Status.STOP)
    reward = Reward(float("nan"), {"format": 1.0}, None, status, "judge: no answer", "judge")
    apply_reward(episode, reward)
    found = reward_of(episode)
    assert (found.status, found.failed, found.detail) == (status, "judge", "judge: no answer")
    assert found.components == {"format": 1.0}


async def test_other_prompts_come_in_order_of_the_places_that_they_take() -> None:
    # The first round's prompts are rows 0 to 2, of which the outer ones are worth nothing; the second's rows 3 and 4.
    collector = collector_of(
        SlowestFirst(), worth=lambda group: group.episodes[0].prompt_id not in WORTHLESS, max_refills=2
    )
    collector.serve(0)
    groups = await collector.next_window(0)
    assert [(group.number, group.episodes[0].prompt_id) for group in groups] == [
        (0, "row-5"),
        (1, "row-1"),
        (2, "row-4"),
    ]
    assert [group.episodes[0].prompt_id for group in collector.discarded] == ["row-0", "row-2", "row-3"]
    await collector.close()


async def test_too_few_prompts_are_told_before_any_group_begins() -> None:
    engine = SlowestFirst()
    collector = Collector(
        Player(engine, Letters()),
        Judge(),
        lambda count: [Question("row-0", (1, 2))] * (count - 1),
        settings=SampleSettings(8),
        group_size=2,
        admission=Admission(3),
    )
    collector.serve(0)
    with pytest.raises(ValueError, match="3 prompts were asked for, and 2 came"):
        await collector.next_window(0)
    await collector.close()
    assert engine.asked == []
