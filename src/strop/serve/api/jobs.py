"""Jobs: submitted, started in turn, steered, and seen to their end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.serve.api.access import Caller, Role
from strop.serve.api.admission import Admitted, admit
from strop.serve.api.audit import AuditLog
from strop.serve.api.backend_local import RECIPE, Backend, LocalBackend
from strop.serve.api.job_store import ENDED, Job, JobState, JobStore, NameTaken
from strop.serve.api.runner import LOG, WISH
from strop.serve.api.settings import ServiceSettings
from strop.tracking.atomic import write_text_atomically
from strop.tracking.pipeline_directory import read_pipeline
from strop.tracking.run_directory import ASKED_TO_LEAVE, read_manifest

LOOK_EVERY = 0.5
LOST_AT_MOST = 3
"""How often a job whose process was lost is started again by itself."""
KILL_AFTER = 30.0
"""Seconds between asking a run to end and ending it."""
_INTERRUPTED = (130, 138, 143, -2, -10, -15)
SUBMITTED = "submitted.yaml"


class Conflict(UserError):
    """What is asked for does not go with how the job is."""


class Forbidden(UserError):
    """What is asked for is not this caller's to ask."""


class Jobs:
    """The jobs of a service. What it does by itself is in `look`, which is called again and again."""

    def __init__(self, settings: ServiceSettings, audit: AuditLog) -> None:
        state = settings.state_folder()
        self.folder = state / "jobs"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.store = JobStore(state)
        self._settings = settings
        self._audit = audit
        self.backends: dict[str, Backend] = {"local": LocalBackend(settings.root, self.folder)}
        if settings.ray is not None:
            from strop.serve.api.backend_ray import RayBackend

            self.backends["ray"] = RayBackend(settings.ray, settings.root, self.folder)
        self._asked: dict[tuple[str, int, str], float] = {}
        self._wake = asyncio.Event()
        self.wake: Callable[[], object] = lambda: None
        """Makes `watch` look at once; what watches sets it, for any thread to call."""

    # What callers ask for.

    def submit(
        self, recipe: str, overrides: Sequence[str], *, caller: Caller, name: str | None, backend: str = "local"
    ) -> Job:
        """Put a recipe into the queue.

        Raises:
            UserError: it is no recipe, or not one that this caller may submit. Conflict: its name is taken.
        """
        if backend not in self.backends:
            mend = "start the service with --ray ADDRESS" if backend == "ray" else "leave `backend` out"
            raise UserError(f"this service runs nothing on {backend!r}", where="backend", mend=mend)
        job = self.store.new_id()
        folder = self.folder / job
        folder.mkdir(mode=0o700)
        try:
            admitted = admit(
                recipe,
                overrides,
                role=caller.role,
                name=name,
                fallback=f"run-{job}",
                root=self._settings.root,
                scratch=folder / SUBMITTED,
                allowed=self._settings.allowed,
                allow_hub=self._settings.allow_hub,
            )
            write_text_atomically(folder / RECIPE, admitted.text)
            return self._added(job, admitted, caller, backend, overrides)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def pause(self, job: Job) -> Job:
        """Let a job save and leave; one that waits is taken out of the queue.

        Raises:
            Conflict: it has ended.
        """
        if job.state is JobState.paused:
            return job
        if not (self.store.wish(job.id, "pause") or self.store.take_out(job.id, JobState.paused)):
            raise _ended(self.store.get(job.id), "paused")
        return self._told(job)

    def stop(self, job: Job) -> Job:
        """End a job; what it saved last is kept, and it can be resumed.

        Raises:
            Conflict: it has ended.
        """
        if job.state is JobState.stopped:
            return job
        if not (self.store.wish(job.id, "stop") or self.store.take_out(job.id, JobState.stopped)):
            raise _ended(self.store.get(job.id), "stopped")
        return self._told(job)

    def resume(self, job: Job) -> Job:
        """Put a job that has ended early back into the queue; it goes on from its last checkpoint.

        Raises:
            Conflict: it waits or runs already, or is finished.
        """
        if not self.store.resume(job.id):
            now = self.store.get(job.id)
            mend = "only jobs that are paused, stopped or failed can be resumed"
            raise Conflict(f"the job is {now.state.value}", where=job.id, mend=mend)
        return self._told(job)

    def of(self, job: str) -> Job:
        """A job by its id. Raises KeyError."""
        return self.store.get(job)

    def recipe(self, job: str) -> str:
        """The recipe that a job runs, every default written out."""
        return (self.folder / job / RECIPE).read_text(encoding="utf-8")

    def log_path(self, job: str) -> Path:
        """Where a job's output is."""
        return self.folder / job / LOG

    @staticmethod
    def steer(job: Job, caller: Caller) -> None:
        """Raise Forbidden unless a caller may pause, resume or stop a job: its owner and administrators may."""
        if caller.role is not Role.admin and job.owner != caller.name:
            raise Forbidden(f"the job is {job.owner}'s", where=job.id, mend="ask its owner, or an administrator")

    # What it does by itself.

    async def watch(self) -> None:
        """Look after the jobs until cancelled."""
        loop = asyncio.get_running_loop()
        self.wake = lambda: loop.call_soon_threadsafe(self._wake.set)
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception as error:
                print(f"strop serve: jobs could not be looked after: {error}", file=sys.stderr, flush=True)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_EVERY)

    def look(self) -> None:
        """See how running jobs are, tell them what is wished, and start what waits while there is room.

        Raises:
            Exception: what a backend failed with, the first of several; the others were looked after. It is asked again
                at the next look.
        """
        running = dict.fromkeys(self.backends, 0)
        failed: dict[str, Exception] = {}
        for job in self.store.running():
            try:
                if job.backend in self.backends and self._look_at(job, self.backends[job.backend]):
                    running[job.backend] += 1
            except Exception as error:
                # A cluster that does not answer must not keep others from being looked after; what runs there runs.
                running[job.backend] += 1
                failed.setdefault(job.backend, error)
        for name, backend in self.backends.items():
            while name not in failed and (name == "ray" or running[name] < self._settings.jobs):
                next_one = self.store.begin_next(name)
                if next_one is None:
                    break
                running[name] += 1
                self._note(next_one, "start")
                try:
                    backend.start(next_one)
                except Exception as error:
                    failed[name] = error
        for first in failed.values():
            raise first

    def _look_at(self, job: Job, backend: Backend) -> bool:
        """Returns whether it still runs."""
        seen = backend.look(job)
        if seen.how == "alive":
            self._ask(job, backend)
            return True
        if seen.how == "waiting" and not job.wish:
            # The service ended between noting that it starts the job and starting it.
            self._note(job, "start", again=True)
            backend.start(job)
            return True
        if seen.how == "lost" and not job.wish and job.lost < LOST_AT_MOST:
            if self.store.requeue(job.id, job.attempt):
                self._note(job, "lost")
            return False
        state, error = self._ended_as(job, seen.code)
        if self.store.end(job.id, job.attempt, state, code=seen.code, error=error):
            self._note(job, "end", state=state.value, code=seen.code)
        self._asked = {key: when for key, when in self._asked.items() if key[0] != job.id}
        return False

    def _ask(self, job: Job, backend: Backend) -> None:
        """Tell a run what is wished of it, more firmly as time passes."""
        if job.wish == "pause" and self._due(job, "save"):
            backend.save_and_leave(job)
        late = 0.0 if job.wish == "stop" else self._settings.patience
        if job.wish and self._since(job, job.wish) >= late and self._due(job, "interrupt"):
            backend.interrupt(job)
        if job.wish and self._since(job, job.wish) >= late + KILL_AFTER:
            backend.kill(job)

    def _due(self, job: Job, what: str) -> bool:
        """Whether something was not done to this attempt before; then it counts as done."""
        key = (job.id, job.attempt, what)
        if key in self._asked:
            return False
        self._asked[key] = time.monotonic()
        return True

    def _since(self, job: Job, wish: str) -> float:
        return time.monotonic() - self._asked.setdefault((job.id, job.attempt, f"wish {wish}"), time.monotonic())

    def _ended_as(self, job: Job, code: int | None) -> tuple[JobState, str]:
        stopped = self._stopped(job)
        if code == 0 and stopped != ASKED_TO_LEAVE:
            return JobState.finished, ""
        if job.wish:
            return (JobState.stopped if job.wish == "stop" else JobState.paused), ""
        if code is None:
            return JobState.failed, "its process was lost again and again"
        if code == 0 or code in _INTERRUPTED:
            return JobState.paused, "it was interrupted, not by the service"
        return JobState.failed, _tail(self.log_path(job.id)) or f"it ended with {code}"

    def _stopped(self, job: Job) -> str:
        folder = self._settings.root / job.name
        with contextlib.suppress(UserError):
            if not (folder / "pipeline.json").is_file():
                return read_manifest(folder).stopped
            return "" if read_pipeline(folder).status == "finished" else ASKED_TO_LEAVE
        return ""

    def _added(self, job: str, admitted: Admitted, caller: Caller, backend: str, overrides: Sequence[str]) -> Job:
        assert admitted.name is not None
        taken = (self._settings.root / admitted.name).exists() or (self._settings.root / admitted.name).is_symlink()
        try:
            if taken:
                raise NameTaken
            made = self.store.add(job, admitted.name, owner=caller.name, backend=backend, overrides=overrides)
        except NameTaken:
            mend = "give another `name`, or resume the job that has it"
            raise Conflict(f"there is a run {admitted.name!r} already", where="name", mend=mend) from None
        self.wake()
        return made

    def _told(self, job: Job) -> Job:
        (self.folder / job.id / WISH).unlink(missing_ok=True)
        self.wake()
        return self.store.get(job.id)

    def _note(self, job: Job, action: str, **more: Any) -> None:
        self._audit.append(
            f"job.{action}", actor="service", target=job.id, outcome="done", name=job.name, attempt=job.attempt, **more
        )

    def close(self) -> None:
        """Let go of files. What runs goes on."""
        self.store.close()


def _ended(job: Job, what: str) -> Conflict:
    assert job.state in ENDED or job.state is JobState.running
    return Conflict(f"the job is {job.state.value} and cannot be {what}", where=job.id)


def _tail(path: Path, size: int = 2000) -> str:
    """The end of what a run said."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
