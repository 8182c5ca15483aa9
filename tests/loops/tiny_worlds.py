"""Tools and environments of the tests' recipes; a recipe names them as `tiny_worlds:NAME`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from strop.environments.protocol import Done, Observation, PolicyTurn


def twice(text: str) -> str:
    """Says it twice."""
    return text + text


def backwards(text: str) -> str:
    """Says it from behind, and a one."""
    return f"{text[::-1]}1"


def dawdles(text: str) -> str:
    """Takes its time."""
    time.sleep(0.2)
    return "1"


class Asks:
    """Says a text after each of the first two turns, and gives the share of ones in each turn."""

    def __init__(self, text: str = "1", pause: float = 0.0) -> None:
        self.text = text
        self.pause = pause

    async def reset(self, row: Any) -> None: ...

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        await asyncio.sleep(self.pause)
        reward = turn.text.count("1") / 4
        if turn.number == 2:
            return Done(reward=reward)
        return Observation([{"role": "user", "content": self.text}], reward)

    async def close(self) -> None: ...


class Insists(Asks):
    """The same with another text."""

    def __init__(self, text: str = "21", pause: float = 0.0) -> None:
        super().__init__(text, pause)
