"""Routes of jobs: submit, list, watch, pause, resume, stop."""

from __future__ import annotations

import asyncio
import json
import os
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
    def jobs_there_are(
        state: JobState | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    ) -> list[JobView]:
        """Jobs, newest first."""
        return [JobView.of(job) for job in jobs.store.list(state=state, limit=limit, offset=offset)]

    @router.way("GET", "/{job}", Role.viewer)
    def one_job(job: str) -> JobView:
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
    """Streams of events. All of one run read its metrics once."""

    def __init__(self, jobs: Jobs, runs: Runs, *, limit: int, every: float = 1.0) -> None:
        self._jobs, self._runs, self._limit, self._every = jobs, runs, limit, every
        self._open = 0

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
                now = self._jobs.of(job.id)
                text = JobView.of(now).model_dump_json()
                if text != shown:
                    yield _event("job", text)
                    shown, quiet = text, 0.0
                while found := self._metrics(job.name, after):
                    for event, after in found:  # noqa: B007
                        yield event
                    quiet = 0.0
                if now.state in ENDED:
                    yield _event("end", json.dumps({"state": now.state.value}))
                    return
                await asyncio.sleep(self._every)
                quiet += self._every
                if quiet >= 15:
                    yield ": still here\n\n"
                    quiet = 0.0
        finally:
            self._open -= 1

    def _metrics(self, run: str, after: str) -> list[tuple[str, str]]:
        try:
            found = self._runs.metrics(run, after)
        except NotServed:
            return []
        events = [(_event("restarted", "{}"), "")] if found.restarted else []
        pairs = zip(found.lines, found.behind, strict=True)
        return events + [(_event("metrics", line.decode(), at), at) for line, at in pairs]


def _event(name: str, data: str, at: str = "") -> str:
    mark = f"id: {at}\n" if at else ""
    return f"event: {name}\n{mark}data: {data}\n\n"
