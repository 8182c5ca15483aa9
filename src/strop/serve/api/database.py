"""SQLite files of the service: opened in one way, seen by their owner only."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock


class Database:
    """One SQLite file that several threads and processes use. A write is on the disk before `writing` ends.

    Args:
        path: the file; made if it is not there. schema: statements that make what is missing.
    """

    def __init__(self, path: Path, schema: str) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        self._lock = RLock()
        self._connection = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA foreign_keys=ON"):
            self._connection.execute(statement)
        with self.writing() as connection:
            for statement in schema.split(";"):
                connection.execute(statement)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the right to write from its beginning; undone if the block raises."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def rows(self, statement: str, *values: object) -> list[sqlite3.Row]:
        """What a question finds."""
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, *values: object) -> sqlite3.Row | None:
        """The first row that a question finds."""
        found = self.rows(statement, *values)
        return found[0] if found else None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._connection.close()
