"""Environments of Gymnasium for the tests: `tiny_gym:Doors-v0` and others; importing this registers them."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
from gymnasium import spaces


class Doors(gymnasium.Env[int, int]):
    """Two rounds; in each the number of a door is shown, and going through that door is worth 1."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012
    observation_space = spaces.Discrete(3, start=1)
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, rounds: int = 2, pause: float = 0.0, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.rounds, self.pause, self.closed = rounds, pause, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.round = 0
        return self._next(), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        time.sleep(self.pause)
        assert self.action_space.contains(action)
        reward = float(action == self.door)
        self.round += 1
        return self._next(), reward, self.round == self.rounds, False, {}

    def render(self) -> str:  # type: ignore[override]
        return f"\n1\x1b[41m{self.door}\x1b[0m2\n"

    def close(self) -> None:
        self.closed = True

    def _next(self) -> int:
        self.door = int(self.np_random.integers(1, 4))
        return self.door


class Words(gymnasium.Env[str, str]):
    """Wants a word said again."""

    action_space = spaces.Text(5, min_length=1, charset="abc")
    observation_space = spaces.Text(5, min_length=1, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "abc", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "abc", float(action == "abc"), action == "abc", False, {}


gymnasium.register("Doors-v0", entry_point=Doors)
gymnasium.register("BriefDoors-v0", entry_point=Doors, max_episode_steps=1)
gymnasium.register("Words-v0", entry_point=Words)
