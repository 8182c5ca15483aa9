"""Replies of a judge on disk, so that the same question costs one request."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from contextlib import closing
from typing import Any

from strop.errors import UserError
from strop.paths import user_path


class ReplyCache:
    """A table of replies, by a hash of everything that the reply depends on. Several processes may share the file.

    Making one only looks; `open` makes the file.

    Raises:
        UserError: the file is something else, or cannot be used.
    """

    def __init__(self, path: str, *, where: str) -> None:
        self._path = user_path(path)
        self._where = where
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None
        if self._path.exists():
            try:
                with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                    database.execute("PRAGMA schema_version").fetchone()
            except sqlite3.Error as error:
                raise self._unusable(error) from None

    def open(self) -> None:
        """Open the file, or make it; does nothing when it is open.

        Raises:
            UserError: it cannot be made or written.
        """
        with self._lock:
            if self._opened is not None:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                database = sqlite3.connect(self._path, timeout=30, check_same_thread=False, isolation_level=None)
                database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            except (OSError, sqlite3.Error) as error:
                raise self._unusable(error) from None
            self._opened = database

    def get(self, key: str) -> str | None:
        """The reply that was kept; None when there is none."""
        with self._lock:
            row = self._database().execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Keep a reply; the first one stays."""
        with self._lock:
            self._database().execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, reply))

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            raise sqlite3.ProgrammingError("it is closed")
        return self._opened

    def _unusable(self, error: Exception) -> UserError:
        return UserError(
            f"the cache {str(self._path)!r} cannot be used: {error}",
            where=self._where,
            mend="name another file, or leave it out",
        )


def cache_key(url: str, body: Any, vote: int) -> str:
    """A hash of the question: server, model, messages, every setting of the request, and which vote it is."""
    text = json.dumps([url, body, vote], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
