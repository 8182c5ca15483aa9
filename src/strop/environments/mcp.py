"""Tools of servers that speak the Model Context Protocol."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import tempfile
from collections import deque
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

from strop.config.environment import McpTools
from strop.environments.tools import CallError, Tool
from strop.errors import MissingExtra, UserError

START_SECONDS = 30.0
SHOWN = 500
"""Characters of what a server wrote that an error shows."""
_HEARD: ContextVar[deque[str] | None] = ContextVar("heard", default=None)
"""What the package `mcp` logs of the server that is spoken with."""


class _Listener(logging.Handler):
    """Keeps what is logged, which would run through the display with tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        heard = _HEARD.get()
        if heard is not None:
            why = str(record.exc_info[1]) if record.exc_info and record.exc_info[1] is not None else ""
            heard.append(": ".join(" ".join(part.split()) for part in (record.getMessage(), why) if part))


_LISTENER = _Listener()


class McpServer:
    """One server: asked for its tools when it is made, started again by `open` and kept until `close`.

    Raises:
        MissingExtra: the package `mcp` is not installed.
        UserError: the server does not start, or has no tools.
    """

    def __init__(self, settings: McpTools, *, where: str) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise MissingExtra("mcp", extra="mcp", needed_for=f"`{where}.kind: mcp`")
        self._settings = settings
        self._where = where
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        # What a server writes about itself would run through the display, and not every stderr is a file.
        self._heard: deque[str] = deque(maxlen=3)
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (as long as this object)

    def tools(self) -> list[Tool]:
        """What the server offers; it runs for that long only.

        Raises:
            UserError: it cannot be asked.
        """
        # A thread of its own, since the caller may be inside an event loop.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            try:
                found = pool.submit(lambda: asyncio.run(self._ask())).result()
            except Exception as error:
                raise self._not_started(error) from error
        if not found:
            raise UserError("the MCP server has no tools", where=self._where, mend="name another server")
        return found

    async def open(self) -> None:
        """Start the server, or connect to it.

        Raises:
            UserError: it does not start.
        """
        if self._task is not None:
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        # The connection must be left by the task that entered it.
        self._task = asyncio.create_task(self._serve(ready))
        try:
            await ready
        except Exception as error:
            self._task = None
            raise self._not_started(error) from error

    async def close(self) -> None:
        """Stop the server, or leave it."""
        if self._task is None:
            return
        self._stop.set()
        task, self._task, self._client = self._task, None, None
        await asyncio.gather(task, return_exceptions=True)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._client = await asyncio.wait_for(self._connect(stack), START_SECONDS)
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def _ask(self) -> list[Tool]:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(START_SECONDS):
                client = await self._connect(stack)
                listed = await client.list_tools()
            return [
                Tool(tool.name, tool.description or tool.name, dict(tool.input_schema), self._caller(tool.name))
                for tool in listed.tools
            ]

    async def _connect(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters, stdio_client

        # The tasks that this begins inherit it.
        _HEARD.set(self._heard)
        logging.getLogger("mcp").addHandler(_LISTENER)
        if self._settings.url is not None:
            return await stack.enter_async_context(Client(self._settings.url))
        assert self._settings.command is not None
        command, *arguments = self._settings.command
        parameters = StdioServerParameters(command=command, args=arguments)
        return await stack.enter_async_context(Client(stdio_client(parameters, errlog=self._said)))

    def _caller(self, name: str) -> Any:
        async def call(arguments: dict[str, Any]) -> str:
            if self._client is None:
                raise RuntimeError(f"the MCP server of {name} is not open")
            result = await self._client.call_tool(name, arguments)
            text = "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")
            if result.is_error:
                raise CallError(text or "the tool failed")
            return text

        return call

    def _not_started(self, error: BaseException) -> UserError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        what = self._settings.url or " ".join(self._settings.command or [])
        self._said.seek(0)
        said = self._said.read().strip()[-SHOWN:]
        heard = "; ".join(self._heard)[:SHOWN]
        return UserError(
            f"the MCP server {what!r} cannot be asked for its tools: {type(error).__name__}: {error}"
            + (f"; it said: {said}" if said else "")
            + (f"; the package mcp said: {heard}" if heard else ""),
            where=self._where,
            mend="start it by hand to see what is wrong",
        )
