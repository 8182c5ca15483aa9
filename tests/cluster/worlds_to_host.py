"""Environments that the workers of these tests host."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strop.cluster.environment_host import EnvironmentHost
from strop.config.environment import PythonEnvironment
from strop.environments.protocol import Done, EnvironmentFactory, Observation, PolicyTurn
from strop.environments.self_play import Move
from strop.errors import RunFailure
from strop.rollout.asking import InProcess


class Moody:
    """Does what the text of a turn says."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.steps = 0

    async def ready(self) -> None:
        await asyncio.sleep(0)

    async def reset(self, row: Mapping[str, Any]) -> Any:
        self.row = dict(row)
        if "array" in row:
            row["array"][:] = 7
        return [{"role": "user", "content": f"begun in {os.getpid()}"}]

    async def step(self, turn: PolicyTurn) -> Any:
        self.steps += 1
        what, _, rest = turn.text.partition(" ")
        match what:
            case "exit":
                os._exit(7)
            case "exit-if":
                if os.path.exists(rest):
                    os._exit(7)
            case "wait":
                await asyncio.sleep(float(rest))
            case "block":
                time.sleep(float(rest))
            case "raise":
                raise ValueError(rest)
            case "fail":
                raise RunFailure(rest)
            case "none":
                return None
            case "strange":
                return Observation([{"role": "user", "content": "", "strange": threading.Lock()}])
            case "done":
                return Done(reward=0.5)
        return Observation([{"role": "user", "content": f"{self.steps} {os.getpid()} {self.row.get('name')}"}], 0.25)

    async def fork(self) -> Moody:
        other = Moody()
        other.row, other.steps = dict(self.row), self.steps
        return other

    async def close(self) -> None:
        if note := self.row.get("note"):
            with Path(note).open("a") as file:
                file.write(f"{self.row.get('name')}\n")
        if self.row.get("close") == "raise":
            raise ValueError("no end")


class Debate:
    roles = ("pro", "con")

    async def reset(self, row: Mapping[str, Any]) -> Move:
        return Move("pro", [{"role": "user", "content": "Begin."}])

    async def step(self, role: str, turn: PolicyTurn) -> Any:
        return Move("con", [{"role": "user", "content": turn.text}], np.float32(0.5)) if role == "pro" else Done()

    async def rewards(self) -> Any:
        return {"pro": 1, "con": -1}

    async def close(self) -> None: ...


class Drives:
    async def drive(self, policy: Any) -> Any: ...

    async def close(self) -> None: ...


class Worlds(EnvironmentFactory):
    def __init__(self, kind: type, closed: str | None) -> None:
        self._kind, self._closed = kind, closed
        self.roles = getattr(kind, "roles", ())

    def make(self) -> Any:
        return self._kind()

    async def close(self) -> None:
        if self._closed:
            Path(self._closed).touch()


async def make_host(
    *, kind: str = "Moody", limit: float = 20.0, closed: str | None = None, refuse: str | None = None
) -> EnvironmentHost:
    if refuse is not None and os.path.exists(refuse):
        raise RunFailure("it does not start again")
    factory = Worlds(globals()[kind], closed)
    settings = PythonEnvironment(kind="python", factory="worlds_to_host:Moody", step_timeout=limit)
    return EnvironmentHost(InProcess(factory, settings), [factory.close])
