from __future__ import annotations

import pytest

from strop.data import Prompt
from strop.environments import Done, Environment, SingleTurn


def prompt() -> Prompt:
    return Prompt(prompt_id="row-000000", row={}, prompt="1+1=", answer="2", tokens=[5, 6, 7], text="1+1=")


async def test_one_turn_ends_the_episode() -> None:
    one = prompt()
    environment: Environment = SingleTurn(one)
    tokens = await environment.reset()
    assert tokens == [5, 6, 7]
    tokens.append(8)
    assert one.tokens == [5, 6, 7]
    assert await environment.step("2") == Done(error=None)
    await environment.close()
    await environment.close()


async def test_an_environment_serves_one_episode() -> None:
    environment = SingleTurn(prompt())
    with pytest.raises(RuntimeError, match="reset the environment first"):
        await environment.step("2")
    await environment.reset()
    with pytest.raises(RuntimeError, match="make a new one"):
        await environment.reset()
    await environment.step("2")
    with pytest.raises(RuntimeError, match="has ended"):
        await environment.step("3")
    closed = SingleTurn(prompt())
    await closed.close()
    with pytest.raises(RuntimeError, match="make a new one"):
        await closed.reset()
