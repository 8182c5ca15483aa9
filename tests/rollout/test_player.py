"""Episodes of several turns: what the trainer sees is what was sampled, token by token, whatever template and world."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "environments"))
from tokenizers_for_chat import SPECIAL, tokenizer_of

from strop.config.data import DataSettings, DataSource
from strop.config.environment import PythonEnvironment
from strop.data.rendering import Renderer
from strop.environments.protocol import Done, Message, Observation, PolicyTurn
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.episode import Episode
from strop.rollout.player import Player, World

CONTEXT = 4096


@dataclass
class RandomPolicy:
    """Writes random tokens, keyed by the request's stream; ends a turn most of the time."""

    vocabulary: int
    end: int
    requests: list[SampleRequest] = field(default_factory=list)
    delay: float = 0.0

    async def generate(self, request: SampleRequest) -> SampleResult:
        await asyncio.sleep(self.delay)
        self.requests.append(request)
        draw = np.random.default_rng([abs(part) for part in request.stream])
        length = int(draw.integers(1, 12))
        tokens = draw.integers(0, self.vocabulary, size=length).tolist()
        finish = "stop" if draw.random() < 0.8 else "length"
        tokens = [token for token in tokens if token != self.end] + ([self.end] if finish == "stop" else [])
        tokens = tokens[: request.settings.max_new_tokens] or [self.vocabulary - 1]
        finish = "stop" if tokens[-1] == self.end else "length"
        return SampleResult(tokens, [-1.0] * len(tokens), [0] * len(tokens), finish)  # type: ignore[arg-type]


@dataclass
class Script:
    """Says what it was made with, turn by turn, then ends."""

    lines: list[list[Message]]
    rewards: list[float | None] = field(default_factory=list)
    opening: list[Message] | None = None
    closed: int = 0
    seen: list[PolicyTurn] = field(default_factory=list)

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        return self.opening

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        self.seen.append(turn)
        reward = self.rewards[turn.number] if turn.number < len(self.rewards) else None
        if turn.number >= len(self.lines):
            return Done(reward=reward)
        return Observation(self.lines[turn.number], reward)

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Factory:
    world: Any
    tools: tuple[Any, ...] = ()
    instructions: str = ""
    stop: tuple[str, ...] = ()
    forks: bool = True
    roles: tuple[str, ...] = ()

    def make(self) -> Any:
        return self.world

    async def open(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Asked:
    prompt: Any
    tokens: tuple[int, ...] = ()
    row: dict[str, Any] = field(default_factory=dict)
    prompt_id: str = "row-0"
    answer: Any = None


def play(
    name: str, world: Any, *, prompt: Any = "What is 1 + 2?", budget: int = 200, render: Any = "chat", **limits: Any
) -> Any:
    tokenizer = tokenizer_of(name)
    policy = RandomPolicy(len(tokenizer), tokenizer.eos_token_id)
    limits = {"kind": "python", "factory": "a:B", **limits}
    renderer = Renderer(DataSettings(train=DataSource(path="unused"), render=render), tokenizer)
    player = Player(
        policy,  # type: ignore[arg-type]
        tokenizer,
        World(
            Factory(world),
            PythonEnvironment.model_validate(limits),
            renderer,
            frozenset([tokenizer.eos_token_id]),
            CONTEXT,
        ),
    )
    episode = Episode(0, 0)
    asyncio.run(player.play(episode, Asked(prompt), SampleSettings(budget), (3, 1, 0)))
    return episode, policy


def check_token_in_token_out(episode: Episode, policy: RandomPolicy) -> None:
    """What was sampled is trained once, as sampled, behind exactly what the policy had read."""
    streams = episode.streams()
    assert sum(int(s.loss_mask.sum()) for s in streams) == episode.sampled_tokens()
    sampled = [turn for turn in episode.turns if turn.sampled]
    assert len(sampled) == len(policy.requests)
    for turn, request in zip(sampled, policy.requests, strict=True):
        before, said = list(request.tokens), turn.tokens.tolist()
        inside = []
        for stream in streams:
            at = len(before)
            if stream.tokens[:at].tolist() == before and stream.tokens[at : at + len(said)].tolist() == said:
                inside.append(bool(stream.loss_mask[at : at + len(said)].all()))
        assert inside.count(True) == 1, "a sampled turn is trained in exactly one stream"
    for stream in streams:
        assert not np.isnan(stream.logprobs[stream.loss_mask]).any()
        assert (stream.versions[~stream.loss_mask] == -1).all()


SAID = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\ue000\ue001"), max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(SPECIAL)),
    lines=st.lists(st.tuples(st.sampled_from(["user", "tool"]), SAID), max_size=5),
    system=st.none() | SAID,
    keep=st.booleans(),
)
def test_random_conversations_are_trained_as_they_were_sampled(
    name: str, lines: list[tuple[str, str]], system: str | None, keep: bool
) -> None:
    opening = [] if system is None else [{"role": "system", "content": system}]
    opening.append({"role": "user", "content": "Begin."})
    # DeepSeek's template has no place for results of tools behind a turn without calls.
    roles = {"tool": "user"} if name == "deepseek_r1_distill" else {}
    world = Script([[{"role": roles.get(role, role), "content": text}] for role, text in lines], opening=opening)
    episode, policy = play(name, world, keep_history=keep)
    assert episode.status in ("stop", "length")
    assert len(world.seen) == len(lines) + 1
    check_token_in_token_out(episode, policy)
    assert world.closed == 1
    if keep:
        assert len(episode.streams()) == 1
    bos = tokenizer_of(name).bos_token_id
    for turn in (turn for turn in episode.turns if turn.parent is None):
        assert turn.tokens[:2].tolist() != [bos, bos]


