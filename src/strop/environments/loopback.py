"""A server on this machine's own address, for functions that ask the policy over HTTP: JSON in, JSON out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

HOST = "127.0.0.1"
LARGEST_BODY = 256 * 2**20
Answer = Callable[[Any, Mapping[str, str]], Awaitable[Any]]


class Loopback:
    """Serves some paths, each by a coroutine function of the JSON that was posted and the headers, in lower case.

    A ValueError in one of them is answered with status 400, any other exception with 500; `{"error": {"message": ...}}`
    says what it was.
    """

    def __init__(self, routes: Mapping[str, Answer]) -> None:
        self._routes = dict(routes)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Begin to serve; returns the port."""
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop, and drop every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                while await self._exchange(reader, writer):
                    pass
        except asyncio.CancelledError:
            return
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        _, path, version = head[0].split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, headers)
        status, answer = await self._answer(path.partition("?")[0], headers, body)
        payload = json.dumps(answer).encode()
        keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            f"Connection: {'keep-alive' if keep else 'close'}\r\n\r\n".encode()
            + payload
        )
        await writer.drain()
        return keep

    async def _answer(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, Any]:
        route = self._routes.get(path)
        if route is None:
            return "404 Not Found", _error(f"there is no {path}; there are {', '.join(self._routes)}")
        try:
            given = json.loads(body) if body else None
        except ValueError as error:
            return "400 Bad Request", _error(f"the body is not JSON: {error}")
        try:
            return "200 OK", await route(given, headers)
        except (ValueError, KeyError, TypeError) as error:
            return "400 Bad Request", _error(str(error) or type(error).__name__)
        except Exception as error:
            return "500 Internal Server Error", _error(f"{type(error).__name__}: {error}")


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        pieces = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readline()
        while (await reader.readline()).strip():
            pass
        return b"".join(pieces)
    length = int(headers.get("content-length", "0"))
    if length > LARGEST_BODY:
        raise ConnectionError("the body is too large")
    return await reader.readexactly(length)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
