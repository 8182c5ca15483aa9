"""Jobs in a Ray cluster, submitted to its dashboard (extra `ray`).

The runner goes along, into the cluster: the folder of the runs has to be one that all its nodes see under the same
path. A submission's id names job and attempt, so a second submission of an attempt is refused by Ray, and were it not,
by the runner. What a run is asked to do, it is asked by a file.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from strop.errors import MissingExtra
from strop.serve.api.backend_local import Seen, command_of, read_json
from strop.serve.api.job_store import Job
from strop.serve.api.runner import WISH, exit_file, process_file

_ALIVE = ("PENDING", "RUNNING")
_PASSED = ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")


class RayBackend:
    """Runs as Ray jobs.

    Args:
        address: of the dashboard, `http://HOST:8265`. root, jobs: as of `LocalBackend`.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, address: str, root: Path, jobs: Path) -> None:
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError:
            raise MissingExtra("ray", extra="ray", needed_for="running jobs on Ray") from None
        self._connect = lambda: JobSubmissionClient(address)
        self._made: Any = None
        self._root, self._jobs = root, jobs

    def start(self, job: Job) -> None:
        """Submit an attempt, unless it was submitted."""
        if self._status(job) is not None:
            return
        command = command_of(self._jobs / job.id, job.attempt)
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        self._client().submit_job(
            entrypoint=f"cd {shlex.quote(str(self._root))} && exec {shlex.join(command)}",
            submission_id=_id(job),
            runtime_env={"env_vars": passed},
            entrypoint_num_cpus=1,
            metadata={"strop": job.id},
        )

    def look(self, job: Job) -> Seen:
        """How an attempt is."""
        folder = self._jobs / job.id
        if ended := read_json(exit_file(folder, job.attempt)):
            return Seen("ended", int(ended.get("code", 1)))
        status = self._status(job)
        if status in _ALIVE:
            return Seen("alive")
        # It may have ended between the two questions.
        if ended := read_json(exit_file(folder, job.attempt)):
            return Seen("ended", int(ended.get("code", 1)))
        if status is None:
            return Seen("lost" if process_file(folder, job.attempt).exists() else "waiting")
        return Seen("lost")

    def save_and_leave(self, job: Job) -> None:
        """Ask the run to finish its step, save and end. A pipeline is ended, and goes on from the last checkpoint."""
        if (self._root / job.name / "pipeline.json").is_file():
            self.interrupt(job)
        else:
            (self._jobs / job.id / WISH).touch()

    def interrupt(self, job: Job) -> None:
        """Ask the run to end now: Ray sends SIGTERM, and ends it some seconds later."""
        if self._status(job) in _ALIVE:
            self._client().stop_job(_id(job))

    def kill(self, job: Job) -> None:
        """Ray has ended it already, or does so."""
        self.interrupt(job)

    def _client(self) -> Any:
        if self._made is None:
            self._made = self._connect()
        return self._made

    def _status(self, job: Job) -> str | None:
        """What Ray says of an attempt; None if it knows none.

        Raises:
            RuntimeError: the dashboard does not answer.
        """
        try:
            return str(self._client().get_job_status(_id(job)).value)
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise


def _id(job: Job) -> str:
    return f"strop-{job.id}-{job.attempt}"