def test_dropped_thinking_forks_and_both_branches_are_trained() -> None:
    tokenizer = tokenizer_of("qwen3")
    texts = ["<think>\nhm\n</think>\n\nIt is 3.", "<think>\nno\n</think>\n\nYes."]

    class Thinker(RandomPolicy):
        async def generate(self, request: SampleRequest) -> SampleResult:
            self.requests.append(request)
            ids = tokenizer(texts[len(self.requests) - 1])["input_ids"] + [self.end]
            return SampleResult(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    policy = Thinker(len(tokenizer), tokenizer.eos_token_id)
    renderer = Renderer(DataSettings(train=DataSource(path="unused"), render="chat"), tokenizer)
    world = World(
        Factory(Script([[{"role": "user", "content": "Sure?"}]])),
        PythonEnvironment(kind="python", factory="a:B"),
        renderer,
        frozenset([tokenizer.eos_token_id]),
        CONTEXT,
    )
    episode = Episode(0, 0)
    asyncio.run(
        Player(policy, tokenizer, world).play(episode, Asked("1 + 2?"), SampleSettings(500), (0, 0, 0))  # type: ignore[arg-type]
    )
    first, second = episode.streams()
    check_token_in_token_out(episode, policy)
    assert "<think>\nhm" in tokenizer.decode(first.tokens)
    assert "hm" not in tokenizer.decode(second.tokens)
    # What the second turn read is what the model will read when it serves.
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": "Sure?"},
    ]
    served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(policy.requests[1].tokens) == served


def test_the_budget_of_tokens_is_one_for_all_turns() -> None:
    lines = [[{"role": "user", "content": "more"}]] * 50
    episode, policy = play("qwen2_5", Script(lines), budget=20, max_turns=50)
    assert episode.sampled_tokens() == 20
    assert episode.status == "length"
    left = [request.settings.max_new_tokens for request in policy.requests]
    assert left[0] == 20
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == len(left)


def test_turns_observations_and_turn_lengths_are_limited() -> None:
    lines = [[{"role": "user", "content": "more"}]] * 50
    episode, policy = play("qwen2_5", Script(lines), max_turns=3)
    assert len(policy.requests) == 3
    assert episode.status == "length"
    episode, policy = play("qwen2_5", Script(lines), max_turn_tokens=2, max_turns=50, budget=1000)
    assert {request.settings.max_new_tokens for request in policy.requests} == {2}
    episode, policy = play("qwen2_5", Script(lines), max_tokens=40, max_turns=50, budget=1000)
    first = len(episode.turns[0].tokens)
    assert all(len(request.tokens) - first + request.settings.max_new_tokens <= 40 for request in policy.requests)
    assert episode.status == "length"


