"""Replies of a judge on disk, so that the same question costs one request."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

from strop.errors import UserError


class ReplyCache:
    """A table of replies, by a hash of everything that the reply depends on. Several processes may share the file.

    Raises:
        UserError: the file cannot be opened, or is something else.
    """

    def __init__(self, path: str, *, where: str) -> None:
        place = Path(path).expanduser()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(place, timeout=30, check_same_thread=False, isolation_level=None)
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"the cache {str(place)!r} cannot be used: {error}", where=where, mend="name another file, or none"
            ) from None
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        """The reply that was kept; None when there is none."""
        with self._lock:
            row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Keep a reply; the first one stays."""
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, reply))

    def close(self) -> None:
        with self._lock:
            self._database.close()


def cache_key(url: str, body: Any, vote: int) -> str:
    """A hash of the question: server, model, messages, every setting of the request, and which vote it is."""
    text = json.dumps([url, body, vote], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
