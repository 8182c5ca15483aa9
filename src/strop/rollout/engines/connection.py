"""JSON over HTTP to a server that samples: connections are kept open and reused, and failures that may pass are tried
again. (`rewards/client.py` is for verifiers, which are called from threads and ask little.)"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

from strop.errors import MissingExtra
from strop.rewards.client import AGAIN, Server, Unanswered, pause, retry_after
from strop.rewards.failures import shorten


class Connection:
    """Requests to one server, whatever event loop they come from; as many at a time as are asked for.

    Args:
        server: its `url` is what paths are put behind.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Not Python's own generator, whose state belongs to the run.
        self._random = random.Random(os.urandom(8))

    async def post(self, path: str, body: Any = None, *, timeout: float | None = None, once: bool = False) -> Any:
        """What the server answers to a POST, parsed; None where it answers with nothing.

        Args:
            timeout: seconds of each try; the server's own when not given. once: whoever asks tries again.

        Raises:
            Unanswered: the last try's.
        """
        return await self._tried("POST", path, body, timeout, 0 if once else self.server.retries)

    async def get(self, path: str) -> Any:
        """What the server answers to a GET; see `post`."""
        return await self._tried("GET", path, None, None, self.server.retries)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def wait(self, attempt: int, error: Unanswered) -> None:
        """Wait for as long as is right before the next try. attempt: tries before the one that failed."""
        await asyncio.sleep(pause(attempt, error.wait, self._random))

    async def _tried(self, method: str, path: str, body: Any, timeout: float | None, retries: int) -> Any:
        for attempt in range(retries + 1):
            try:
                return await self._once(method, path, body, timeout or self.server.timeout)
            except Unanswered as error:
                if attempt == retries or not error.again:
                    raise told(error, attempt, self.server) from None
                await self.wait(attempt, error)
        raise AssertionError("a server is asked at least once")

    async def _once(self, method: str, path: str, body: Any, timeout: float) -> Any:
        import aiohttp

        session = await self._open()
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.request(
                method, self.server.url.rstrip("/") + path, json=body, timeout=limit, allow_redirects=False
            ) as response:
                data = await response.read()
                status, wait = response.status, retry_after(response.headers.get("Retry-After"))
        except TimeoutError:
            raise Unanswered(f"no answer within {timeout:g} s", timed_out=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None
        if not 200 <= status < 300:
            text = data[:2000].decode(errors="replace").strip()
            raise Unanswered(f"HTTP {status}: {text}", again=status in AGAIN, wait=wait)
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            # Plain words, as some servers answer to a command.
            return data[:2000].decode(errors="replace")

    async def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            try:
                import aiohttp
            except ImportError as error:
                raise MissingExtra("aiohttp", extra="servers", needed_for="an engine behind HTTP") from error
            await self.close()
            key = self.server.key
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                headers={"User-Agent": "strop", **({"Authorization": f"Bearer {key}"} if key else {})},
                trust_env=True,
            )
            self._loop = loop
        return self._session


def told(error: Unanswered, attempt: int, server: Server) -> Unanswered:
    """A failure as it is shown: short, without the key, with the number of tries. attempt: those before the last."""
    tries = f" ({attempt + 1} tries)" if attempt else ""
    text = f"{shorten(server.hidden(str(error)), 300)}{tries}"
    return Unanswered(text, again=error.again, wait=error.wait, timed_out=error.timed_out)
