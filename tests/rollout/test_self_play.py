"""Self-play: each role reads what it may, is trained on its own turns, and is compared with itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from test_player import CONTEXT, Asked, Factory, RandomPolicy
from tokenizers_for_chat import tokenizer_of

from strop.algorithms.named import GRPO
from strop.config.data import DataSettings, DataSource
from strop.config.environment import SelfPlayEnvironment
from strop.data.rendering import Renderer
from strop.environments.build import PythonFactory
from strop.environments.protocol import Done, PolicyTurn
from strop.environments.self_play import Move
from strop.errors import UserError
from strop.loops.algorithm import demands_of
from strop.loops.step_batch import Chosen, lay_out
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode, Status
from strop.rollout.player import Player, World


@dataclass
class Debate:
    """The roles take turns; each reads what the other said."""

    roles: tuple[str, ...] = ("pro", "con")
    length: int = 4
    given: dict[str, float] = field(default_factory=lambda: {"pro": 1.0, "con": -1.0})
    said: list[str] = field(default_factory=list)
    closed: int = 0

    async def reset(self, row: Mapping[str, Any]) -> Move:
        return Move("pro", [{"role": "system", "content": "You are for it."}, {"role": "user", "content": "Begin."}])

    async def step(self, role: str, turn: PolicyTurn) -> Move | Done:
        self.said.append(turn.text)
        if len(self.said) == self.length:
            return Done(reward=0.25)
        other = self.roles[len(self.said) % 2]
        rules = [{"role": "system", "content": "You are against it."}] if len(self.said) == 1 else []
        return Move(other, [*rules, {"role": "user", "content": turn.text or "..."}])

    async def rewards(self) -> Mapping[str, float]:
        return self.given

    async def close(self) -> None:
        self.closed += 1


def play(match: Any, *, budget: int = 300, name: str = "qwen2_5", **limits: Any) -> tuple[list[Episode], RandomPolicy]:
    tokenizer = tokenizer_of(name)
    policy = RandomPolicy(len(tokenizer), tokenizer.eos_token_id)
    world = World(
        Factory(match, roles=("pro", "con")),
        SelfPlayEnvironment.model_validate({"kind": "self_play", "factory": "a:B", **limits}),
        Renderer(DataSettings(train=DataSource(path="unused"), render="chat"), tokenizer),
        frozenset([tokenizer.eos_token_id]),
        CONTEXT,
    )
    player = Player(policy, tokenizer, world)  # type: ignore[arg-type]
    assert player.most() == 2
    episodes = asyncio.run(
        player.play(
            Episode(5, 6), Asked([{"role": "user", "content": "?"}], row={"a": 1}), SampleSettings(budget), (5, 6, 0)
        )
    )
    return episodes, policy


def test_each_role_is_an_episode_of_its_own_turns() -> None:
    match = Debate()
    episodes, policy = play(match)
    assert [(e.role, e.sample, e.group) for e in episodes] == [("pro", 6, 5), ("con", 7, 5)]
    assert [e.row for e in episodes] == [{"a": 1, "role": "pro"}, {"a": 1, "role": "con"}]
    assert match.closed == 1
    tokenizer = tokenizer_of("qwen2_5")
    for episode, own in zip(episodes, (policy.requests[::2], policy.requests[1::2]), strict=True):
        [stream] = episode.streams()
        sampled = [turn for turn in episode.turns if turn.sampled]
        assert len(sampled) == len(own) == 2
        for turn, request in zip(sampled, own, strict=True):
            at = len(request.tokens)
            assert stream.tokens[:at].tolist() == list(request.tokens)
            assert stream.tokens[at : at + len(turn.tokens)].tolist() == turn.tokens.tolist()
            assert stream.loss_mask[at : at + len(turn.tokens)].all()
        assert int(stream.loss_mask.sum()) == episode.sampled_tokens()
    # The rules of one are not read by the other, and what the other says is read and not trained.
    pro, con = (tokenizer.decode(episode.streams()[0].tokens) for episode in episodes)
    assert "You are for it." in pro
    assert "against" not in pro
    assert "You are against it." in con
    assert "for it" not in con
    assert [m["role"] for m in episodes[1].messages] == ["system", "user", "assistant", "user", "assistant"]
    assert len({request.stream for request in policy.requests}) == 4


def test_rewards_are_those_of_the_role() -> None:
    episodes, _ = play(Debate())
    last = [max(n for n, turn in enumerate(e.turns) if turn.sampled) for e in episodes]
    assert episodes[0].turn_rewards == {last[0]: 1.0}
    assert episodes[1].turn_rewards == {last[1]: -1.0 + 0.25}
    assert [e.status is not None and e.status.trainable for e in episodes] == [True, True]


def test_a_limit_ends_the_match_with_the_rewards_it_has_by_then() -> None:
    episodes, policy = play(Debate(length=99), max_turns=3)
    assert len(policy.requests) == 3
    assert [e.status for e in episodes] == [Status.LENGTH, Status.LENGTH]
    assert all(e.turn_rewards for e in episodes)
    episodes, policy = play(Debate(length=99), budget=20, max_turns=99)
    assert max(e.sampled_tokens() for e in episodes) == 20
    assert Status.LENGTH in [e.status for e in episodes]


def test_a_role_that_had_no_turn_has_no_episode() -> None:
    [episode], _ = play(Debate(length=1))
    assert episode.role == "pro"


class Lost(Debate):
    async def step(self, role: str, turn: PolicyTurn) -> Move | Done:
        return Move("nobody", [])


class Raises(Debate):
    async def rewards(self) -> Mapping[str, float]:
        raise ZeroDivisionError("no winner")


class Late(Debate):
    async def reset(self, row: Mapping[str, Any]) -> Move:
        await asyncio.sleep(60)
        raise AssertionError


class Admits(Debate):
    async def step(self, role: str, turn: PolicyTurn) -> Move | Done:
        return Done(error="the board fell over")


@pytest.mark.parametrize(
    ("match", "status", "detail"),
    [
        (Lost(), "environment_error", "there is no role 'nobody'"),
        (Raises(), "environment_error", "no winner"),
        (Late(), "timeout", "longer than 0.05 s"),
        (Admits(), "environment_error", "the board fell over"),
        (Debate(given={"pro": 1.0, "audience": 2.0}), "environment_error", "'audience', which is no role"),
    ],
)
def test_a_match_that_fails_is_a_status_of_all_its_episodes(match: Any, status: str, detail: str) -> None:
    episodes, _ = play(match, step_timeout=0.05)
    assert episodes
    for episode in episodes:
        assert episode.status == status
        assert detail in episode.detail
        assert np.isnan(episode.reward)
    assert match.closed == 1


def test_roles_are_compared_with_themselves() -> None:
    episodes = []
    for match, (pro, con) in enumerate([(1.0, -1.0), (0.0, 0.0), (-1.0, 3.0)]):
        played, _ = play(Debate())
        for episode, reward in zip(played, (pro, con), strict=True):
            episode.sample += 2 * match
            episode.reward = reward
        episodes += played
    algorithm = GRPO(max_new_tokens=8, scale="none")
    batch, _ = lay_out(Chosen(episodes), demands_of(algorithm), {})
    advantages = algorithm.advantages(batch)
    found = [float(advantages[batch.loss_mask & (batch.seq_ids == n)][0]) for n in range(6)]
    pros, cons = np.array([1.0, 0.0, -1.0]), np.array([-1.0, 0.0, 3.0])
    np.testing.assert_allclose(found[::2], pros - pros.mean(), atol=1e-6)
    np.testing.assert_allclose(found[1::2], cons - cons.mean(), atol=1e-6)


class NoRoles(Debate):
    roles = ()


class SameRoles(Debate):
    roles = ("a", "a")


class NoRewards:
    roles = ("a", "b")

    async def reset(self, row: Any) -> None: ...

    async def step(self, role: str, turn: Any) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "says"),
    [("NoRoles", "has no `roles`"), ("SameRoles", "two different names"), ("NoRewards", "no `async def rewards`")],
)
def test_a_class_that_is_no_match_is_refused(name: str, says: str) -> None:
    settings = SelfPlayEnvironment(kind="self_play", factory=f"{__name__}:{name}")
    with pytest.raises(UserError, match=says):
        PythonFactory(settings)


def test_a_class_of_matches_tells_its_roles() -> None:
    made = PythonFactory(SelfPlayEnvironment(kind="self_play", factory=f"{__name__}:Debate", arguments={"length": 2}))
    assert made.roles == ("pro", "con")
