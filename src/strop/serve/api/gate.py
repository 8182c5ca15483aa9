"""What every request passes first: who asks, how often, how much; and what the audit log is told of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from strop.serve.api.access import Caller, Tokens
from strop.serve.api.audit import AuditLog
from strop.serve.api.settings import Limits, ServiceSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({("GET", "/health"), ("HEAD", "/health")})
"""What may be asked without a token."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})
CALLER, NOTES = "caller", "notes"
"""Where a request's state has who asks, and what handlers add to the line of the audit log."""
_QUIET = 10.0
"""Seconds in which the same refusal of a read is written once."""
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]
_POLICY = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox",
)


class Refusal(Exception):
    """A request that is not let through. more: headers of the answer."""

    def __init__(self, status: int, what: str, mend: str = "", **more: str) -> None:
        super().__init__(what)
        self.status, self.what, self.mend, self.more = status, what, mend, more


@dataclass
class _Bucket:
    """Requests that are left to one caller, filled up as time passes."""

    left: float
    seen: float = field(default_factory=time.monotonic)

    def take(self, rate: float, burst: float) -> bool:
        now = time.monotonic()
        self.left, self.seen = min(burst, self.left + rate * (now - self.seen)), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Rates:
    """How often each caller may ask. Of callers that were not seen for long nothing is kept."""

    def __init__(self, *, rate: float, burst: float, kept: int = 4096) -> None:
        self._rate, self._burst, self._kept = rate, burst, kept
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, who: str) -> bool:
        """Whether one more is allowed now."""
        bucket = self._buckets.pop(who, None) or _Bucket(self._burst)
        self._buckets[who] = bucket
        if len(self._buckets) > self._kept:
            self._buckets.popitem(last=False)
        return bucket.take(self._rate, self._burst)

    def empty(self, who: str) -> bool:
        """Whether nothing is left, without taking any."""
        bucket = self._buckets.get(who)
        return bucket is not None and bucket.left + self._rate * (time.monotonic() - bucket.seen) < 1


