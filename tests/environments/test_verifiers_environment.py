"""Environments of the package `verifiers`: its own turns, tools and rewards, the tokens of an engine of ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verifiers")
sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("environments", "rollout", "loops"))
from test_player import Asked
from tokenizers_for_chat import tokenizer_of

from strop.config.adapted_environments import VerifiersEnvironment
from strop.config.data import DataSettings, DataSource
from strop.data.rendering import Renderer
from strop.data.sources import open_source
from strop.environments.verifiers import VerifiersFactory
from strop.errors import DataError, MissingExtra, UserError
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.episode import Episode
from strop.rollout.player import Player, World

NAME = "qwen2_5"
LOOPS = str(Path(__file__).parents[1] / "loops")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes of tools too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path), LOOPS]))


@dataclass
class Says:
    """Writes lines, one for each request, and ends each turn."""

    lines: list[str]
    requests: list[SampleRequest] = field(default_factory=list)

    async def generate(self, request: SampleRequest) -> SampleResult:
        tokenizer = tokenizer_of(NAME)
        line = self.lines[len(self.requests) % len(self.lines)]
        self.requests.append(request)
        tokens = [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]
        finish = "stop" if len(tokens) <= request.settings.max_new_tokens else "length"
        tokens = tokens[: request.settings.max_new_tokens]
        return SampleResult(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish)  # type: ignore[arg-type]


def rows(**arguments: Any) -> list[dict[str, Any]]:
    source = open_source(DataSource(path="verifiers:tiny_taskset", arguments=arguments))
    return [source[i] for i in range(len(source))]


async def play(says: list[str], row: dict[str, Any], *, budget: int = 200, **settings: Any) -> tuple[Episode, Says]:
    tokenizer = tokenizer_of(NAME)
    given = VerifiersEnvironment(kind="verifiers", taskset="tiny_taskset", **settings)
    factory = VerifiersFactory(given, tokenizer.chat_template)
    data = DataSettings(train=DataSource(path="unused"), render="chat")
    world = World(factory, given, Renderer(data, tokenizer), frozenset([tokenizer.eos_token_id]), 4096)
    engine = Says(says)
    episode = Episode(0, 0, dict(row), "row-0")
    asked = Asked(row["prompt"], tuple(tokenizer(row["prompt"])["input_ids"]), row)
    await factory.open()
    try:
        await Player(engine, tokenizer, world).play(episode, asked, SampleSettings(budget), (0, 0, 0))
    finally:
        await factory.close()
    return episode, engine


def test_a_taskset_is_a_source() -> None:
    found = rows(count=3)
    assert [row["prompt"] for row in found] == ["0=", "1=", "2="]
    assert [row["answer"] for row in found] == ["0", "1", "2"]
    assert found[1]["task"]["idx"] == 1
    for arguments in ({"counts": 3}, {"count": "many"}):
        with pytest.raises(DataError, match="tiny_taskset"):
            rows(**arguments)
    with pytest.raises(DataError, match="no_such_taskset"):
        open_source(DataSource(path="verifiers:no_such_taskset"))


async def test_a_single_turn_is_scored_by_the_task() -> None:
    for said, reward in (("It is 2.", 2.0), ("Hm.", 0.0)):
        episode, engine = await play([said], rows()[2])
        assert str(episode.status) == "stop", episode.detail
        tokenizer = tokenizer_of(NAME)
        [stream] = episode.streams()
        read = tokenizer.decode(stream.tokens[~stream.loss_mask])
        assert read == tokenizer.apply_chat_template(
            [{"role": "user", "content": "2="}], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(stream.tokens[stream.loss_mask]) == f"{said}{tokenizer.eos_token}"
        assert (stream.logprobs[stream.loss_mask] == -0.5).all()
        assert list(episode.turn_rewards.values()) == [reward]
        assert episode.completion == said
        assert len(engine.requests) == 1


async def test_tools_of_the_task_are_called_and_only_what_the_policy_wrote_is_trained() -> None:
    call = '<tool_call>\n{"name": "words_twice", "arguments": {"text": "1"}}\n</tool_call>'
    arguments = {"task": {"tools": True}}
    episode, engine = await play([call, "It is 1 and 11."], rows(**arguments)[1], arguments=arguments)
    assert str(episode.status) == "stop", episode.detail
    tokenizer = tokenizer_of(NAME)
    [stream] = episode.streams()
    assert len(engine.requests) == 2
    # The second request is the first, the turn as it was sampled, and behind it what is new.
    first, second = (list(request.tokens) for request in engine.requests)
    turn = [*tokenizer(call)["input_ids"], tokenizer.eos_token_id]
    assert second[: len(first) + len(turn)] == first + turn
    assert "words_twice" in tokenizer.decode(first)
    assert "<tool_response>\n11\n</tool_response>" in tokenizer.decode(second[len(first) + len(turn) :])
    trained = tokenizer.decode(stream.tokens[stream.loss_mask])
    assert trained == f"{call}{tokenizer.eos_token}It is 1 and 11.{tokenizer.eos_token}"
    assert np.isnan(stream.logprobs[~stream.loss_mask]).all()
    assert list(episode.turn_rewards.values()) == [2.0]


async def test_calls_that_cannot_be_understood_are_answered() -> None:
    arguments = {"task": {"tools": True}}
    lines = ["<tool_call>\n{nonsense\n</tool_call>", '<tool_call>\n{"name": "no", "arguments": {}}\n</tool_call>', "1"]
    episode, engine = await play(lines, rows(**arguments)[1], arguments=arguments)
    assert str(episode.status) == "stop", episode.detail
    seen = tokenizer_of(NAME).decode(list(engine.requests[-1].tokens))
    assert "error:" in seen
    assert "there is no tool 'no'; there are words_twice" in seen


async def test_limits_of_the_package_and_of_the_recipe_cut_an_episode_short() -> None:
    call = '<tool_call>\n{"name": "words_twice", "arguments": {"text": "1"}}\n</tool_call>'
    arguments = {"task": {"tools": True}}
    row = rows(**arguments)[1]
    episode, engine = await play([call], row, arguments=arguments, settings={"agent": {"max_turns": 2}}, budget=900)
    assert (str(episode.status), len(engine.requests)) == ("length", 2), episode.detail
    episode, engine = await play([call], row, arguments=arguments, max_turns=3, budget=900)
    assert (str(episode.status), len(engine.requests)) == ("length", 3), episode.detail


async def test_several_agents_of_one_episode_are_paths_of_their_own() -> None:
    episode, engine = await play(["1", "No."], rows()[1], settings={"id": "best-of-n", "n": 2})
    assert str(episode.status) == "stop", episode.detail
    streams = episode.streams()
    assert len(streams) == len(engine.requests) == 2
    assert sum(stream.loss_mask.sum() for stream in streams) == episode.sampled_tokens()


async def test_a_reward_that_fails_is_an_error_of_the_environment() -> None:
    import tiny_taskset

    async def fails(self: Any, trace: Any) -> float:
        raise RuntimeError("no judge")

    original = tiny_taskset.WordTask.said
    fails.reward, fails._vf_weight, fails.__name__ = True, 1.0, "said"  # type: ignore[attr-defined]
    tiny_taskset.WordTask.said = fails  # type: ignore[method-assign]
    try:
        episode, _ = await play(["1"], rows()[1])
    finally:
        tiny_taskset.WordTask.said = original  # type: ignore[method-assign]
    assert str(episode.status) == "environment_error"
    assert "no judge" in episode.detail


def test_mistakes_are_told_before_anything_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(**settings: Any) -> UserError:
        with pytest.raises(UserError) as error:
            VerifiersFactory(VerifiersEnvironment(kind="verifiers", **{"taskset": "tiny_taskset", **settings}), None)
        return error.value

    assert error_of(taskset="no_such_taskset").where == "environment.taskset"
    assert error_of(arguments={"count": "many"}).where.startswith("environment.arguments")
    assert error_of(settings={"agents": {}}).where.startswith("environment.settings")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(MissingExtra) as error:
        VerifiersFactory(VerifiersEnvironment(kind="verifiers", taskset="tiny_taskset"), None)
    assert "strop[verifiers]" in error.value.mend
