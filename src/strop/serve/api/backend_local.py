"""Jobs as processes of this machine."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from strop.serve.api.job_store import Job
from strop.serve.api.processes import Process
from strop.serve.api.runner import LOCK, exit_file, process_file

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Seen:
    """What can be seen of an attempt. `waiting`: nothing of it is there, nor on its way; `lost`: it was there, and is
    gone without a word; code: how it ended."""

    how: Literal["alive", "ended", "waiting", "lost"]
    code: int | None = None


class Backend(Protocol):
    """Where jobs run. `start` may be called again for an attempt: it is begun once only."""

    def start(self, job: Job) -> None: ...

    def look(self, job: Job) -> Seen: ...

    def save_and_leave(self, job: Job) -> None: ...

    def interrupt(self, job: Job) -> None: ...

    def kill(self, job: Job) -> None: ...


def command_of(folder: Path, attempt: int) -> list[str]:
    """The command that runs a job, with the runner around it. `-P`: the working folder holds data, not modules."""
    python = [sys.executable, "-P", "-m"]
    run = [*python, "strop", "train", str(folder / RECIPE)]
    return [*python, "strop.serve.api.runner", str(folder), str(attempt), "--", *run]


class LocalBackend:
    """Runs as `strop train` in sessions of their own, which outlive the service.

    They are started from one thread, which keeps the priority that the process had when it was made: on Linux a thread
    has a priority of its own, and what it starts inherits that. So the service can give way to what it started.

    Args:
        root: the folder of the runs, in which they start. jobs: the folder with a folder for each job.
    """

    def __init__(self, root: Path, jobs: Path) -> None:
        self._root, self._jobs = root, jobs
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="strop-starter")
        self._starter.submit(int).result()
        self._runners: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, job: Job) -> None:
        """Begin an attempt, unless it has begun."""
        command = command_of(self._jobs / job.id, job.attempt)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STROP_")}
        made = self._starter.submit(
            lambda: subprocess.Popen(
                command,
                cwd=self._root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        self._runners[job.id, job.attempt] = made.result()

    def look(self, job: Job) -> Seen:
        """How an attempt is."""
        folder = self._jobs / job.id
        ours = self._runners.get((job.id, job.attempt))
        booting = ours is not None and ours.poll() is None
        # Liveness is looked at first: what ends in between has left its exit code by then.
        alive = _locked(folder / LOCK) or any(process.alive for process in self._processes(job))
        if ended := read_json(exit_file(folder, job.attempt)):
            self._runners.pop((job.id, job.attempt), None)
            return Seen("ended", int(ended.get("code", 1)))
        if alive or booting:
            return Seen("alive")
        if process_file(folder, job.attempt).exists():
            return Seen("lost")
        return Seen("waiting") if ours is None else Seen("ended", ours.returncode)

    def save_and_leave(self, job: Job) -> None:
        """Ask the run to finish its step, save and end. A pipeline, in which nobody listens to that between two stages,
        is ended, and goes on from the last checkpoint."""
        pipeline = (self._root / job.name / "pipeline.json").is_file()
        self._send(job, signal.SIGTERM if pipeline else signal.SIGUSR1)

    def interrupt(self, job: Job) -> None:
        """Ask the run to end now."""
        self._send(job, signal.SIGTERM)

    def kill(self, job: Job) -> None:
        """End the run and whatever it started, without asking."""
        for process in self._processes(job):
            process.end_group()

    def _send(self, job: Job, number: signal.Signals) -> None:
        values = read_json(process_file(self._jobs / job.id, job.attempt))
        process = Process.read(values.get("run"))
        if process is not None:
            process.send(number)

    def _processes(self, job: Job) -> list[Process]:
        """The runner and the run, as far as they are known."""
        values = read_json(process_file(self._jobs / job.id, job.attempt))
        found = [Process.read(values.get(name)) for name in ("runner", "run")]
        return [process for process in found if process is not None]


def _locked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """What a file of the runner says; nothing while it is not there or not whole."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
