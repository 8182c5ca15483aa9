"""A server of the real package, run by an interpreter that has it: `python openenv_server.py PORT`."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import uvicorn  # type: ignore[import-not-found]
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app  # type: ignore


class Guess(Action):  # type: ignore[misc]
    number: int


class Hint(Observation):  # type: ignore[misc]
    hint: str = ""


class Guessing(Environment):  # type: ignore[misc]
    """A number from 0 to 9 is to be guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 9, **_: Any) -> Hint:
        self._wanted = Random(seed).randint(0, high)
        self._state = State(episode_id=episode_id)
        return Hint(hint=f"0 to {high}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.number == 99:
            raise RuntimeError("broken")
        if action.number == self._wanted:
            return Hint(hint="yes", done=True, reward=1.0)
        return Hint(hint="higher" if action.number < self._wanted else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