class Gate:
    """ASGI middleware around the whole service."""

    def __init__(self, app: App, *, settings: ServiceSettings, tokens: Tokens, audit: AuditLog) -> None:
        self._app, self._tokens, self._audit = app, tokens, audit
        self._limits: Limits = settings.limits
        self._names = {name.lower() for name in (*settings.names, settings.host, "localhost", "127.0.0.1", "::1")}
        self._any_name = settings.host in ("0.0.0.0", "::") and not settings.names
        self._rates = Rates(rate=self._limits.rate, burst=self._limits.burst)
        self._failures = Rates(rate=self._limits.failures / 60, burst=self._limits.failures)
        self._written: OrderedDict[tuple[str, ...], float] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        await _Passage(self, scope, receive, send).go()

    def admit(self, scope: Scope) -> Caller | None:
        """Who asks; None for what needs no token. Raises Refusal."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        self._check_host(headers.get(b"host", []))
        address = address_of(scope)
        if (scope["method"], scope["path"]) in OPEN:
            if not self._rates.take(f"address {address}"):
                raise Refusal(429, "too many requests", **{"retry-after": "1"})
            return None
        if self._failures.empty(address):
            raise Refusal(429, "too many refused tokens from this address", **{"retry-after": "60"})
        caller = self._caller(headers.get(b"authorization", []))
        if caller is None:
            self._failures.take(address)
            mend = "send `Authorization: Bearer TOKEN`; `strop serve token add` makes tokens"
            raise Refusal(401, "no token that is accepted", mend, **{"www-authenticate": "Bearer"})
        if not self._rates.take(f"token {caller.token}"):
            raise Refusal(429, "too many requests", **{"retry-after": "1"})
        length = headers.get(b"content-length", [b"0"])[0]
        if not length.isdigit() or int(length) > self._limits.body:
            raise Refusal(413, f"a request may have {self._limits.body} bytes")
        return caller

    def worth_writing(self, *what: str) -> bool:
        """Whether this refusal was not written a moment ago."""
        now = time.monotonic()
        if now - self._written.get(what, -_QUIET) < _QUIET:
            return False
        self._written[what] = now
        self._written.move_to_end(what)
        while len(self._written) > 1024:
            self._written.popitem(last=False)
        return True

    def _caller(self, given: list[bytes]) -> Caller | None:
        if len(given) != 1:
            return None
        kind, _, token = given[0].decode("latin-1").partition(" ")
        return self._tokens.caller(token.strip()) if kind.lower() == "bearer" else None

    def _check_host(self, given: list[bytes]) -> None:
        """A page in a browser that was led here by another name would have that name in `Host`."""
        name = given[0].decode("latin-1").lower() if len(given) == 1 else ""
        host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if not host or not (self._any_name or host in self._names):
            raise Refusal(421, "this service has another name", "start it with --name NAME for each name it has")


class _Passage:
    """One request on its way."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate, self.scope, self._receive, self._send = gate, scope, receive, send
        self.caller: Caller | None = None
        self.begun, self.arrived = False, False
        self._body: list[MutableMapping[str, Any]] = []
        scope.setdefault("state", {})
        self.notes: dict[str, Any] = scope["state"].setdefault(NOTES, {})

    async def go(self) -> None:
        try:
            self.caller = self.gate.admit(self.scope)
            self.scope["state"][CALLER] = self.caller
            await self._arrive()
            await self.gate._app(self.scope, self.receive, self.send)
        except Refusal as refusal:
            if self.begun:
                raise
            await self._refuse(refusal)

    async def _arrive(self) -> None:
        """Take in the request's body, while it is not too much and not too slow; it is small JSON, or nothing."""
        limits, size = self.gate._limits, 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while not self.arrived:
                    message = await self._receive()
                    self._body.append(message)
                    self.arrived = not message.get("more_body", False)
                    size += len(message.get("body", b""))
                    if size > limits.body:
                        raise Refusal(413, f"a request may have {limits.body} bytes")
        except TimeoutError:
            raise Refusal(408, "the request took too long to arrive") from None

    async def receive(self) -> MutableMapping[str, Any]:
        """The request's body as it came, and then whether the caller is still there."""
        return self._body.pop(0) if self._body else await self._receive()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """What the service answers; the audit log has it before the caller has it."""
        if message["type"] == "http.response.start":
            await self._write(message["status"])
            self.begun = True
            there = {name.lower() for name, _ in message.get("headers", [])}
            more = [*_HEADERS, _POLICY]
            message["headers"] = [*message.get("headers", []), *(one for one in more if one[0] not in there)]
        await self._send(message)

    async def _refuse(self, refusal: Refusal) -> None:
        self.notes.setdefault("reason", refusal.what)
        body = json.dumps({"what": refusal.what, "where": "", "mend": refusal.mend}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in refusal.more.items()]
        if not self.arrived and self.scope["method"] not in READS:
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _write(self, status: int) -> None:
        """Write to the audit log what changed something, what was taken out, and what was refused."""
        method, path = self.scope["method"], self.scope["path"]
        writes = method not in READS
        if not (writes or status >= 400 or "action" in self.notes):
            return
        caller, address = self.caller, address_of(self.scope)
        actor = caller.name if caller is not None else ""
        if not writes and status >= 400 and not self.gate.worth_writing(actor, address, method, path, str(status)):
            return
        if status in (401, 429) and not self.gate.worth_writing(actor, address, str(status)):
            return
        notes = dict(self.notes)
        outcome = "done" if status < 400 else "refused" if status < 500 else "failed"
        await asyncio.to_thread(
            self.gate._audit.append,
            notes.pop("action", f"{method} {path}"),
            actor=actor or "anonymous",
            role="" if caller is None else caller.role.value,
            address=address,
            target=notes.pop("target", ""),
            outcome=outcome,
            status=status,
            request=f"{method} {path}",
            **({"token": caller.token} if caller is not None else {}),
            **notes,
        )


def address_of(scope: Scope) -> str:
    """The address a request came from."""
    client = scope.get("client")
    return str(client[0]) if client else ""
