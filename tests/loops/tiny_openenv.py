"""A server that speaks the protocol of OpenEnv as `tests/environments/openenv_server.py` does, recorded from it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import tiny_rewards
from aiohttp import WSMsgType, web

SCHEMA = {
    "action": {
        "additionalProperties": False,
        "properties": {"metadata": {"type": "object"}, "number": {"title": "Number", "type": "integer"}},
        "required": ["number"],
        "title": "Guess",
        "type": "object",
    },
    "observation": {
        "properties": {"done": {}, "reward": {}, "metadata": {}, "hint": {"default": "", "type": "string"}},
        "title": "Hint",
        "type": "object",
    },
    "state": {"properties": {}, "title": "State", "type": "object"},
}
STATE: dict[str, int] = {"now": 0, "peak": 0}
PAUSE = web.AppKey("pause", float)


def _answer(session: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    data = message.get("data", {})
    if message["type"] == "reset":
        high = data.get("high", 9)
        session["wanted"] = Random(data.get("seed")).randint(0, high)
        return _observed(f"0 to {high}", None, False)
    number = data.get("number")
    if isinstance(number, str) and number.strip().lstrip("-").isdigit():
        number = int(number)
    if type(number) is not int:
        error = {
            "type": "int_parsing",
            "loc": ["number"],
            "msg": "Input should be a valid integer, unable to parse string as an integer",
            "input": number,
        }
        return _error("Invalid message", "VALIDATION_ERROR") | {
            "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [error]}
        }
    if number == 99:
        return _error("broken", "EXECUTION_ERROR")
    if number == session["wanted"]:
        return _observed("yes", 1.0, True)
    return _observed("higher" if number < session["wanted"] else "lower", -0.1, False)


def _observed(hint: str, reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _socket(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    session: dict[str, Any] = {}
    STATE["now"] += 1
    STATE["peak"] = max(STATE["peak"], STATE["now"])
    tiny_rewards.STATE["peak"] = max(tiny_rewards.STATE.get("peak", 0), STATE["now"])
    try:
        async for raw in socket:
            message = json.loads(raw.data) if raw.type == WSMsgType.TEXT else {"type": "close"}
            if message["type"] == "close":
                break
            await asyncio.sleep(request.app[PAUSE])
            await socket.send_str(json.dumps(_answer(session, message)))
    finally:
        STATE["now"] -= 1
    return socket


async def _schema(request: web.Request) -> web.Response:
    return web.json_response(SCHEMA)


@contextmanager
def tiny_openenv(pause: float = 0.0) -> Iterator[str]:
    """Its address, for as long as it runs."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app[PAUSE] = pause
    app.add_routes([web.get("/ws", _socket), web.get("/schema", _schema)])
    runner = web.AppRunner(app)

    async def begin() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    port = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
