"""A sandbox service over HTTP. `docs/sandbox.md` describes the JSON; `python -m strop.sandbox.server` is one."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from strop.errors import UserError
from strop.sandbox.protocol import Job, SandboxError, SandboxResult
from strop.sandbox.started import GRACE_SECONDS, START_SECONDS

ATTEMPTS = 4
"""How often a service that does not answer, or is busy, is asked."""
LONGEST_ANSWER = 256 << 20


class Remote:
    """Sends jobs to a service, `workers` at a time.

    Args:
        url: address of the service.
        token_variable: environment variable with the access token.
        workers: jobs at the same time.

    Raises:
        UserError: the address is none, or the variable is not set.
    """

    name = "remote"

    def __init__(self, url: str, *, token_variable: str | None, workers: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(
                f"{url!r} is not the address of a service", where="sandbox.url", mend="write it as http://host:port"
            )
        self.url = url.rstrip("/")
        self.workers = workers
        self._headers = {"Content-Type": "application/json"}
        if token_variable is not None:
            token = os.environ.get(token_variable)
            if not token:
                raise UserError(
                    f"the environment variable {token_variable} is not set",
                    where="sandbox.token_variable",
                    mend=f"export {token_variable}=...",
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self._jobs: queue.SimpleQueue[tuple[Job, Future[SandboxResult]] | None] = queue.SimpleQueue()
        self._started = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Ask the service whether it is there and takes the token.

        Raises:
            UserError: it is not, or does not.
        """
        try:
            about = self._ask("GET", "/", None, 10.0)
        except (SandboxError, OSError, http.client.HTTPException) as error:
            raise UserError(
                f"the sandbox service {self.url} does not answer: {error}",
                where="sandbox.url",
                mend="start one there with `python -m strop.sandbox.server`",
            ) from None
        if not isinstance(about, dict) or about.get("service") != "strop-sandbox":
            raise UserError(f"{self.url} is not a sandbox service", where="sandbox.url", mend="check the address")
        self._start_threads()

    async def run(self, job: Job) -> SandboxResult:
        """Have a job run; see `protocol.Sandbox`."""
        self._start_threads()
        future: Future[SandboxResult] = Future()
        self._jobs.put((job, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let its threads end; what runs there ends at its limits."""
        with self._lock:
            for _ in range(self.workers if self._started else 0):
                self._jobs.put(None)
            self._started = False

    def _start_threads(self) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                for number in range(self.workers):
                    threading.Thread(target=self._work, name=f"strop-remote-sandbox-{number}", daemon=True).start()

    def _work(self) -> None:
        while (next_one := self._jobs.get()) is not None:
            job, future = next_one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._run(job))
            except BaseException as error:
                future.set_exception(error)

    def _run(self, job: Job) -> SandboxResult:
        seconds = job.limits.total_seconds + GRACE_SECONDS + START_SECONDS
        for attempt in range(ATTEMPTS):
            try:
                return SandboxResult.from_json(self._ask("POST", "/run", job.to_json(), seconds))
            except (_Busy, OSError, http.client.HTTPException) as error:
                if attempt == ATTEMPTS - 1:
                    raise SandboxError(f"the sandbox service {self.url} does not answer: {error}") from None
                time.sleep(0.25 * 2**attempt)
            except (ValueError, TypeError, LookupError) as error:
                raise SandboxError(f"the sandbox service sent what is no result: {error!r}") from None
        raise AssertionError("unreachable")

    def _ask(self, method: str, path: str, data: Any, seconds: float) -> Any:
        """One request.

        Raises:
            SandboxError: the service says that it failed, or refuses. `_Busy` if it can be asked again.
            OSError, HTTPException: it does not answer.
        """
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.url + path, data=body, headers=self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read(LONGEST_ANSWER)
        except urllib.error.HTTPError as error:
            told = error.read(1 << 16).decode(errors="replace")
            try:
                told = str(json.loads(told)["error"])
            except (ValueError, LookupError, TypeError):
                told = told[:200]
            kind = _Busy if error.code in (429, 502, 503, 504) else SandboxError
            raise kind(f"{error.code}: {told}") from None
        return json.loads(text)


class _Busy(SandboxError):
    """The service can be asked again."""
