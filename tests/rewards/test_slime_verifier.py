"""The verifier `slime`: reward functions as slime's users write them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.config.adapted_rewards import SlimeVerifier
from strop.config.rewards import RewardSettings
from strop.errors import RunFailure, UserError
from strop.rewards.build import build_scorer
from strop.rewards.protocol import Completed, Verdict
from strop.rewards.slime import SlimeFunction

SOURCE = """
import asyncio
from slime.utils.types import Sample

seen = []

async def matches(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    await asyncio.sleep(0)
    seen.append(sample)
    return args.scale * float(sample.response == sample.label)

def plain(args, sample):
    return 1.0 if sample.status == Sample.Status.COMPLETED else 0.0

async def parts(args, sample):
    return {"score": 0.5, "format": 1.0, "text": "not a number"}

async def ranks(args, samples):
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].response))
    return [order.index(i) / len(samples) for i in range(len(samples))]

async def raises(args, sample):
    return {"a": 1.0}[sample.response]

async def from_row(args, sample):
    return sample.metadata["level"] + sample.metadata["inner"]

async def rewarded(args, sample):
    sample.reward = {"score": 0.25}
    return sample.get_reward_value(args)

async def nothing(args, sample):
    return None

async def wrong(args, sample):
    return "1"

async def few(args, samples):
    return [1.0]

async def nan(args, sample):
    return float("nan")

def alone(sample):
    return 1.0
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "slime_rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("slime_rewards", None)


def ask(name: str, *texts: str, row: dict[str, Any] | None = None, **settings: Any) -> list[Verdict]:
    verifier = SlimeFunction(SlimeVerifier(kind="slime", function=f"slime_rewards:{name}", **settings), where="here")
    return verifier.verify(
        [Completed("p", text, answer="a", row=row or {}, completion_ids=(1, 2), finish="length") for text in texts]
    )


def test_a_function_gets_its_sample_and_its_args() -> None:
    row = {"prompt": "p", "answer": "a", "level": 2, "metadata": {"inner": 3}}
    found = ask("matches", "a", "b", row=row, arguments={"scale": 2.0})
    assert [verdict.score for verdict in found] == [2.0, 0.0]
    sample = sys.modules["slime_rewards"].seen[1]
    assert (sample.prompt, sample.response, sample.label, sample.tokens) == ("p", "b", "a", [1, 2])
    assert (sample.index, sample.response_length, sample.status.value) == (1, 2, "truncated")
    assert sample.metadata == {"level": 2, "inner": 3}
    assert [verdict.score for verdict in ask("from_row", "x", row=row)] == [5]


def test_functions_of_every_form() -> None:
    assert [verdict.score for verdict in ask("plain", "a")] == [0.0]
    assert [v.score for v in ask("ranks", "aaa", "b", "cc", call_with="group")] == [2 / 3, 0.0, 1 / 3]
    assert ask("nothing", "a") == [Verdict(None)]
    assert [verdict.score for verdict in ask("rewarded", "a", reward_key="score")] == [0.25]


def test_a_dict_has_a_score_and_components() -> None:
    [verdict] = ask("parts", "a", reward_key="score")
    assert (verdict.score, dict(verdict.components)) == (0.5, {"format": 1.0})
    with pytest.raises(RunFailure, match="reward_key"):
        ask("parts", "a")


def test_an_exception_is_an_error_of_its_sample_alone() -> None:
    found = ask("raises", "a", "b")
    assert [(verdict.score, verdict.status) for verdict in found] == [(1.0, "ok"), (None, "verifier_error")]
    assert "KeyError" in found[1].detail
    assert ask("nan", "a")[0].status == "verifier_error"


@pytest.mark.parametrize(("name", "settings"), [("wrong", {}), ("few", {"call_with": "group"})])
def test_what_is_no_number_stops_the_run(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RunFailure, match=r"slime_rewards:.* returned"):
        ask(name, "a", "b", **settings)


def test_a_function_of_another_form_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be called"):
        ask("alone", "a")


async def test_it_runs_in_worker_processes_too() -> None:
    settings = RewardSettings(
        verifiers=[
            SlimeVerifier(kind="slime", function="slime_rewards:matches", isolate="process", arguments={"scale": 1})
        ],
        workers=1,
    )
    scorer = build_scorer(settings)
    try:
        found = await scorer.score([Completed("p", "a", answer="a"), Completed("p", "b", answer="a")])
    finally:
        await scorer.close()
    assert [reward.total for reward in found] == [1.0, 0.0]
