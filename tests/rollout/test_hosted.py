"""Environments that drive themselves: what is trained is what was sampled for them, whatever they say."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("environments", "rollout", "loops"))
from test_player import Asked, RandomPolicy
from tokenizers_for_chat import tokenizer_of

from strop.config.adapted_environments import SlimeEnvironment
from strop.environments.driven import Driven
from strop.environments.driven import Path as Sequence
from strop.environments.slime import SlimeFactory
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode
from strop.rollout.player import Player, World

NAME = "qwen2_5"


@dataclass
class Made:
    """A factory of one driver."""

    driver: Any
    tools: tuple[Any, ...] = ()
    instructions: str = ""
    stop: tuple[str, ...] = ()
    forks: bool = False
    roles: tuple[str, ...] = ()

    def make(self) -> Any:
        return self.driver


@dataclass
class Scripted:
    """Asks for turns and says what it is told to say of them."""

    script: Any
    closed: int = 0
    sampled: list[Any] = field(default_factory=list)

    async def drive(self, policy: Any) -> Driven:
        return await self.script(self, policy)  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.closed += 1


def engine() -> RandomPolicy:
    tokenizer = tokenizer_of(NAME)
    return RandomPolicy(len(tokenizer), tokenizer.eos_token_id)


async def play(factory: Any, *, budget: int = 200, policy: Any = None, **limits: Any) -> tuple[Episode, Any]:
    tokenizer = tokenizer_of(NAME)
    policy = policy or engine()
    text = "What is 1 + 2?"
    asked = Asked(text, tuple(tokenizer(text)["input_ids"]), {"prompt": text, "level": 3})
    settings = SlimeEnvironment(kind="slime", generate="a:b", **limits)
    world = World(factory, settings, None, frozenset([tokenizer.eos_token_id]), 4096)
    episode = Episode(0, 0, dict(asked.row), asked.prompt_id)
    await Player(policy, tokenizer, world).play(episode, asked, SampleSettings(budget), (0, 0, 0))
    return episode, policy


async def twice(driver: Scripted, policy: Any) -> Driven:
    first = await policy.sample(policy.tokens)
    between = [*policy.tokens, *first.tokens, 11, 12]
    second = await policy.sample(between)
    driver.sampled = [first, second]
    marks = [True] * len(first.tokens) + [False] * 2 + [True] * len(second.tokens)
    return Driven([Sequence([*between, *second.tokens], len(policy.tokens), marks)], reward=0.5)


async def test_what_was_sampled_is_trained_with_its_own_numbers() -> None:
    driver = Scripted(twice)
    episode, policy = await play(Made(driver))
    first, second = driver.sampled
    [stream] = episode.streams()
    prompt = len(policy.requests[0].tokens)
    expected = [False] * prompt + [True] * len(first.tokens) + [False] * 2 + [True] * len(second.tokens)
    assert stream.loss_mask.tolist() == expected
    assert stream.tokens.tolist() == [*policy.requests[1].tokens, *second.tokens]
    assert np.isnan(stream.logprobs[~stream.loss_mask]).all()
    assert (stream.logprobs[stream.loss_mask] == -1).all()
    assert list(episode.turn_rewards.values()) == [0.5]
    assert [request.stream for request in policy.requests] == [(0, 0, 0), (0, 0, 0, -1)]
    assert (str(episode.status), driver.closed) == ("stop", 1)


async def test_a_cut_turn_keeps_its_beginning_and_unmarked_tokens_are_read_only() -> None:
    async def script(driver: Scripted, policy: Any) -> Driven:
        found = await policy.sample(policy.tokens)
        while len(found.tokens) < 4:
            found = await policy.sample(policy.tokens)
        kept = found.tokens[:3]
        return Driven([Sequence([*policy.tokens, *kept, 5], len(policy.tokens), [True, False, True, False])])

    episode, policy = await play(Made(Scripted(script)), max_turns=50, budget=2000)
    [stream] = episode.streams()
    assert stream.loss_mask.tolist()[len(policy.requests[0].tokens) :] == [True, False, True, False]
    assert episode.streams()[0].loss_mask.sum() == episode.sampled_tokens() == 2


@pytest.mark.parametrize("change", ["token", "before", "twice"])
async def test_what_was_not_sampled_is_not_trained(change: str) -> None:
    async def script(driver: Scripted, policy: Any) -> Driven:
        found = await policy.sample(policy.tokens)
        tokens = [*policy.tokens, *found.tokens]
        if change == "token":
            tokens[-1] += 1
        elif change == "before":
            tokens[0] += 1
        else:
            tokens += found.tokens
        return Driven([Sequence(tokens, len(policy.tokens), [True] * (len(tokens) - len(policy.tokens)))])

    episode, _ = await play(Made(Scripted(script)))
    assert (str(episode.status), episode.failed) == ("environment_error", "environment")
    assert "did not sample it" in episode.detail
    assert episode.turns == []


async def test_paths_share_a_turn_that_is_trained_once() -> None:
    async def script(driver: Scripted, policy: Any) -> Driven:
        first = await policy.sample(policy.tokens)
        paths = []
        for said in (7, 8):
            before = [*policy.tokens, *first.tokens, said]
            second = await policy.sample(before)
            marks = [True] * len(first.tokens) + [False] + [True] * len(second.tokens)
            paths.append(Sequence([*before, *second.tokens], len(policy.tokens), marks))
        return Driven(paths)

    episode, policy = await play(Made(Scripted(script)))
    streams = episode.streams()
    assert len(streams) == 2
    assert sum(stream.loss_mask.sum() for stream in streams) == episode.sampled_tokens()
    assert [
        stream.tokens.tolist()[: len(request.tokens)]
        for stream, request in zip(streams, policy.requests[1:], strict=True)
    ] == [list(request.tokens) for request in policy.requests[1:]]


async def test_limits_bound_what_is_sampled() -> None:
    async def script(driver: Scripted, policy: Any) -> Driven:
        tokens, marks = list(policy.tokens), []
        while (found := await policy.sample(tokens)).tokens:
            tokens += [*found.tokens, 9]
            marks += [True] * len(found.tokens) + [False]
        assert found.finish == "length"
        return Driven([Sequence(tokens, len(policy.tokens), marks)], finish="length")

    for limits, turns in (
        ({"max_turns": 3}, 3),
        ({"max_turn_tokens": 2, "max_turns": 4}, 4),
        ({"max_tokens": 15}, None),
    ):
        episode, policy = await play(Made(Scripted(script)), **limits)
        assert str(episode.status) == "length"
        assert turns is None or len(policy.requests) == turns
        if "max_turn_tokens" in limits:
            assert all(request.settings.max_new_tokens == 2 for request in policy.requests)
        if "max_tokens" in limits:
            prompt = len(policy.requests[0].tokens)
            assert all(len(r.tokens) - prompt + r.settings.max_new_tokens <= 15 for r in policy.requests)
    episode, _ = await play(Made(Scripted(script)), budget=7, max_turns=100)
    assert episode.sampled_tokens() == 7


async def test_time_between_requests_is_bounded_and_time_of_sampling_is_not() -> None:
    async def slow(driver: Scripted, policy: Any) -> Driven:
        await policy.sample(policy.tokens)
        await asyncio.sleep(60)
        raise AssertionError

    episode, _ = await play(Made(Scripted(slow)), step_timeout=0.2)
    assert str(episode.status) == "timeout"
    unhurried = engine()
    unhurried.delay = 0.5
    driver = Scripted(twice)
    episode, _ = await play(Made(driver), policy=unhurried, step_timeout=0.3)
    assert str(episode.status) == "stop"
    episode, _ = await play(Made(Scripted(slow)), episode_timeout=0.2)
    assert str(episode.status) == "timeout"


async def test_requests_of_one_episode_follow_each_other() -> None:
    async def script(driver: Scripted, policy: Any) -> Driven:
        found = await asyncio.gather(*(policy.sample([*policy.tokens, n]) for n in range(4)))
        return Driven(
            [
                Sequence([*policy.tokens, n, *one.tokens], len(policy.tokens) + 1, [True] * len(one.tokens))
                for n, one in enumerate(found)
            ]
        )

    policy = engine()
    policy.delay = 0.01
    episode, _ = await play(Made(Scripted(script)), policy=policy)
    assert len(episode.streams()) == 4
    assert [request.stream[3:] for request in policy.requests] == [(), (-1,), (-2,), (-3,)]


# Functions of slime's form.


def slime(name: str, **arguments: Any) -> SlimeFactory:
    settings = SlimeEnvironment(kind="slime", generate=f"tiny_slime:{name}", arguments={"says": "1", **arguments})
    return SlimeFactory(settings)


async def finished(name: str, **arguments: Any) -> tuple[Episode, Any]:
    factory = slime(name, **arguments)
    try:
        return await play(factory)
    finally:
        await factory.close()


async def test_a_function_with_a_turn_of_its_own_between() -> None:
    episode, policy = await finished("two_turns")
    assert str(episode.status) in ("stop", "length"), episode.detail
    [stream] = episode.streams()
    said = tokenizer_of(NAME)("1")["input_ids"]
    begin = len(policy.requests[1].tokens) - len(said)
    assert stream.tokens.tolist()[begin : begin + len(said)] == said
    assert not stream.loss_mask[begin : begin + len(said)].any()
    assert stream.loss_mask[begin + len(said) :].all()
    assert episode.completion.count("1") / 4 == next(iter(episode.turn_rewards.values()))


async def test_a_function_that_posts_texts_over_a_connection_and_blocks() -> None:
    """Random tokens are not what their text is tokenised to: the second request goes on behind the tokens."""
    episode, policy = await finished("by_text")
    assert str(episode.status) == "stop", episode.detail
    [stream] = episode.streams()
    assert stream.loss_mask.tolist() == [False] * len(policy.requests[0].tokens) + [True] * episode.sampled_tokens()
    assert len(policy.requests) == 2


async def test_several_samples_of_one_call() -> None:
    episode, _ = await finished("branches")
    assert str(episode.status) == "stop", episode.detail
    assert len(episode.streams()) == 2
    assert sum(stream.loss_mask.sum() for stream in episode.streams()) == episode.sampled_tokens()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("retokenised", "did not sample it"),
        ("too_hot", "top_p=0.5 is refused"),
        ("raises", "KeyError: 'search'"),
        ("fails", "the status failed"),
    ],
)
async def test_what_goes_wrong_in_a_function_is_an_error_of_the_environment(name: str, says: str) -> None:
    episode, _ = await finished(name)
    assert (str(episode.status), episode.reward) == ("environment_error", pytest.approx(float("nan"), nan_ok=True))
    assert says in episode.detail
