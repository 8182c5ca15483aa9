"""The order of a publication, and who is named when it fails."""

from __future__ import annotations

import asyncio
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
    steps = [["pause a", "pause b"], ["offer T"], moved, ["verify a", "verify b"], ["score T", "score a", "score b"]]
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
    assert not [line for line in log if line.split()[0] in ("score", "commit", "resume")]


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
