"""Environments of Gymnasium, those of the package and some of the tests' own."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "loops"))

pytest.importorskip("gymnasium")

from strop.config.adapted_environments import GymnasiumEnvironment
from strop.data.seeds import episodes
from strop.environments.acting import Actions, picture, plain
from strop.environments.build import build_environments
from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.errors import DataError, MissingExtra, UserError

DIRECTIONS = ["left", "down", "right", "up"]


def factory(**settings: Any) -> Any:
    settings = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}, "actions": DIRECTIONS, **settings}
    return build_environments(GymnasiumEnvironment(kind="gymnasium", **settings), None)


def error_of(**settings: Any) -> UserError:
    with pytest.raises(UserError) as error:
        factory(**settings)
    return error.value


async def played(made: Any, *texts: str, row: dict[str, Any] | None = None) -> list[Any]:
    """What is read first, and the answers to some turns."""
    environment = made.make()
    try:
        opening = await environment.reset({"prompt": "Go.", "seed": 1} if row is None else row)
        answers = [await environment.step(PolicyTurn(text, number=at)) for at, text in enumerate(texts)]
    finally:
        await environment.close()
        await environment.close()
    return [opening, *answers]


async def test_the_frozen_lake_is_read_and_walked() -> None:
    path = ["down", "I go down", "RIGHT", "right.", "down", "Then right"]
    opening, *answers = await played(factory(), *path)
    assert opening == [{"role": "user", "content": "Go.\n[S]FFF\nFHFH\nFFFH\nHFFG"}]
    assert answers[0].messages[0]["content"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [answer.reward for answer in answers] == [0, 0, 0, 0, 0, 1.0]
    assert answers[-1] == Done(reward=1.0)
    fallen = (await played(factory(), "down", "right"))[-1]
    assert fallen == Done(reward=0.0)


async def test_without_a_picture_there_is_the_observation() -> None:
    made = factory(
        render="observation", opening="State {observation} of {size}: ", observation="[{step}|{reward}] {observation}"
    )
    opening, answer = await played(made, "right", row={"seed": 1, "size": 16})
    assert opening[0]["content"] == "State 0 of 16: "
    assert answer.messages == [{"role": "user", "content": "[1|0] 1"}]


async def test_messages_of_the_row_stand_before_the_observation() -> None:
    said = [{"role": "system", "content": "Walk."}]
    opening, *_ = await played(factory(), row={"prompt": said, "seed": 1})
    assert opening[0] == said[0]
    assert opening[1]["content"].startswith("[S]FFF")


async def test_the_seed_of_the_row_decides_where_it_begins() -> None:
    made = factory(id="tiny_gym:Doors-v0", arguments={"rounds": 9}, actions=None, render="observation")
    turns = ["1"] * 6
    first, again, other = [await played(made, *turns, row={"prompt": "", "seed": seed}) for seed in (5, 5, 6)]
    assert first == again
    assert first != other
    # Without a seed it is the row that decides.
    one, same, another = [await played(made, *turns, row={"prompt": text}) for text in ("a", "a", "b")]
    assert one == same
    assert one != another
    with pytest.raises(ValueError, match="'seed' holds 'x', which is no seed"):
        await played(made, row={"prompt": "", "seed": "x"})


async def test_numbers_begin_where_the_space_does() -> None:
    made = factory(id="tiny_gym:Doors-v0", arguments={}, actions=None)
    opening, right = await played(made, "2", row={"prompt": "", "seed": 0})
    door = opening[0]["content"][2]
    assert opening[0]["content"] == f"1[{door}]2"
    assert right.reward == float(door == "2")
    nothing = (await played(made, "0"))[-1]
    assert nothing.messages[0]["content"] == "That is no action. The actions are 1, 2, 3."


async def test_a_turn_without_an_action_is_answered_or_ends_the_episode() -> None:
    answered = (await played(factory(malformed_penalty=0.5), "hm"))[-1]
    assert isinstance(answered, Observation)
    assert answered.reward == -0.5
    assert "left, down, right, up" in answered.messages[0]["content"]
    assert (await played(factory(malformed="end", malformed_penalty=0.5), "hm"))[-1] == Done(reward=-0.5)
    assert (await played(factory(malformed="end"), "hm"))[-1] == Done(reward=0.0)


async def test_a_limit_of_the_environment_s_truncates() -> None:
    made = factory(id="tiny_gym:BriefDoors-v0", arguments={}, actions=None)
    done = (await played(made, "1"))[-1]
    assert isinstance(done, Done)
    assert done.truncated
    assert not (await played(factory(id="tiny_gym:Doors-v0", arguments={"rounds": 1}, actions=None), "1"))[-1].truncated


async def test_actions_may_be_texts() -> None:
    made = factory(id="tiny_gym:Words-v0", arguments={}, actions=None)
    opening, refused, wrong, right = await played(made, "x", "a", "abc")
    assert opening[0]["content"] == "Go.\nabc"
    assert "is no action" in refused.messages[0]["content"]
    assert wrong.reward == 0.0
    assert right == Done(reward=1.0)
    assert "have no names" in error_of(id="tiny_gym:Words-v0", arguments={}).what


async def test_what_blocks_holds_up_nobody_else_and_closes_behind_itself() -> None:
    made = factory(id="tiny_gym:Doors-v0", arguments={"pause": 0.5}, actions=None)
    environment = made.make()
    await environment.reset({"prompt": "", "seed": 1})
    world = environment._world.unwrapped
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(environment.step(PolicyTurn("1")), 0.2)
    assert ticks > 3
    await environment.close()
    assert not world.closed
    ticking.cancel()
    for thread in threading.enumerate():
        if thread.name == "strop-gymnasium":
            thread.join(10)
    assert world.closed


def test_mistakes_are_told_before_anything_is_played() -> None:
    assert "Did you mean: `FrozenLake`" in error_of(id="FrozenLak-v1").what
    assert error_of(id="no_such_module:A-v0").where == "environment.id"
    assert error_of(arguments={"nope": 1}).where == "environment.arguments"
    assert "4 actions, and 2 names" in error_of(actions=["a", "b"]).what
    assert "renders no characters" in error_of(id="Blackjack-v1", arguments={}, actions=None, render="ansi").what
    assert "cannot be written" in error_of(id="Pendulum-v1", arguments={}, actions=None).what
    assert error_of(observation="{state}").where == "environment.observation"
    assert "does not show" in error_of(opening="Go.").what
    assert error_of(opening="{observation").where == "environment.opening"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(MissingExtra) as error:
        factory()
    assert "strop[gymnasium]" in error.value.mend


def test_which_action_a_turn_holds() -> None:
    moves = Actions(["up", "up left", "left"])
    assert [moves.find(text) for text in ("up", "go UP LEFT!", "upper", "left or up", "up-left")] == [0, 1, None, 0, 0]
    assert [Actions(["up", "left"], take="first").find(text) for text in ("left, up", "no")] == [1, None]
    assert [Actions(["up", "left"], take="only").find(text) for text in ("left, up", "up, up")] == [None, 0]
    assert [Actions(["up", "left"], take="whole").find(text) for text in (" Up\n", "go up")] == [0, None]
    numbers = Actions([str(number) for number in range(12)])
    assert [numbers.find(text) for text in ("11", "1.5", "-1", "4.", "a3")] == [11, None, None, 4, None]


def test_observations_as_texts() -> None:
    import numpy as np

    assert plain(np.array([0.123456, 2.0], dtype=np.float32)) == "[0.1235, 2]"
    assert plain((np.int64(3), True, None, {"a": [1]})) == "[3, true, null, {a: [1]}]"
    assert picture("\n\x1b[41mS\x1b[0mF\x1b[1mx\n") == "[S]Fx"


def test_rows_of_seeds() -> None:
    train = [row["seed"] for row in episodes(100, prompt="Go.")]
    held_out = [row["seed"] for row in episodes(100, prompt="Go.", split="eval")]
    assert len({*train, *held_out}) == 200
    assert [row["seed"] for row in episodes(50, prompt="Go.")] == train[:50]
    assert episodes(1, prompt="Go.")[0]["prompt"] == "Go."
    for wrong in ({"split": "test"}, {"count": 0}):
        with pytest.raises(DataError):
            episodes(**{"count": 1, "prompt": "Go.", **wrong})  # type: ignore[arg-type]
