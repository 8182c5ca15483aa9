"""The audit log: one line for each thing that was done or refused, chained so that no line can be changed unseen.

Each line holds the number of the line, the hash of the line before, and a keyed hash (HMAC-SHA256) of itself. The key
and the head (number and hash of the last line) are kept in a file of their own: a line that is changed, removed, put
elsewhere or made up is found, the last one too. Whoever can write both files and read the key can rewrite the log; keep
the head that `strop serve audit verify` prints somewhere else to notice that.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from strop.errors import RunFailure, UserError
from strop.serve.api.database import Database

LOG, HEAD, LOCK = "audit.jsonl", "audit.db", "audit.lock"
START = "0" * 64
"""What the first line says of the line before it."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS head (one INTEGER PRIMARY KEY CHECK (one = 1), key BLOB, number INTEGER, hash TEXT)
"""
_LONGEST = 2000


@dataclass(frozen=True)
class Head:
    """Number and hash of the last line; 0 lines and `START` of an empty log."""

    number: int = 0
    hash: str = START


class AuditError(RunFailure):
    """The log is not what was written."""


class AuditLog:
    """The audit log of a service; several processes may append to it."""

    def __init__(self, state: Path) -> None:
        self.path = state / LOG
        self._lock_path = state / LOCK
        self._threads = Lock()
        self._database = Database(state / HEAD, _SCHEMA)
        with self._alone(), self._database.writing() as connection:
            connection.execute("INSERT OR IGNORE INTO head VALUES (1, ?, 0, ?)", (secrets.token_bytes(32), START))
        row = self._database.row("SELECT key FROM head")
        assert row is not None
        self._key = bytes(row["key"])
        self._catch_up()

    def append(
        self, action: str, *, actor: str, role: str = "", address: str = "", target: str = "", outcome: str, **more: Any
    ) -> None:
        """Write a line; it is on the disk when this returns.

        Args:
            actor: who. action: what, such as `submit`. target: to what. outcome: `done`, `refused`, `failed`.
            more: anything else that JSON can hold; long texts are cut.

        Raises:
            AuditError: it cannot be written.
        """
        entry = {"actor": actor, "role": role, "address": address, "action": action, "target": target}
        entry = {name: _cut(value) for name, value in {**entry, "outcome": outcome, **more}.items()}
        try:
            with self._alone():
                head = self._head()
                line = {"number": head.number + 1, "time": round(time.time(), 3), **entry, "previous": head.hash}
                line["hash"] = self._hash(line)
                handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
                try:
                    raw, size = _raw(line), os.fstat(handle).st_size
                    if os.write(handle, raw) < len(raw):
                        os.ftruncate(handle, size)
                        raise OSError(28, "No space left on device")
                    os.fsync(handle)
                finally:
                    os.close(handle)
                self._set_head(Head(head.number + 1, line["hash"]))
        except OSError as error:
            raise AuditError(f"the audit log cannot be written: {error.strerror}", where=str(self.path)) from error

    def verify(self) -> Head:
        """Check every line and the head.

        Raises:
            AuditError: the first line at which the log is not what was written.
        """
        with self._alone():
            kept, found = self._head(), Head()
            for entry in self._lines():
                found = self._checked(found, entry)
                if found.number == kept.number and found.hash != kept.hash:
                    raise AuditError(f"line {found.number} is not the line that was written", where=str(self.path))
            if found.number < kept.number:
                what = f"the log ends at line {found.number}, and {kept.number} were written"
                raise AuditError(what, where=str(self.path), mend="lines were removed from its end")
            if found != kept:
                what = f"the log has {found.number} lines, and {kept.number} were written"
                raise AuditError(what, where=str(self.path), mend="lines were added behind its end")
        return kept

    def read(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Lines behind a number, as they are."""
        found: list[dict[str, Any]] = []
        for entry in self._lines():
            if isinstance(entry, dict) and entry.get("number", 0) > after:
                found.append(entry)
                if len(found) >= limit:
                    break
        return found

    def close(self) -> None:
        """Close its files."""
        self._database.close()

    def _catch_up(self) -> None:
        """A process that was killed between the line and the head left the head one line behind."""
        with self._alone():
            head = self._head()
            behind = [entry for entry in self._lines() if not isinstance(entry, dict) or entry["number"] > head.number]
            if len(behind) == 1:
                try:
                    self._set_head(self._checked(head, behind[0]))
                except AuditError:
                    if not isinstance(behind[0], dict):
                        self._cut_torn()

    def _cut_torn(self) -> None:
        """The disk was full or the machine went off within a line: it was never whole, so nothing was done by it."""
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)

    def _checked(self, before: Head, entry: dict[str, Any] | str) -> Head:
        number = before.number + 1
        where = f"{self.path}, line {number}"
        if not isinstance(entry, dict):
            raise AuditError(f"line {number} is not a line of the log", where=where)
        if entry.get("number") != number or entry.get("previous") != before.hash:
            what = f"line {number} does not follow the line before it: one was removed, put elsewhere or changed"
            raise AuditError(what, where=where)
        if not hmac.compare_digest(str(entry.get("hash")), self._hash(entry)):
            raise AuditError(f"line {number} was changed", where=where)
        return Head(number, str(entry["hash"]))

    def _hash(self, entry: dict[str, Any]) -> str:
        plain = json.dumps({k: v for k, v in entry.items() if k != "hash"}, sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, plain.encode(), hashlib.sha256).hexdigest()

    def _lines(self) -> Iterator[dict[str, Any] | str]:
        try:
            with self.path.open("rb") as file:
                for raw in file:
                    try:
                        entry = json.loads(raw)
                    except ValueError:
                        entry = ""
                    whole = isinstance(entry, dict) and isinstance(entry.get("number"), int) and _raw(entry) == raw
                    yield entry if whole else ""
        except FileNotFoundError:
            return

    def _head(self) -> Head:
        row = self._database.row("SELECT number, hash FROM head")
        assert row is not None
        return Head(row["number"], row["hash"])

    def _set_head(self, head: Head) -> None:
        with self._database.writing() as connection:
            connection.execute("UPDATE head SET number = ?, hash = ?", (head.number, head.hash))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._threads:
            handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield
            finally:
                os.close(handle)


def open_audit(state: Path) -> AuditLog:
    """The log of a service that was started before.

    Raises:
        UserError: there is none.
    """
    if not (state / HEAD).is_file():
        raise UserError("no service has run here: there is no audit log", where=str(state), mend="name its --root")
    return AuditLog(state)


def _raw(line: dict[str, Any]) -> bytes:
    """A line as it is written, byte for byte."""
    return json.dumps(line, ensure_ascii=True).encode() + b"\n"


def _cut(value: Any) -> Any:
    return value[:_LONGEST] if isinstance(value, str) else value
