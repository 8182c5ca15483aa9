"""Environments of OpenEnv: a client of the servers' own protocol, JSON over a WebSocket.

Source: `openenv/core/env_server/http_server.py` and `types.py` of openenv-core 0.3; the package itself is not needed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from strop.config.adapted_environments import OpenEnvEnvironment
from strop.environments.acting import Actions, Shown, plain, seed_of
from strop.environments.protocol import Done, Environment, EnvironmentFactory, Message, Observation, PolicyTurn
from strop.errors import MissingExtra, UserError
from strop.rewards.calls import Slots

LOOK_SECONDS = 10.0
LARGEST_MESSAGE = 100 * 2**20
INVALID = ("VALIDATION_ERROR",)
"""Codes of errors that are the policy's: the action was none."""


class OpenEnvFactory(EnvironmentFactory):
    """Plays episodes on one server, so many at a time.

    Raises:
        MissingExtra: `aiohttp` is not installed.
        UserError: the server does not answer, or wants other actions.
    """

    def __init__(self, settings: OpenEnvEnvironment, *, where: str = "environment") -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise MissingExtra("aiohttp", extra="openenv", needed_for=f"`{where}.kind: openenv`")
        self._settings = settings
        self._shown = Shown(settings, where=where)
        self._actions = Actions(settings.actions, take=settings.take) if settings.actions is not None else None
        self._places = Slots(settings.sessions)
        _check_schema(settings, where)

    def make(self) -> Environment:
        return OpenEnvEpisode(self._settings, self._shown, self._actions, self._places)


class OpenEnvEpisode:
    """One episode, which is one connection."""

    def __init__(self, settings: OpenEnvEnvironment, shown: Shown, actions: Actions | None, places: Slots) -> None:
        self._settings = settings
        self._shown = shown
        self._actions = actions
        self._places = places
        self._place: asyncio.Semaphore | None = None
        self._client: Any = None
        self._socket: Any = None
        self._steps = 0

    async def ready(self) -> None:
        """Wait for a place on the server."""
        place = self._places.here()
        await place.acquire()
        self._place = place

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        import aiohttp

        self._client = aiohttp.ClientSession()
        address = self._settings.url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._socket = await self._client.ws_connect(address, max_msg_size=LARGEST_MESSAGE)
        given = {"seed": seed_of(row, self._settings.seed), **self._settings.arguments}
        found = await self._asked("reset", given)
        return self._shown.opening(row, self._text(found))

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        action: Any = turn.text
        if self._actions is not None:
            action = self._actions.find(turn.text)
            if action is None:
                return self._shown.malformed(f"The actions are {', '.join(self._actions.names)}.")
        try:
            found = await self._asked("step", _filled(self._settings.action, action))
        except _Invalid as error:
            return self._shown.malformed(str(error))
        self._steps += 1
        # A server that has not decided yet gives none, which is no reward of 0.
        reward = None if found.get("reward") is None else float(found["reward"])
        if found.get("done"):
            return Done(reward=reward)
        return self._shown.answer(self._text(found), reward, self._steps)

    async def close(self) -> None:
        try:
            if self._socket is not None:
                socket, self._socket = self._socket, None
                if not socket.closed:
                    await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
            if self._client is not None:
                client, self._client = self._client, None
                await client.close()
        finally:
            if self._place is not None:
                place, self._place = self._place, None
                place.release()

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """What the server answers: `{observation, reward, done}`.

        Raises:
            _Invalid: the action is none. RuntimeError: the server failed.
        """
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if not isinstance(message.data, str):
            raise RuntimeError(f"the server ended the connection ({message.data or message.type.name})")
        answer = json.loads(message.data)
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            code, said = str(found.get("code")), str(found.get("message"))
            if kind == "step" and code in INVALID:
                problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found.get("errors") or [])
                raise _Invalid((problems or said)[:500])
            raise RuntimeError(f"the server says {code}: {said[:500]}")
        return dict(found)

    def _text(self, found: Mapping[str, Any]) -> str:
        observation = found.get("observation")
        if self._settings.show is None:
            return plain(observation)
        if not isinstance(observation, Mapping) or self._settings.show not in observation:
            raise RuntimeError(f"the observation has no {self._settings.show!r}: {plain(observation)[:200]}")
        return plain(observation[self._settings.show])


class _Invalid(Exception):
    """What the server says of an action that is none."""


def _filled(template: Any, action: Any) -> Any:
    """The template with the action where `{action}` stands; alone it keeps its type."""
    if template == "{action}":
        return action
    if isinstance(template, str):
        return template.replace("{action}", str(action))
    if isinstance(template, Mapping):
        return {key: _filled(value, action) for key, value in template.items()}
    return [_filled(one, action) for one in template] if isinstance(template, list) else template


def _check_schema(settings: OpenEnvEnvironment, where: str) -> None:
    """See that the server answers, and that the action has the fields it wants."""
    address = settings.url.rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{settings.url!r} is no address", where=f"{where}.url", mend="write it as http://host:port")
    try:
        with urllib.request.urlopen(f"{address}/schema", timeout=LOOK_SECONDS) as answer:
            schema = json.load(answer)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the server at {settings.url} does not answer as one of OpenEnv does: {error}",
            where=f"{where}.url",
            mend="start it, or correct the address",
        ) from error
    action, observation = (dict(schema.get(name) or {}) for name in ("action", "observation"))
    known = list(action.get("properties") or {})
    for key in settings.action:
        if known and key not in known:
            raise UserError(
                f"actions of this server have no field {key!r}",
                where=f"{where}.action.{key}",
                mend=f"they have {', '.join(known)}",
            )
    lacking = [key for key in action.get("required") or [] if key not in settings.action]
    if lacking:
        raise UserError(
            f"actions of this server need a field {lacking[0]!r}",
            where=f"{where}.action",
            mend=f"they have {', '.join(known)}",
        )
    shown = list(observation.get("properties") or {})
    if settings.show is not None and shown and settings.show not in shown:
        raise UserError(
            f"observations of this server have no field {settings.show!r}",
            where=f"{where}.show",
            mend=f"they have {', '.join(name for name in shown if name not in ('done', 'reward', 'metadata'))}",
        )
