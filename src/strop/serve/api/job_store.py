"""The queue: jobs in an SQLite file, which survives whatever happens to the service."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from strop.serve.api.database import Database

FILE = "queue.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, backend TEXT NOT NULL,
    state TEXT NOT NULL, wish TEXT NOT NULL, attempt INTEGER NOT NULL, lost INTEGER NOT NULL,
    overrides TEXT NOT NULL, created REAL NOT NULL, queued REAL NOT NULL, started REAL, ended REAL,
    exit_code INTEGER, error TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, queued)
"""


class JobState(StrEnum):
    """Where a job is. `paused` and `stopped` jobs, failed ones too, go on from their last checkpoint when resumed."""

    queued = "queued"
    running = "running"
    paused = "paused"
    stopped = "stopped"
    finished = "finished"
    failed = "failed"


Wish = Literal["", "pause", "stop"]
RESUMABLE = (JobState.paused, JobState.stopped, JobState.failed)
ENDED = (*RESUMABLE, JobState.finished)


@dataclass(frozen=True)
class Job:
    """One job. name: of its run's folder. owner: who submitted it. attempt: how often it was started. lost: how often
    its process was gone without a word. wish: what a running job is asked to do. Times are Unix seconds."""

    id: str
    name: str
    owner: str
    backend: Literal["local", "ray"]
    state: JobState
    wish: Wish
    attempt: int
    lost: int
    overrides: tuple[str, ...]
    created: float
    queued: float
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str


class NameTaken(Exception):
    """A job of this name is there."""


class JobStore:
    """The jobs of a service. Each change is one transaction that names the states it may leave."""

    def __init__(self, state: Path) -> None:
        self._database = Database(state / FILE, _SCHEMA)

    @staticmethod
    def new_id() -> str:
        """An id for a job."""
        return secrets.token_hex(6)

    def add(self, job: str, name: str, *, owner: str, backend: str, overrides: Sequence[str]) -> Job:
        """Put a job at the end of the queue.

        Raises:
            NameTaken: there is a job of this name.
        """
        now = time.time()
        try:
            with self._database.writing() as connection:
                connection.execute(
                    "INSERT INTO jobs VALUES (?, ?, ?, ?, 'queued', '', 0, 0, ?, ?, ?, NULL, NULL, NULL, '')",
                    (job, name, owner, backend, json.dumps(list(overrides)), now, now),
                )
        except sqlite3.IntegrityError:
            raise NameTaken(name) from None
        return self.get(job)

    def get(self, job: str) -> Job:
        """One job. Raises KeyError if there is none of this id."""
        row = self._database.row("SELECT * FROM jobs WHERE id = ?", job)
        if row is None:
            raise KeyError(job)
        return _job(row)

    def list(self, *, state: JobState | None = None, limit: int = 1000, offset: int = 0) -> list[Job]:
        """Jobs, newest first."""
        rows = self._database.rows(
            "SELECT * FROM jobs WHERE ? IS NULL OR state = ? ORDER BY created DESC, id LIMIT ? OFFSET ?",
            *(state, state, limit, offset),
        )
        return [_job(row) for row in rows]

    def running(self) -> list[Job]:
        """Jobs that were begun and of which no end is known."""
        return [_job(row) for row in self._database.rows("SELECT * FROM jobs WHERE state = 'running' ORDER BY started")]

    def begin_next(self, backend: str) -> Job | None:
        """Mark the job that waits longest as running, one attempt further; None if none waits."""
        with self._database.writing() as connection:
            found = connection.execute(
                "SELECT id FROM jobs WHERE state = 'queued' AND backend = ? ORDER BY queued, id LIMIT 1", (backend,)
            ).fetchone()
            if found is None:
                return None
            connection.execute(
                "UPDATE jobs SET state = 'running', attempt = attempt + 1, started = ?, ended = NULL, exit_code = NULL,"
                " error = '' WHERE id = ?",
                (time.time(), found["id"]),
            )
        return self.get(found["id"])

    def wish(self, job: str, wish: Wish) -> bool:
        """Note what a running job is asked to do (a stop replaces a pause); returns whether it was running."""
        return self._change(job, (JobState.running,), "wish = CASE wish WHEN 'stop' THEN 'stop' ELSE ? END", wish)

    def take_out(self, job: str, state: JobState) -> bool:
        """Take a job that waits, or was paused, out of the queue; returns whether it could be."""
        return self._change(job, (JobState.queued, JobState.paused), "state = ?, ended = ?", state, time.time())

    def end(self, job: str, attempt: int, state: JobState, *, code: int | None = None, error: str = "") -> bool:
        """Note how an attempt ended; returns whether it was the one that runs."""
        return self._change(
            job,
            (JobState.running,),
            "state = ?, wish = '', ended = ?, exit_code = ?, error = ?",
            *(state, time.time(), code, error),
            attempt=attempt,
        )

    def requeue(self, job: str, attempt: int) -> bool:
        """Put a job whose process was lost back at the front of the queue."""
        what = "state = 'queued', lost = lost + 1, queued = created"
        return self._change(job, (JobState.running,), what, attempt=attempt)

    def resume(self, job: str) -> bool:
        """Put a job that has ended before its time at the end of the queue; returns whether it could be."""
        what = "state = 'queued', wish = '', lost = 0, ended = NULL, queued = ?"
        return self._change(job, RESUMABLE, what, time.time())

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _change(self, job: str, states: Sequence[JobState], what: str, *values: object, attempt: int = -1) -> bool:
        held = ", ".join(f"'{state.value}'" for state in states)
        with self._database.writing() as connection:
            changed = connection.execute(
                f"UPDATE jobs SET {what} WHERE id = ? AND state IN ({held}) AND ? IN (-1, attempt)",
                (*values, job, attempt),
            )
            return changed.rowcount == 1


def _job(row: sqlite3.Row) -> Job:
    values = dict(row)
    values["state"] = JobState(values["state"])
    values["overrides"] = tuple(json.loads(values["overrides"]))
    return Job(**values)
