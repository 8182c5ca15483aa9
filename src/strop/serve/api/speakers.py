"""Models that answer, each in a process of its own: started when it is asked, ended when it was not for a while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.serve.api.gate import Refusal

WORKER = "strop.loops.sample_lines"
IDLE = 600.0
"""Seconds without a request after which a model is let go of."""
START = 180.0
"""Seconds that loading a model may take."""
AT_ONCE = 64
"""Requests that may be under way."""


@dataclass(frozen=True)
class Piece:
    """Some text of an answer; the last piece has the counts and why it ended (`stop` or `length`)."""

    text: str
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Speaker:
    """The process of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = 0

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None and self._process.returncode is None

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._waiting)

    async def start(self) -> None:
        """Load the model.

        Raises:
            Refusal: it cannot be loaded.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STROP_")}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", WORKER, str(self.folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            cwd="/",
            limit=1 << 24,
        )
        self._reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(START):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise Refusal(503, f"the model did not load within {START:.0f} seconds") from None

    async def ask(self, request: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """The answer to a request, piece by piece. One that nobody listens to any more is cancelled.

        Raises:
            Refusal: the model refuses the request, or its process ended.
        """
        self._number += 1
        name = str(self._number)
        queue = self._waiting[name] = asyncio.Queue()
        done = False
        try:
            await self._send({"id": name, **request})
            while not done:
                line = await queue.get()
                if "text" in line:
                    yield Piece(line["text"])
                    continue
                done = True
                if "refused" in line:
                    raise Refusal(422, line["refused"])
                if "failed" in line:
                    raise Refusal(503, line["failed"])
                yield Piece("", **line["done"])
        finally:
            self._waiting.pop(name, None)
            self.used = time.monotonic()
            if not done and self.alive:
                with contextlib.suppress(OSError, RuntimeError):
                    await self._send({"cancel": name})

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise Refusal(503, "the model's process has ended") from None

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = json.loads(raw)
            if "id" in line:
                if (queue := self._waiting.get(line["id"])) is not None:
                    queue.put_nowait(line)
            elif "ready" in line:
                self._ready.set_result(None)
            elif not self._ready.done():
                self._ready.set_exception(Refusal(422, f"the model cannot be loaded: {line.get('refused')}"))
        if not self._ready.done():
            self._ready.set_exception(Refusal(503, "the model's process ended while it loaded"))
        self._ready.exception()
        for queue in self._waiting.values():
            queue.put_nowait({"failed": "the model's process has ended"})


class Speakers:
    """The models that are loaded: at most `kept`, those that were asked last."""

    def __init__(self, *, kept: int = 1) -> None:
        self._kept = kept
        self._speakers: dict[Path, Speaker] = {}
        self._starting = asyncio.Lock()
        self._under_way = 0

    async def ask(self, folder: Path, request: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """The answer of a model to a request, piece by piece; see `Speaker.ask`."""
        if self._under_way >= AT_ONCE:
            raise Refusal(429, "too many answers are under way", **{"retry-after": "5"})
        self._under_way += 1
        try:
            speaker = await self._speaker(folder)
            async with contextlib.aclosing(speaker.ask(request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._under_way -= 1

    async def look(self) -> None:
        """Let go of models that nobody has asked for a while, until cancelled."""
        while True:
            await asyncio.sleep(IDLE / 10)
            for folder, speaker in list(self._speakers.items()):
                if not speaker.alive or (not speaker.busy and time.monotonic() - speaker.used > IDLE):
                    await self._speakers.pop(folder).close()

    async def close(self) -> None:
        """End all processes."""
        for folder in list(self._speakers):
            await self._speakers.pop(folder).close()

    async def _speaker(self, folder: Path) -> Speaker:
        found = self._speakers.get(folder)
        if found is not None and found.alive:
            # Last in the order: asked last.
            self._speakers[folder] = self._speakers.pop(folder)
            found.used = time.monotonic()
            return found
        async with self._starting:
            found = self._speakers.pop(folder, None)
            if found is None or not found.alive:
                await self._make_room()
                found = Speaker(folder)
                await found.start()
            self._speakers[folder] = found
            found.used = time.monotonic()
            return found

    async def _make_room(self) -> None:
        while len(self._speakers) >= self._kept:
            idle = [path for path, speaker in self._speakers.items() if not speaker.busy]
            if not idle:
                raise Refusal(429, "another model is answering; ask again later", **{"retry-after": "10"})
            await self._speakers.pop(idle[0]).close()
