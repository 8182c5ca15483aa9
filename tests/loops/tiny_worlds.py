"""Tools and environments of the tests' recipes; a recipe names them as `tiny_worlds:NAME`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.environments.self_play import Move


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


class Hangs(Asks):
    """The same, but every ninth that is made after the first sixty never answers."""

    made = 0

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        if turn.number == 1 and self.number > 60 and self.number % 9 == 0:
            await asyncio.sleep(600)
        return await super().step(turn)

    async def reset(self, row: Any) -> None:
        Hangs.made += 1
        self.number = Hangs.made


class Insists(Asks):
    """The same with another text."""

    def __init__(self, text: str = "21", pause: float = 0.0) -> None:
        super().__init__(text, pause)


class Echoes:
    """Match: one role says something, the other is to say the same; each gets what they agree in."""

    roles = ("caller", "echo")

    def __init__(self, turns: int = 2, pause: float = 0.0) -> None:
        self.turns = turns
        self.pause = pause
        self.said: list[str] = []

    async def reset(self, row: Any) -> Move:
        await asyncio.sleep(self.pause)
        return Move("caller", [{"role": "user", "content": "1="}])

    async def step(self, role: str, turn: PolicyTurn) -> Move | Done:
        self.said.append(turn.text)
        if len(self.said) == self.turns:
            return Done(reward=0.5)
        return Move(self.roles[len(self.said) % 2], [{"role": "user", "content": f"{turn.text}="}])

    async def rewards(self) -> dict[str, float]:
        same = sum(a == b for a, b in zip(*(said.ljust(4) for said in [*self.said, "", ""][:2]), strict=False))
        return {"caller": same / 8, "echo": same / 4}

    async def close(self) -> None: ...


class Mirrors(Echoes):
    """The other way round."""

    async def rewards(self) -> dict[str, float]:
        return {role: -reward for role, reward in (await super().rewards()).items()}


class Forks(Asks):
    """The same, and its episodes may branch."""

    async def fork(self) -> Forks:
        return Forks(self.text, self.pause)


class Copies:
    """Match: one role writes a character, the other is to write the same one."""

    roles = ("writer", "copier")

    def __init__(self) -> None:
        self.said: list[str] = []

    async def reset(self, row: Any) -> Move:
        return Move("writer", [{"role": "user", "content": "="}])

    async def step(self, role: str, turn: PolicyTurn) -> Move | Done:
        self.said.append(turn.text)
        if len(self.said) == 2:
            return Done()
        return Move("copier", [{"role": "user", "content": f"{turn.text}="}])

    async def rewards(self) -> dict[str, float]:
        agree = float(self.said[0] == self.said[-1] and self.said[0] in ("1", "2"))
        return {"writer": agree, "copier": agree}

    async def close(self) -> None: ...
