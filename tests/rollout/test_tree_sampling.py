"""Tree sampling: what branches share is sampled and trained once, and each part is compared with its siblings."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_player import CONTEXT, Asked, Factory, RandomPolicy, Script
from tokenizers_for_chat import SPECIAL, tokenizer_of

from strop.algorithms.advantages import group_relative
from strop.algorithms.named import GRPO
from strop.config.data import DataSettings, DataSource
from strop.config.environment import PythonEnvironment
from strop.config.rollout import TreeSettings
from strop.data.rendering import Renderer
from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.loops.algorithm import demands_of
from strop.loops.step_batch import Chosen, has_spread, lay_out
from strop.rollout.engine import SampleResult, SampleSettings
from strop.rollout.episode import Episode, Group, Status
from strop.rollout.player import Player, World
from strop.rollout.segments import Segment, Trained


class Forking(Script):
    """Counts its turns, so that a state that two branches share would show."""

    async def fork(self) -> Forking:
        return replace(self, seen=list(self.seen))

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        found = await super().step(turn)
        assert len(self.seen) == turn.number + 1, "another branch has changed this one's state"
        return found


def play(
    world: Any, tree: TreeSettings, *, name: str = "qwen2_5", delay: float = 0.0, **limits: Any
) -> tuple[list[Episode], RandomPolicy]:
    tokenizer = tokenizer_of(name)
    policy = RandomPolicy(len(tokenizer), tokenizer.eos_token_id, delay=delay)
    found = World(
        Factory(world),
        PythonEnvironment.model_validate({"kind": "python", "factory": "a:B", **limits}),
        Renderer(DataSettings(train=DataSource(path="unused"), render="chat"), tokenizer),
        frozenset([tokenizer.eos_token_id]),
        CONTEXT,
    )
    player = Player(policy, tokenizer, found)  # type: ignore[arg-type]
    begun = Episode(0, 2 * tree.leaves)
    return asyncio.run(player.play(begun, Asked("1 + 2?"), SampleSettings(400), (3, 1, 0), tree=tree)), policy


def segments(episodes: list[Episode]) -> list[Segment]:
    """What is trained of some episodes, part by part."""
    found = Trained(episodes)
    columns = (found.episodes, found.streams, found.rewards, found.cohorts, found.units, found.ends)
    return [Segment(*one) for one in zip(*columns, strict=True)]


def lines(count: int) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": f"more {n}"}] for n in range(count)]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(SPECIAL)),
    at=st.lists(st.integers(1, 4), min_size=1, max_size=2, unique=True).map(sorted),
    branches=st.integers(2, 3),
    turns=st.integers(1, 5),
    keep=st.booleans(),
)
def test_whatever_branches_each_sampled_turn_is_trained_once(
    name: str, at: list[int], branches: int, turns: int, keep: bool
) -> None:
    episodes, policy = play(Forking(lines(turns)), TreeSettings(at=at, branches=branches), name=name, keep_history=keep)
    sampled = {id(turn): turn for episode in episodes for turn in episode.turns if turn.sampled}
    assert len(sampled) == len(policy.requests)
    assert len({request.stream for request in policy.requests}) == len(policy.requests), "no draw is used twice"
    assert len(episodes) == branches ** sum(turn <= turns for turn in at)
    assert len({episode.sample for episode in episodes}) == len(episodes)
    for number, episode in enumerate(episodes):
        episode.reward = float(number)
    parts = segments(episodes)
    assert sum(int(part.stream.loss_mask.sum()) for part in parts) == sum(len(t.tokens) for t in sampled.values())
    inputs = Counter(tuple(request.tokens) for request in policy.requests)
    for part in parts:
        mask, tokens = part.stream.loss_mask, part.stream.tokens
        assert mask[-1], "nothing follows the last trained token"
        assert np.isfinite(part.stream.logprobs[mask]).all()
        assert np.isnan(part.stream.logprobs[~mask]).all()
        assert (part.stream.versions[~mask] == -1).all()
        # What stands before the first trained token is what the policy had read when it sampled it.
        begin = int(np.argmax(mask))
        assert inputs[tuple(tokens[:begin].tolist())]


def test_a_branch_is_worth_its_leaves_and_is_compared_with_its_siblings() -> None:
    tree = TreeSettings(at=[1, 2], branches=2)
    episodes, _ = play(Forking(lines(2)), tree)
    assert [episode.branch for episode in episodes] == [(8, 0, 0), (8, 0, 1), (8, 1, 0), (8, 1, 1)]
    assert [episode.sample for episode in episodes] == [8, 9, 10, 11]
    other, _ = play(Forking(lines(2)), tree)
    for episode in other:
        episode.branch = (0, *episode.branch[1:])
        episode.sample -= 8
    for episode, reward in zip([*other, *episodes], [1, 0, 0, 0, 1, 1, 1, 0], strict=True):
        episode.reward = float(reward)
    batch, streams = lay_out(Chosen([*other, *episodes]), demands_of(GRPO(max_new_tokens=8)), {})
    # Parts of each tree: trunk, first half, its two leaves' turns, second half, ...
    expected = {
        (0,): 0.25, (0, 0): 0.5, (0, 0, 0): 1.0, (0, 0, 1): 0.0, (0, 1): 0.0, (0, 1, 0): 0.0, (0, 1, 1): 0.0,
        (8,): 0.75, (8, 0): 1.0, (8, 0, 0): 1.0, (8, 0, 1): 1.0, (8, 1): 0.5, (8, 1, 0): 1.0, (8, 1, 1): 0.0,
    }  # fmt: skip
    parts = segments([*other, *episodes])
    found = {part.unit[1]: part.reward for part in parts}  # type: ignore[index]
    assert found == expected
    assert len(parts) == batch.sequences == len(streams) == len(expected)
    advantages = group_relative(batch.rewards, batch.group_ids)
    by_unit = {part.unit[1]: float(a) for part, a in zip(parts, advantages, strict=True)}  # type: ignore[index]
    assert by_unit == {
        (0,): -0.25, (8,): 0.25,
        (0, 0): 0.25, (0, 1): -0.25, (0, 0, 0): 0.5, (0, 0, 1): -0.5, (0, 1, 0): 0.0, (0, 1, 1): 0.0,
        (8, 0): 0.25, (8, 1): -0.25, (8, 0, 0): 0.0, (8, 0, 1): 0.0, (8, 1, 0): 0.5, (8, 1, 1): -0.5,
    }  # fmt: skip
    # All of it is one prompt's, which no mini-batch divides.
    assert set(batch.prompt_ids.tolist()) == {0}  # type: ignore[union-attr]


def test_a_leaf_without_a_reward_takes_nothing_else_with_it() -> None:
    """Turns that it shares with others are trained with these, and its reward counts nowhere."""
    episodes, _ = play(Forking(lines(1)), TreeSettings(at=[1]))
    for episode, reward in zip(episodes, (0.0, 1.0), strict=True):
        episode.reward = reward
    trunk = len(episodes[0].turns[1].tokens)
    whole = segments(episodes)
    left = segments(episodes[1:])
    assert [part.reward for part in whole] == [0.5, 0.0, 1.0]
    assert [part.reward for part in left] == [1.0, 1.0]
    assert int(left[0].stream.loss_mask.sum()) == trunk


def test_what_is_played_does_not_depend_on_what_is_done_first() -> None:
    tree = TreeSettings(at=[1, 3], branches=3)
    played = [play(Forking(lines(4)), tree, delay=delay)[0] for delay in (0.0, 0.001)]
    texts = [[[turn.tokens.tolist() for turn in e.turns] for e in episodes] for episodes in played]
    assert texts[0] == texts[1]
    assert len({str(text) for text in texts[0]}) == 9


def test_a_path_that_ends_before_the_branching_stays_one_episode() -> None:
    episodes, _ = play(Forking(lines(1)), TreeSettings(at=[2]))
    assert [(episode.branch, episode.status) for episode in episodes] == [((4,), Status.STOP)] or len(episodes) == 1
    episodes[0].reward = 1.0
    [part] = segments(episodes)
    assert part.ends


def test_of_a_branch_without_a_sampled_turn_nothing_is_trained() -> None:
    episode = Episode(0, 0, branch=(0,))
    episode.append_prompt([1, 2, 3])
    assert segments([episode]) == []


def test_an_environment_that_cannot_fork_after_all_fails_its_episode() -> None:
    class Stuck(Forking):
        async def fork(self) -> Forking:
            raise RuntimeError("no copies")

    [episode], _ = play(Stuck(lines(1)), TreeSettings(at=[1]))
    assert (episode.status, episode.failed) == (Status.ENVIRONMENT_ERROR, "environment")
    assert "no copies" in episode.detail


def test_environments_of_all_branches_are_closed() -> None:
    made: list[Any] = []

    class Watched(Forking):
        async def fork(self) -> Forking:
            made.append(await super().fork())
            return made[-1]  # type: ignore[no-any-return]

    world = Watched(lines(2))
    play(world, TreeSettings(at=[1, 2], branches=2))
    assert [one.closed for one in [world, *made]] == [1] * 4


def test_what_the_engine_raises_ends_all_branches() -> None:
    @dataclass
    class Breaks(RandomPolicy):
        async def generate(self, request: Any) -> SampleResult:
            if len(self.requests) == 3:
                raise ConnectionError("the engine is gone")
            return await super().generate(request)

    tokenizer = tokenizer_of("qwen2_5")
    found = World(
        Factory(Forking(lines(4))),
        PythonEnvironment.model_validate({"kind": "python", "factory": "a:B"}),
        Renderer(DataSettings(train=DataSource(path="unused"), render="chat"), tokenizer),
        frozenset([tokenizer.eos_token_id]),
        CONTEXT,
    )
    player = Player(Breaks(len(tokenizer), tokenizer.eos_token_id), tokenizer, found)  # type: ignore[arg-type]

    async def work() -> int:
        with pytest.raises(ConnectionError):
            await player.play(Episode(0, 0), Asked("?"), SampleSettings(400), (0, 0, 0), tree=TreeSettings(at=[1]))
        return len(asyncio.all_tasks())

    assert asyncio.run(work()) == 1


def test_a_group_has_spread_where_some_role_has() -> None:
    def episode(role: str, reward: float) -> Episode:
        return Episode(0, 0, status=Status.STOP, reward=reward, role=role)

    lost = Group(0, "", [episode("a", 1.0), episode("b", -1.0), episode("a", 1.0), episode("b", -1.0)])
    assert not has_spread(lost)
    lost.episodes[-1].reward = 0.0
    assert has_spread(lost)
