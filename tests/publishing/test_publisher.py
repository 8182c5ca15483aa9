"""The order of a publication, and who is named when it fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from strop.errors import RunFailure
from strop.publishing.manifest import Entry, Fault, Manifest
from strop.publishing.proof import Probe
from strop.publishing.publisher import Publisher
from strop.publishing.sides import Delivered
from strop.publishing.transports.protocol import Offer

SCORES = [np.asarray([np.nan, -1.0, -2.0], dtype=np.float32)]


class Party:
    """A trainer and engine in one, that writes down what it is asked, and fails where it is told to."""

    def __init__(self, name: str, log: list[str], *, streams: bool = True) -> None:
        self.name, self.log, self.streams = name, log, streams
        self.faults: list[Fault] = []
        self.scores = SCORES
        self.moves = [np.asarray([np.nan, 0.0, 0.0], dtype=np.float32)]
        self.fails: str | None = None
        self.hangs: str | None = None

    async def _do(self, verb: str) -> None:
        self.log.append(f"{verb} {self.name}")
        await asyncio.sleep(0)
        if self.fails == verb:
            raise ConnectionError("gone")
        if self.hangs == verb:
            await asyncio.sleep(600)

    async def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        await self._do("offer")
        return Offer("t", version, self.streams, {"takers": takers, "whole": whole})

    async def deliver(self) -> Delivered:
        await self._do("deliver")
        return Delivered(
            Manifest(3, tuple(Entry(f"t{at}", "float32", (1,), at) for at in range(9))), Offer("after", 3, False), 5
        )

    async def score(self, _: Sequence[Sequence[int]]) -> list[np.ndarray]:
        await self._do("score")
        return self.scores

    async def rounding(self, _: Sequence[Sequence[int]]) -> list[np.ndarray]:
        await self._do("rounding")
        return self.moves

    async def take(self, offer: Offer) -> None:
        await self._do(f"take {offer.transport}")

    async def verify(self, _: Manifest) -> list[Fault]:
        await self._do("verify")
        return self.faults

    async def pause(self) -> None:
        await self._do("pause")

    async def commit(self, _: int) -> None:
        await self._do("commit")

    async def resume(self) -> None:
        await self._do("resume")


def parties(**options: Any) -> tuple[Party, dict[str, Party], list[str]]:
    log: list[str] = []
    return Party("T", log, **options), {name: Party(name, log) for name in "ab"}, log


def publisher(**options: Any) -> Publisher:
    return Publisher(Probe([[0, 1, 2]], floor=1e-4), **options)


@pytest.mark.parametrize("streams", [True, False])
async def test_nobody_goes_on_before_everybody_is_proved(streams: bool) -> None:
    trainer, engines, log = parties(streams=streams)
    found = await publisher().publish(trainer, engines, version=3)
    moved = ["deliver T", "take t a", "take t b"] if streams else ["deliver T", "take after a", "take after b"]
    steps = [["pause a", "pause b", "offer T"], moved, ["score T", "verify a", "verify b"], ["score a", "score b"]]
    steps += [["commit a", "commit b"], ["resume a", "resume b"]]
    at = 0
    for step in steps:
        assert sorted(log[at : at + len(step)]) == sorted(step)
        at += len(step)
    assert at == len(log)
    assert (found["publish/version"], found["publish/bytes"], found["publish/probe_gap"]) == (3.0, 5.0, 0.0)


@pytest.mark.parametrize("verb", ["pause", "take t", "verify", "score", "commit"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_who_fails_or_does_not_answer_is_named_and_nobody_goes_on(verb: str, how: str) -> None:
    trainer, engines, log = parties()
    setattr(engines["b"], how, verb)
    with pytest.raises(RunFailure) as caught:
        await publisher(wait=0.2).publish(trainer, engines, version=3)
    assert "engine b" in caught.value.what
    assert "engine a" not in caught.value.what
    assert ("gone" if how == "fails" else "no answer") in caught.value.what
    assert not [line for line in log if line.startswith("resume")]


async def test_a_trainer_that_cannot_offer_is_named_and_nothing_moves() -> None:
    trainer, engines, log = parties()
    trainer.fails = "offer"
    with pytest.raises(RunFailure, match=r"failed at pausing and announcing\. In the trainer: ConnectionError: gone"):
        await publisher().publish(trainer, engines, version=3)
    assert not [line for line in log if line.split()[0] not in ("pause", "offer")]
    await no_task_is_left()


async def test_nothing_moves_before_the_last_engine_is_paused() -> None:
    trainer, engines, log = parties()

    async def pause() -> None:
        await asyncio.sleep(0.05)
        log.append("paused")

    engines["b"].pause = pause  # type: ignore[method-assign]
    await publisher().publish(trainer, engines, version=3)
    assert log.index("paused") < min(log.index("deliver T"), log.index("take t a"))


async def test_the_cause_is_told_whoever_is_first_to_fail() -> None:
    trainer, engines, _ = parties()
    engines["a"].fails = "take t"

    async def deliver() -> Delivered:
        await asyncio.sleep(0.05)
        raise RuntimeError("a rank was lost")

    trainer.deliver = deliver  # type: ignore[method-assign]
    with pytest.raises(RunFailure) as caught:
        await publisher().publish(trainer, engines, version=3)
    assert caught.value.what == (
        "publishing weights failed at moving. In the trainer: RuntimeError: a rank was lost. "
        "In engine a: ConnectionError: gone"
    )


async def test_wrong_tensors_are_named_up_to_five_for_each_engine() -> None:
    trainer, engines, log = parties()
    engines["a"].faults = [Fault(f"t{at}", "missing", "was not delivered") for at in range(7)]
    engines["b"].faults = [Fault("t8", "old", "holds the values of version 2")]
    with pytest.raises(RunFailure) as caught:
        await publisher().publish(trainer, engines, version=3)
    said = "; ".join(f"t{at} (was not delivered)" for at in range(5))
    assert caught.value.what == (
        f"version 3 of the weights did not arrive as it was sent. engine a: 7 of 9 tensors: {said}; and 2 more. "
        "engine b: 1 of 9 tensors: t8 (holds the values of version 2)"
    )
    assert not [line for line in log if line.split()[0] in ("commit", "resume") or line in ("score a", "score b")]


@pytest.mark.parametrize("moved", [0.1, 0.15])
async def test_where_scores_differ_the_trainer_is_asked_what_rounding_does(moved: float) -> None:
    trainer, engines, log = parties()
    probe = Probe([[0, 1, 2]], floor=1e-4, tolerance=1e-4)
    engines["b"].scores = [np.asarray([np.nan, -1.0, -2.5], dtype=np.float32)]
    trainer.moves = [np.asarray([np.nan, 1e-6, moved], dtype=np.float32)]
    if moved == 0.15:
        found = await Publisher(probe).publish(trainer, engines, version=3)
        assert found["publish/probe_gap"] == 0.5
        assert log.index("rounding T") < log.index("commit a")
        return
    with pytest.raises(RunFailure) as caught:
        await Publisher(probe).publish(trainer, engines, version=3)
    assert "engine b" in caught.value.what
    assert "differ by 0.5 nats, 0.4 is rounding" in caught.value.what
    assert not [line for line in log if line.startswith("resume")]


async def test_a_trainer_that_does_not_say_what_rounding_does_is_named() -> None:
    trainer, engines, _ = parties()
    engines["b"].scores = [np.asarray([np.nan, -1.0, -2.5], dtype=np.float32)]
    trainer.hangs = "rounding"
    with pytest.raises(RunFailure, match=r"no answer from the trainer within 0\.2 s of measuring the rounding"):
        await publisher(wait=0.2).publish(trainer, engines, version=3)


class Slow(Party):
    """A trainer whose scores take a while."""

    def __init__(self, log: list[str], seconds: float) -> None:
        super().__init__("T", log)
        self.seconds = seconds

    async def score(self, lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        self.log.append("score T")
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.log.append("given up T")
            raise
        found = await super().score(lists)
        self.log.append("scored T")
        return found


async def no_task_is_left() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_trainer_scores_while_engines_compare() -> None:
    trainer, engines, _ = parties()
    scored = asyncio.Event()

    async def score(_: Sequence[Sequence[int]]) -> list[np.ndarray]:
        scored.set()
        return SCORES

    async def verify(_: Manifest) -> list[Fault]:
        await scored.wait()
        return []

    trainer.score = score  # type: ignore[method-assign]
    engines["a"].verify = verify  # type: ignore[method-assign]
    await publisher(wait=5.0).publish(trainer, engines, version=3)
    await no_task_is_left()


@pytest.mark.parametrize(("comparing", "most", "least"), [(0.0, 0.6, 0.25), (0.6, 0.2, 0.0)])
async def test_seconds_of_the_probe_are_those_that_it_adds(comparing: float, most: float, least: float) -> None:
    _, engines, log = parties()

    async def verify(_: Manifest) -> list[Fault]:
        await asyncio.sleep(comparing)
        return []

    engines["a"].verify = verify  # type: ignore[method-assign]
    found = await publisher().publish(Slow(log, 0.3), engines, version=3)
    assert least < found["publish/probe_seconds"] < most
    assert comparing <= found["publish/checksum_seconds"]
    assert found["publish/seconds"] > found["publish/checksum_seconds"] + found["publish/probe_seconds"]


@pytest.mark.parametrize("scores", ["come", "fail"])
async def test_what_is_wrong_in_an_engine_is_told_when_the_trainer_is_done(
    scores: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, engines, log = parties()
    trainer = Slow(log, 0.1)
    trainer.fails = "score" if scores == "fail" else None
    engines["b"].faults = [Fault("t8", "old", "holds the values of version 2")]
    with pytest.raises(RunFailure, match=r"version 3 of the weights did not arrive .* engine b: 1 of 9 tensors: t8"):
        await publisher().publish(trainer, engines, version=3)
    # Another call of ranks that gather something may not meet this one.
    assert "given up T" not in log
    assert ("scored T" in log) == (scores == "come")
    await no_task_is_left()
    gc.collect()
    assert not caplog.records, "an exception that nobody asked for is logged when its task is collected"


async def test_a_trainer_that_cannot_score_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer, engines, log = parties()
    trainer.fails = "score"
    engines["b"].hangs = "score"
    with pytest.raises(RunFailure) as caught:
        await publisher(wait=5.0).publish(trainer, engines, version=3)
    assert caught.value.what == "publishing weights failed at probing. In the trainer: ConnectionError: gone"
    trainer.fails, trainer.hangs, engines["b"].hangs = None, "score", None
    with pytest.raises(RunFailure, match=r"no answer from the trainer within 0\.2 s of probing"):
        await publisher(wait=0.2).publish(trainer, engines, version=3)
    assert not [line for line in log if line.split()[0] in ("commit", "resume")]
    await no_task_is_left()
    gc.collect()
    assert not caplog.records


async def test_a_publication_that_is_given_up_while_engines_compare_leaves_nothing_running() -> None:
    _, engines, log = parties()
    trainer = Slow(log, 600)
    engines["b"].hangs = "verify"
    publishing = asyncio.ensure_future(publisher().publish(trainer, engines, version=3))
    while "score T" not in log or "verify b" not in log:
        await asyncio.sleep(0.01)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await no_task_is_left()
    assert "given up T" in log


@pytest.mark.parametrize("value", [-2.5, float("nan")])
async def test_a_probe_that_differs_where_all_tensors_agree_says_so(value: float) -> None:
    trainer, engines, log = parties()
    engines["b"].scores = [np.asarray([np.nan, -1.0, value], dtype=np.float32)]
    with pytest.raises(
        RunFailure, match=r"engine b: the engine does not serve .*version 3.*All tensors are what was sent"
    ):
        await publisher().publish(trainer, engines, version=3)
    assert not [line for line in log if line.split()[0] in ("commit", "resume")]


async def test_a_new_engine_gets_everything_anew() -> None:
    trainer, engines, _ = parties()
    seen: list[Offer] = []

    async def take(offer: Offer) -> None:
        seen.append(offer)

    engines["a"].take = take  # type: ignore[method-assign]
    for whole in (False, True):
        await publisher().publish(trainer, engines, version=3, whole=whole)
    assert [offer.details for offer in seen] == [{"takers": 2, "whole": False}, {"takers": 2, "whole": True}]