def test_an_observation_that_no_turn_can_follow_is_not_read() -> None:
    """Nobody samples behind it, and it may be longer than the model's context."""
    long = [[{"role": "user", "content": "more " * CONTEXT}]]
    episode, policy = play("qwen2_5", Script(long))
    assert (episode.status, len(policy.requests), len(episode.turns)) == ("length", 1, 2)
    assert len(episode.streams()[0].tokens) <= CONTEXT
    assert episode.messages[-1] == long[0][0]
    episode, policy = play("qwen2_5", Script([[{"role": "user", "content": "more"}]] * 3), max_turns=2)
    assert episode.turns[-1].sampled


def test_first_messages_that_leave_no_room_are_the_environments_fault() -> None:
    episode, policy = play("qwen2_5", Script([], opening=[{"role": "user", "content": "more " * CONTEXT}]))
    assert episode.status == "environment_error"
    assert "leave no room" in episode.detail
    assert not policy.requests


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        ([{"role": "user", "content": ""}], "no tokens"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [1]}, {"role": "user", "content": "?"}],
            "template refuses",
        ),
    ],
)
def test_first_messages_that_cannot_be_read_are_the_environments_fault(opening: Any, says: str) -> None:
    episode, policy = play("qwen2_5", Script([], opening=opening), render="text" if "tokens" in says else "chat")
    assert episode.status == "environment_error"
    assert says in episode.detail
    assert not policy.requests


def test_rewards_of_turns_are_kept_by_turn() -> None:
    episode, _ = play("qwen2_5", Script([[{"role": "user", "content": "?"}]] * 2, rewards=[0.5, None, 2.0]))
    sampled = [number for number, turn in enumerate(episode.turns) if turn.sampled]
    assert episode.turn_rewards == {sampled[0]: 0.5, sampled[2]: 2.0}
    assert [message["role"] for message in episode.messages] == ["user", "assistant"] + ["user", "assistant"] * 2


class Broken(Script):
    async def step(self, turn: PolicyTurn) -> Observation | Done:
        if turn.number:
            raise KeyError("oops")
        return Observation([{"role": "user", "content": "?"}])


class Slow(Script):
    async def step(self, turn: PolicyTurn) -> Observation | Done:
        await asyncio.sleep(60)
        raise AssertionError


class Admits(Script):
    async def step(self, turn: PolicyTurn) -> Observation | Done:
        return Done(error="the server is gone")


class WrongRole(Script):
    async def step(self, turn: PolicyTurn) -> Observation | Done:
        return Observation([{"role": "user"}])


@pytest.mark.parametrize(
    ("world", "limits", "status", "detail"),
    [
        (Broken([]), {}, "environment_error", "KeyError: 'oops'"),
        (Slow([]), {"step_timeout": 0.05}, "timeout", "longer than 0.05 s for one answer"),
        (Slow([]), {"episode_timeout": 0.05}, "timeout", "the episode took longer than 0.05 s"),
        (Admits([]), {}, "environment_error", "the server is gone"),
        (WrongRole([]), {}, "environment_error", "a message without `content`"),
    ],
    ids=["raises", "slow step", "slow episode", "says so", "malformed"],
)
def test_a_failing_environment_is_a_status_and_never_a_reward(
    world: Any, limits: dict[str, Any], status: str, detail: str
) -> None:
    episode, policy = play("qwen2_5", world, **limits)
    assert episode.status == status
    assert not episode.status.trainable
    assert detail in episode.detail
    assert episode.failed == "environment"
    assert np.isnan(episode.reward)
    assert world.closed == 1
    check_token_in_token_out(episode, policy)


def test_each_turn_draws_from_a_stream_of_its_own() -> None:
    _, policy = play("qwen2_5", Script([[{"role": "user", "content": "?"}]] * 2))
    assert [request.stream for request in policy.requests] == [(3, 1, 0), (3, 1, 0, -1), (3, 1, 0, -2)]
