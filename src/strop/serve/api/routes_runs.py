"""Routes of runs: lists, metrics, files with ranges."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Header, Query, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from strop.errors import UserError
from strop.serve.api.access import Role
from strop.serve.api.confined import SERVED, NotServed, files_below, open_below, parts_of, refuse_links
from strop.serve.api.gate import Refusal
from strop.serve.api.readings import Runs
from strop.serve.api.shapes import FileView, LoadView, MetricsView, RunView
from strop.serve.api.ways import Router, note
from strop.serve.report import report as page

CHUNK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_PAGE: dict[int | str, Any] = {200: {"content": {"text/html": {"schema": {"type": "string"}}}, "description": "It."}}
_FILE: dict[int | str, Any] = {
    200: {"content": {"application/octet-stream": {}}, "description": "The file."},
    206: {"content": {"application/octet-stream": {}}, "description": "A part of the file."},
    416: {"description": "There is no such part."},
}


def runs_router(runs: Runs) -> Router:
    """Routes below `/api/v1/runs`. What only looks at small files does so at once: a thread would cost more."""
    router = Router(prefix="/api/v1/runs", tags=["runs"])

    @router.way("GET", "", Role.viewer)
    def runs_there_are() -> list[RunView]:
        """All runs, newest first. Runs of a pipeline are named `pipeline:stage`."""
        found = []
        for name in runs.names():
            try:
                found.append(RunView(**runs.view(name)))
            except (NotServed, UserError, ValueError):
                continue
        return sorted(found, key=lambda run: run.created, reverse=True)

    @router.way("GET", "/{run}", Role.viewer)
    async def one_run(run: str) -> RunView:
        """One run."""
        return RunView(**runs.view(run))

    @router.way("GET", "/{run}/metrics", Role.viewer, response_model=MetricsView)
    async def metrics(run: str, after: Annotated[str, Query(max_length=64)] = "") -> Response:
        """Lines of a run's metrics, from the beginning or behind `next` of the answer before."""
        return Response(runs.metrics(run, after).json(), media_type="application/json")

    @router.way("GET", "/{run}/load", Role.viewer, response_model=LoadView)
    async def load(run: str, after: Annotated[str, Query(max_length=64)] = "") -> Response:
        """Load of the machines that a run was on, from the beginning or behind `next` of the answer before."""
        found = runs.metrics(run, after, file="load.jsonl")
        return Response(found.json(), media_type="application/json")

    @router.way("GET", "/{run}/report", Role.viewer, responses=_PAGE, response_class=HTMLResponse)
    def report(run: str) -> Response:
        """A run as one page: curves, scores, samples, configuration."""
        parts = runs.parts(run)
        for folder in (parts, *([*parts, stage] for stage in runs.stages(parts))):
            refuse_links(runs.root, folder, SERVED)
        return HTMLResponse(page(runs.root.joinpath(*parts)))

    @router.way("GET", "/{run}/files", Role.viewer)
    def files(run: str) -> list[FileView]:
        """The files of a run that can be fetched: its lines, configuration, episodes, checkpoints, events."""
        parts = runs.parts(run)
        found = []
        root = runs.root.joinpath(*parts)
        for path, size, changed in files_below(root, []):
            if path.split("/")[0] in SERVED:
                found.append(FileView(path=path, bytes=size, changed=changed))
        return found

    @router.way("GET", "/{run}/files/{path:path}", Role.viewer, responses=_FILE, response_class=Response)
    def file(
        run: str,
        path: str,
        request: Request,
        range: Annotated[str | None, Header(max_length=200)] = None,
        if_range: Annotated[str | None, Header(max_length=200)] = None,
    ) -> Response:
        """A file of a run, or with `Range` a part of it."""
        parts = parts_of(path)
        if parts[0] not in SERVED:
            raise NotServed(path)
        handle = open_below(runs.root, [*runs.parts(run), *parts])
        try:
            if parts[0] in ("checkpoints", "episodes"):
                note(request, "file.fetch", f"{run}/{path}")
            return _part(handle, parts[-1], range, if_range)
        except BaseException:
            os.close(handle)
            raise

    return router


def _part(handle: int, name: str, asked: str | None, if_range: str | None) -> Response:
    """The file of a handle, which the answer closes, or the part that a `Range` asks for."""
    stat = os.fstat(handle)
    size, tag = stat.st_size, f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"'
    headers = {
        "accept-ranges": "bytes",
        "etag": tag,
        "content-disposition": f'attachment; filename="{re.sub(r"[^A-Za-z0-9_.-]", "_", name)}"',
    }
    begin, end, status = 0, size, 200
    if asked is not None and if_range in (None, tag) and (match := _RANGE.fullmatch(asked)):
        first, last = match[1], match[2]
        if first:
            begin, end = int(first), min(size, int(last) + 1 if last else size)
        elif last:
            begin = max(0, size - int(last))
        if (not first and not last) or begin >= end or (last and first and int(last) < int(first)):
            raise Refusal(416, "there is no such part", **{"content-range": f"bytes */{size}"})
        headers["content-range"], status = f"bytes {begin}-{end - 1}/{size}", 206
    headers["content-length"] = str(end - begin)
    return StreamingResponse(
        _chunks(handle, begin, end), status_code=status, headers=headers, media_type="application/octet-stream"
    )


async def _chunks(handle: int, begin: int, end: int) -> AsyncIterator[bytes]:
    try:
        while begin < end:
            data = await asyncio.to_thread(os.pread, handle, min(CHUNK, end - begin), begin)
            if not data:
                return
            begin += len(data)
            yield data
    finally:
        os.close(handle)
