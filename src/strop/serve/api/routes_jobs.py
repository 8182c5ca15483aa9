"""Routes of jobs: submit, list, watch, pause, resume, stop."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from strop.serve.api.access import Role
from strop.serve.api.confined import NotServed, open_below
from strop.serve.api.gate import Refusal
from strop.serve.api.job_store import ENDED, Job, JobState
from strop.serve.api.jobs import Jobs
from strop.serve.api.readings import Runs
from strop.serve.api.runner import LOG
from strop.serve.api.shapes import JobView, Submission
from strop.serve.api.ways import Asking, Router, note

LOG_AT_ONCE = 256 * 1024
_EVENTS = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Events as they are."}
}
_TEXT: dict[int | str, Any] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The text."}
}


def jobs_router(jobs: Jobs, runs: Runs, *, streams: int) -> Router:
    """Routes below `/api/v1/jobs`."""
    router = Router(prefix="/api/v1/jobs", tags=["jobs"])
    open_streams = Streams(jobs, runs, limit=streams)

    def found(job: str) -> Job:
        try:
            return jobs.of(job)
        except KeyError:
            raise Refusal(404, "there is no such job") from None

    @router.way("POST", "", Role.operator, status_code=201)
    def submit(submission: Submission, request: Request, caller: Asking) -> JobView:
        """Put a recipe into the queue."""
        note(request, "job.submit", "", recipe=submission.recipe[:500], backend=submission.backend)
        job = jobs.submit(
            submission.recipe,
            submission.overrides,
            caller=caller,
            name=submission.name,
            backend=submission.backend,
        )
        note(request, "job.submit", job.id, run=job.name, recipe="")
        return JobView.of(job)

    @router.way("GET", "", Role.viewer)
    async def jobs_there_are(
        state: JobState | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    ) -> list[JobView]:
        """Jobs, newest first."""
        return [JobView.of(job) for job in jobs.store.newest(state=state, limit=limit, offset=offset)]

    @router.way("GET", "/{job}", Role.viewer)
    async def one_job(job: str) -> JobView:
        """One job."""
        return JobView.of(found(job))

    @router.way("GET", "/{job}/recipe", Role.viewer, responses=_TEXT, response_class=PlainTextResponse)
    def recipe(job: str) -> Response:
        """The recipe that a job runs, every default written out."""
        return PlainTextResponse(jobs.recipe(found(job).id), media_type="text/plain")

    @router.way("GET", "/{job}/log", Role.viewer, responses=_TEXT, response_class=PlainTextResponse)
    def log(job: str, offset: Annotated[int, Query(ge=0, le=1 << 50)] = 0) -> Response:
        """What a job printed, from a place on; the header `X-Next-Offset` says where to go on."""
        try:
            handle = open_below(jobs.folder, [found(job).id, LOG])
        except NotServed:
            return PlainTextResponse("", headers={"X-Next-Offset": "0"})
        try:
            text = os.pread(handle, LOG_AT_ONCE, offset)
        finally:
            os.close(handle)
        return PlainTextResponse(text, headers={"X-Next-Offset": str(offset + len(text))})

    @router.way("GET", "/{job}/events", Role.viewer, responses=_EVENTS, response_class=StreamingResponse)
    async def events(job: str, request: Request) -> Response:
        """Follow a job: events `job` when it changes, `metrics` for each line of its metrics, `end` when it has ended.

        `Last-Event-ID` goes on behind an event. `restarted` says that lines come from the beginning again.
        """
        after = request.headers.get("last-event-id", "")
        return StreamingResponse(open_streams.follow(found(job), after), media_type="text/event-stream")

    @router.way("POST", "/{job}/pause", Role.operator)
    def pause(job: str, request: Request, caller: Asking) -> JobView:
        """Let a job save and leave; `resume` goes on from there."""
        note(request, "job.pause", job)
        jobs.steer(found(job), caller)
        return JobView.of(jobs.pause(found(job)))

    @router.way("POST", "/{job}/resume", Role.operator)
    def resume(job: str, request: Request, caller: Asking) -> JobView:
        """Go on with a job that was paused or stopped, or has failed, from its last checkpoint."""
        note(request, "job.resume", job)
        jobs.steer(found(job), caller)
        return JobView.of(jobs.resume(found(job)))

    @router.way("POST", "/{job}/stop", Role.operator)
    def stop(job: str, request: Request, caller: Asking) -> JobView:
        """End a job; what it saved last is kept."""
        note(request, "job.stop", job)
        jobs.steer(found(job), caller)
        return JobView.of(jobs.stop(found(job)))

    return router


class Streams:
    """Streams of events. What one has looked at, the others do not look at again within the same second."""

    def __init__(self, jobs: Jobs, runs: Runs, *, limit: int, every: float = 1.0) -> None:
        self._jobs, self._runs, self._limit, self._every = jobs, runs, limit, every
        self._open = 0
        self._states: dict[str, tuple[float, JobState, str]] = {}
        self._ends: dict[str, tuple[float, str]] = {}
        self._written: dict[tuple[str, str, str], str] = {}

    def follow(self, job: Job, after: str) -> AsyncIterator[str]:
        """Events of a job, from behind an event on. Raises Refusal when too many are open."""
        if self._open >= self._limit:
            raise Refusal(429, "too many event streams are open", **{"retry-after": "10"})
        return self._events(job, after)

    async def _events(self, job: Job, after: str) -> AsyncIterator[str]:
        self._open += 1
        try:
            shown, quiet = "", 0.0
            while True:
                # The state first: what was logged before a job ended is sent before its end.
                state, text = self._state(job.id)
                if text != shown:
                    yield _event("job", text)
                    shown, quiet = text, 0.0
                while found := self._metrics(job.name, after, all=state in ENDED):
                    yield found[0]
                    after, quiet = found[1], 0.0
                if state in ENDED:
                    yield _event("end", json.dumps({"state": state.value}))
                    return
                await asyncio.sleep(self._every)
                quiet += self._every
                if quiet >= 15:
                    yield ": still here\n\n"
                    quiet = 0.0
        finally:
            self._open -= 1
            if not self._open:
                self._states.clear()
                self._ends.clear()
                self._written.clear()

    def _state(self, job: str) -> tuple[JobState, str]:
        """The state of a job, and all of it as JSON."""
        seen = self._states.get(job)
        if seen is None or self._old(seen[0]):
            now = self._jobs.of(job)
            seen = self._states[job] = (time.monotonic(), now.state, JobView.of(now).model_dump_json())
        return seen[1], seen[2]

    def _metrics(self, run: str, after: str, *, all: bool) -> tuple[str, str] | None:
        """The events of the next lines, written once for all streams, and where to go on; None if there are none.

        Args:
            all: look even if another stream has just done so.
        """
        seen = self._ends.get(run)
        if not all and seen is not None and seen[1] == after and not self._old(seen[0]):
            return None
        try:
            found = self._runs.metrics(run, after)
        except NotServed:
            return None
        self._ends[run] = (time.monotonic(), found.next)
        if not found.lines:
            return (_event("restarted", "{}"), "") if found.restarted else None
        key = (run, after, found.next)
        if key not in self._written:
            pairs = zip(found.lines, found.behind, strict=True)
            events = [_event("metrics", line.decode(), at) for line, at in pairs]
            self._written[key] = "".join([_event("restarted", "{}") if found.restarted else "", *events])
            while len(self._written) > 64:
                self._written.pop(next(iter(self._written)))
        return self._written[key], found.next

    def _old(self, when: float) -> bool:
        return time.monotonic() - when > 0.8 * self._every


def _event(name: str, data: str, at: str = "") -> str:
    mark = f"id: {at}\n" if at else ""
    return f"event: {name}\n{mark}data: {data}\n\n"
