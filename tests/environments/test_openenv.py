"""Environments of OpenEnv: a server that speaks as the real ones do, and a real one where there is one.

`STROP_OPENENV_PYTHON` names an interpreter that has `openenv-core`, which does not go together with other packages of
the tests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("aiohttp")
sys.path.append(str(Path(__file__).parents[1] / "loops"))
from tiny_openenv import STATE, tiny_openenv

from strop.config.adapted_environments import OpenEnvEnvironment
from strop.environments.openenv import OpenEnvFactory
from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.errors import UserError

INTERPRETER = os.environ.get("STROP_OPENENV_PYTHON")


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with tiny_openenv() as url:
        yield url


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    if INTERPRETER is None:
        pytest.skip("STROP_OPENENV_PYTHON names no interpreter that has openenv-core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([INTERPRETER, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.5)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["fake", "real"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def factory(url: str, **settings: Any) -> OpenEnvFactory:
    given = {"action": {"number": "{action}"}, "show": "hint", **settings}
    return OpenEnvFactory(OpenEnvEnvironment(kind="openenv", url=url, **given))


async def played(made: OpenEnvFactory, *texts: str, row: dict[str, Any] | None = None) -> list[Any]:
    environment: Any = made.make()
    await environment.ready()
    try:
        opening = await environment.reset(row or {"prompt": "Guess.", "seed": 7})
        return [opening, *[await environment.step(PolicyTurn(text, number=n)) for n, text in enumerate(texts)]]
    finally:
        await environment.close()
        await environment.close()


async def test_an_episode_with_the_seed_of_the_row(url: str) -> None:
    made = factory(url, arguments={"high": 5})
    for seed in (7, 8, 9):
        wanted = Random(seed).randint(0, 5)
        opening, below, right = await played(made, "-1", str(wanted), row={"prompt": "Guess.", "seed": seed})
        assert opening == [{"role": "user", "content": "Guess.\n0 to 5"}]
        assert below == Observation([{"role": "user", "content": "higher"}], -0.1)
        assert right == Done(reward=1.0)


async def test_what_the_server_refuses_as_an_action_is_answered(url: str) -> None:
    answer = (await played(factory(url, malformed_penalty=0.5), "hm"))[-1]
    assert isinstance(answer, Observation)
    assert answer.reward == -0.5
    assert "number: Input should be a valid integer" in answer.messages[0]["content"]
    assert (await played(factory(url, malformed="end"), "hm"))[-1] == Done(reward=0.0)


async def test_names_of_actions_become_numbers(url: str) -> None:
    made = factory(url, actions=["zero", "one"], show=None, observation="{observation} {reward} {step}")
    answers = await played(made, "none", "I say one", row={"prompt": "", "seed": 3})
    assert answers[0][0]["content"] == "{hint: 0 to 9}"
    assert "The actions are zero, one." in answers[1].messages[0]["content"]
    wanted = Random(3).randint(0, 9)
    hint = "higher" if wanted > 1 else "lower"
    assert answers[2] == Observation([{"role": "user", "content": f"{{hint: {hint}}} -0.1 1"}], -0.1)


async def test_a_failure_of_the_environment_is_one(url: str) -> None:
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: broken"):
        await played(factory(url), "99")


async def test_no_more_episodes_at_a_time_than_the_server_takes(fake: str) -> None:
    STATE["peak"] = 0
    for sessions in (1, 3):
        made = factory(fake, sessions=sessions)
        await asyncio.gather(*(played(made, "0", "1") for _ in range(6)))
        assert STATE["peak"] == sessions


def test_mistakes_are_told_before_anything_is_played(fake: str) -> None:
    def error_of(**settings: Any) -> UserError:
        with pytest.raises(UserError) as error:
            factory(settings.pop("url", fake), **settings)
        return error.value

    assert error_of(action={"message": "{action}"}).where == "environment.action.message"
    assert error_of(show="text").mend == "they have hint"
    assert error_of(url="http://127.0.0.1:9").where == "environment.url"
    assert error_of(url="localhost:1").where == "environment.url"
    for wrong in ({"action": {"number": 1}}, {"take": "first"}):
        with pytest.raises(ValueError, match=r"\{action\}|take"):
            factory(fake, **wrong)
