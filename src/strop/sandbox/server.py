"""A sandbox service: `python -m strop.sandbox.server --port 8120`. `docs/sandbox.md` describes what it speaks."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from strop import __version__
from strop.config.sandbox import LimitSettings, SandboxSettings
from strop.errors import StropError
from strop.sandbox.build import make_sandbox
from strop.sandbox.protocol import Job, Sandbox, SandboxError

LONGEST_REQUEST = 256 << 20
LOCAL = ("127.0.0.1", "::1", "localhost")


class Service(ThreadingHTTPServer):
    """The server; each request has a thread, and the sandbox bounds how many jobs run.

    Args:
        address: host and port; port 0 takes a free one.
        sandbox: where the jobs run.
        highest: limits that no job may exceed.
        token: what a request has to carry; None lets everybody in.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], sandbox: Sandbox, *, highest: LimitSettings, token: str | None = None
    ) -> None:
        self.sandbox = sandbox
        self.highest = highest
        self.token = token
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path != "/":
            self._answer(404, {"error": "there is / to GET and /run to POST"})
            return
        self._answer(200, {"service": "strop-sandbox", "version": __version__, "backend": self.server.sandbox.name})

    def do_POST(self) -> None:
        if self._refused():
            return
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/run" or not 0 < length <= LONGEST_REQUEST:
            self.close_connection = True
            self._answer(
                404 if self.path != "/run" else 413, {"error": f"POST a job of at most {LONGEST_REQUEST} bytes"}
            )
            return
        try:
            job = Job.from_json(json.loads(self.rfile.read(length)))
            too_much = exceeded(job, self.server.highest)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._answer(400, {"error": f"this is no job: {error}"})
            return
        if too_much:
            self._answer(400, {"error": too_much})
            return
        try:
            result = asyncio.run(self.server.sandbox.run(job))
        except SandboxError as error:
            self._answer(500, {"error": f"the sandbox failed: {error}"})
        else:
            self._answer(200, result.to_json())

    def _refused(self) -> bool:
        token = self.server.token
        if token is None:
            return False
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return False
        self.close_connection = True
        self._answer(401, {"error": "the access token is missing or wrong"})
        return True

    def _answer(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a job a line would be all there is to read."""


def exceeded(job: Job, highest: LimitSettings) -> str:
    """Which limit of a job is above what the service allows; empty if none is."""
    for one in (job, job.partner):
        for name, value in one.limits.model_dump().items() if one is not None else ():
            allowed = getattr(highest, name)
            if value > allowed:
                return f"{name} is {value}, and this service allows {allowed}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m strop.sandbox.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8120, help="port (default: %(default)s; 0 takes a free one)")
    parser.add_argument("--token-variable", help="environment variable with the access token that clients must send")
    parser.add_argument("--workers", type=int, help="jobs at the same time (default: one for each core)")
    parser.add_argument("--python", help="interpreter of the programs (default: this one)")
    for name, field in LimitSettings.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(field.default), default=field.default, help="highest (default: %(default)s)"
        )
    given = parser.parse_args(arguments)
    try:
        token = _token(given.token_variable)
        if token is None and given.host not in LOCAL:
            raise StropError(
                f"a service on {given.host} would run the code of anybody who can reach it",
                where="--host",
                mend="name a variable that holds an access token with --token-variable",
            )
        limits = LimitSettings(**{name: getattr(given, name) for name in LimitSettings.model_fields})
        settings = SandboxSettings(
            backend="bubblewrap", limits=limits, workers=given.workers or "auto", python=given.python
        )
        sandbox = make_sandbox(settings)
        sandbox.start()
    except (StropError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with Service((given.host, given.port), sandbox, highest=limits, token=token) as service:
        host, port = service.server_address[:2]
        print(f"serving http://{host!s}:{port} with {sandbox.workers} workers", flush=True)
        try:
            service.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            sandbox.close()
    return 0


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise StropError(f"the environment variable {variable} is not set", mend=f"export {variable}=...")
    return token


if __name__ == "__main__":
    sys.exit(main())
