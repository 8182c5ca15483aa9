"""An HTTP server in this process that fails in every way that a test asks for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = str | Callable[[Any], Any]
"""A name of something that goes wrong, or what makes a reply of the request's body."""


@dataclass
class BadServer:
    """url: where it listens. then: what it does with each request, the last for ever. requests: what came, in order.
    most: how many replies were being made at a time."""

    url: str = ""
    then: list[Behaviour] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    most: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers["Content-Length"]))
        with self._lock:
            behaviour = self.then[min(len(self.requests), len(self.then) - 1)]
            self.requests.append((handler.path, dict(handler.headers), json.loads(raw)))
        self._do(handler, behaviour, json.loads(raw))

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        """Another request is being worked on: until its reply is sent, since who has that may ask again at once."""
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def _do(self, handler: BaseHTTPRequestHandler, behaviour: Behaviour, body: Any) -> None:
        if callable(behaviour):
            with self._one_more():
                reply = json.dumps(behaviour(body)).encode()
            return _send(handler, 200, reply)
        name, _, rest = behaviour.partition(" ")
        if name == "status":
            code, _, after = rest.partition(" ")
            headers = {"Retry-After": after} if after else {}
            # Servers quote what they were sent.
            return _send(handler, int(code), f"no: {handler.headers.get('Authorization')}".encode(), headers)
        if name == "redirect":
            return _send(handler, 307, b"", {"Location": rest})
        if name == "raw":
            return _send(handler, 200, rest.encode())
        if name == "hang":
            self.released.wait(30)
            return None
        if name == "close":
            return handler.connection.close()
        if name == "half":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n[{")
            return None
        if name == "chunk":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[{\r\n")
            return None
        if name == "garbage":
            handler.wfile.write(b"\x00\xff not http\r\n\r\n")
            return None
        if name == "trickle":  # never silent for long, never done
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not self.released.wait(0.05):
                handler.wfile.write(b" ")
                handler.wfile.flush()
            return None
        if name == "headers":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.released.wait(0.05):
                handler.wfile.write(b"X: y\r\n")
                handler.wfile.flush()
            return None
        if name == "huge":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n[")
            while True:
                handler.wfile.write(b" " * (1 << 20))
        raise ValueError(behaviour)


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def bad_server(*then: Behaviour) -> Iterator[BadServer]:
    """A server that does these things, one after the other, with the requests that come."""
    state = BadServer(then=list(then))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.close_connection = True
            with suppress(BrokenPipeError, ConnectionResetError):
                state.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def slow(seconds: float, then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same reply, later."""

    def later(body: Any) -> Any:
        time.sleep(seconds)
        return then(body)

    return later
