"""JSON over HTTP to a server that may fail in any way: a time-out of the whole request, retries, few at a time.

Only the standard library is used: what it takes is a POST, and the packages that others bring change under our feet.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import random
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from strop.errors import UserError
from strop.rewards.calls import Slots, call
from strop.rewards.failures import shorten

MOST_BYTES = 64 << 20
"""Bytes of a reply that are read."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds before the first repeat, doubled before each further one; a server's `Retry-After` holds instead."""
LONGEST_WAIT = 300.0
"""Seconds that a `Retry-After` is obeyed for, at most."""
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529}
"""Statuses after which the same request may well succeed."""
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")

T = TypeVar("T")


class Unanswered(Exception):
    """A request without a usable answer.

    again: whether the same request may succeed. wait: seconds that the server asks to wait for, None if it does not.
    timed_out: whether it was for want of time.
    """

    def __init__(self, what: str, *, again: bool = True, wait: float | None = None, timed_out: bool = False) -> None:
        super().__init__(what)
        self.again = again
        self.wait = wait
        self.timed_out = timed_out


@dataclass(frozen=True)
class Server:
    """Where requests go, and how. key: sent as a bearer token; shown nowhere."""

    url: str
    timeout: float
    retries: int
    key: str | None = field(default=None, repr=False)

    def hidden(self, text: str) -> str:
        """A text without the key, which servers like to quote."""
        return text.replace(self.key, "***") if self.key else text


class Client:
    """Sends requests to one server, so many at a time, each in a daemon thread.

    Args:
        server: address, time-out and retries. concurrency: requests at the same time.
        sleep: waits between tries; tests watch it.
    """

    def __init__(self, server: Server, *, concurrency: int, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self.server = server
        self._slots = Slots(concurrency)
        self._sleep = sleep
        # Not Python's own generator, whose state belongs to the run.
        self._random = random.Random(os.urandom(8))

    async def post(self, body: Any, read: Callable[[Any], T]) -> T:
        """Send a JSON body until `read` makes something of the JSON that comes back.

        Args:
            read: takes the parsed reply; an Unanswered of its is a failed try.

        Raises:
            Unanswered: the last try's. Its message says how many there were.
        """
        payload = json.dumps(body, default=str).encode()
        async with self._slots.here():
            for attempt in range(self.server.retries + 1):
                try:
                    return read(await call(lambda: _post(self.server, payload), name="request"))
                except Unanswered as error:
                    if attempt == self.server.retries or not error.again:
                        tries = f" ({attempt + 1} tries)" if attempt else ""
                        text = f"{shorten(self.server.hidden(str(error)), 300)}{tries}"
                        raise Unanswered(text, again=False, timed_out=error.timed_out) from None
                    await self._sleep(self._pause(attempt, error.wait))
        raise AssertionError("a server is asked at least once")

    def _pause(self, attempt: int, wait: float | None) -> float:
        return pause(attempt, wait, self._random)


def pause(attempt: int, wait: float | None, draw: random.Random) -> float:
    """Seconds before the next try. attempt: tries before this one. wait: what the server asked for, if it did."""
    if wait is not None:
        return min(wait, LONGEST_WAIT)
    # Clients that failed together must not come back together.
    return min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE) * draw.uniform(0.75, 1.25)


def server_of(url: str, key_env: str | None, *, timeout: float, retries: int, where: str, key: str) -> Server:
    """A server from its settings.

    Args:
        url: as the recipe has it. key_env: name of the variable with the key. where: key path of the verifier.
        key: name of the setting that holds the URL.

    Raises:
        UserError: the address is none, holds a password, or the variable is not set.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise UserError(
            f"{url!r} is no address of a server", where=f"{where}.{key}", mend="begin it with http:// or https://"
        )
    if parts.username is not None or parts.password is not None:
        raise UserError(
            "the address holds a user or password, which would be written into the run's files",
            where=f"{where}.{key}",
            mend="put the key into an environment variable and name that in `api_key_env`",
        )
    return Server(url, timeout, retries, None if key_env is None else _secret(key_env, f"{where}.api_key_env"))


def _secret(name: str, where: str) -> str:
    """The key in an environment variable."""
    if not name.isidentifier():
        # It may be the key itself, which must not be shown.
        raise UserError(
            "this is no name of an environment variable",
            where=where,
            mend="put the key into a variable and write the variable's name here, such as JUDGE_API_KEY",
        )
    secret = os.environ.get(name, "").strip()
    if not secret:
        raise UserError(
            f"the environment variable {name!r} is not set",
            where=where,
            mend=f"export {name}=...; only its name is written into the run's files",
        )
    if not secret.isascii() or not secret.isprintable():
        raise UserError(
            f"the environment variable {name!r} holds characters that a header cannot",
            where=where,
            mend="set it to the key alone",
        )
    return secret


def _post(server: Server, payload: bytes) -> Any:
    """One request; its reply as parsed JSON.

    Raises:
        Unanswered: there is none.
    """
    watch = _Deadline(server.timeout)
    try:
        status, headers, body = _exchange(server, payload, watch)
    except (OSError, http.client.HTTPException) as error:
        if watch.passed or isinstance(error, TimeoutError):
            raise Unanswered(f"no answer within {server.timeout:g} s", timed_out=True) from None
        raise Unanswered(f"{type(error).__name__}: {error}") from None
    finally:
        watch.cancel()
    if 300 <= status < 400:
        target = urlsplit(headers.get("Location") or "")._replace(query="", fragment="").geturl()
        raise Unanswered(f"it answered with a redirect to {target!r}, which is not followed", again=False)
    if not 200 <= status < 300:
        text = body[:2000].decode(errors="replace").strip()
        raise Unanswered(f"HTTP {status}: {text}", again=status in AGAIN, wait=retry_after(headers.get("Retry-After")))
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Unanswered(f"its answer is not JSON: {body[:200].decode(errors='replace')!r}") from None


def _exchange(server: Server, payload: bytes, watch: _Deadline) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(server.url)
    connection, path = _connection(parts, server.timeout)
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "strop"}
    if server.key is not None:
        headers["Authorization"] = f"Bearer {server.key}"
    try:
        connection.connect()
        watch.guard(connection.sock)
        connection.request("POST", path, payload, headers)
        response = connection.getresponse()
        body = response.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise http.client.HTTPException(f"its answer has more than {MOST_BYTES >> 20} MiB")
        length = response.getheader("Content-Length")
        if watch.passed or (length is not None and length.isdecimal() and len(body) < int(length)):
            raise http.client.IncompleteRead(body, None)
        return response.status, response.headers, body
    finally:
        connection.close()


def _connection(parts: Any, timeout: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection, through the proxy that the environment names unless the server is on this machine, and the path."""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    host = parts.hostname
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or _LOOPBACK.fullmatch(host) or urllib.request.proxy_bypass(host):
        return kind(host, parts.port, timeout=timeout), path
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    connection = kind(through.hostname or "", through.port, timeout=timeout)
    if parts.scheme == "https":
        connection.set_tunnel(host, parts.port)
        return connection, path
    return connection, parts.geturl()


class _Deadline:
    """Ends a connection when the time of the whole request is up: a server that trickles would pass any other limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._close)
        self._timer.daemon = True
        self._timer.start()

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def guard(self, connection: socket.socket) -> None:
        self._socket = connection
        if self.passed:
            self._close()

    def cancel(self) -> None:
        self._timer.cancel()

    def _close(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def retry_after(value: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for: a number of them, or a date."""
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None
