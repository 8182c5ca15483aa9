"""A server for the tests' recipes that judges, and rewards, by a number that follows from everything it is sent.

Counts of what it is asked are in `tiny_rewards.STATE`, as those of reward functions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tiny_rewards import LOCK, STATE


def number(*seen: Any) -> int:
    """From 0 to 10."""
    return int.from_bytes(hashlib.sha256(json.dumps(seen).encode()).digest()[:4], "big") % 11


def _reply(path: str, body: Any, times: int) -> Any:
    """Of a path that ends in `chat/completions` a judge's reply, of another a list of results."""
    if not path.endswith("chat/completions"):
        return [{"score": number(path, item) / 10} for item in body["items"]]
    # At a temperature the same question may get another answer; the lesser numbers are for other ways of reading.
    score = number(path, body, times if body["temperature"] else 0)
    text = json.dumps({"score": score, "style": (score + 3) % 11}) + f" or else {(score + 5) % 11}"
    return {"choices": [{"message": {"content": text}}]}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        with LOCK:
            STATE["requests"] = STATE.get("requests", 0) + 1
            STATE["now"] = STATE.get("now", 0) + 1
            STATE["peak"] = max(STATE.get("peak", 0), STATE["now"])
            times = STATE.setdefault("asked", {})
            times[raw] = times.get(raw, 0) + 1
            fails = "once" in self.path and times[raw] == 1
            reply = json.dumps(_reply(self.path, json.loads(raw), times[raw])).encode()
        time.sleep(0.01)
        with LOCK:
            STATE["now"] -= 1
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(500 if fails else 200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def tiny_server() -> Iterator[str]:
    """The address of such a server. Below `/once` it fails when it is first asked about something."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
