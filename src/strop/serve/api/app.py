"""The service put together: routes, what they share, and what errors look like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from strop import __version__
from strop.errors import ConfigError, UserError
from strop.serve.api.access import Role, Tokens
from strop.serve.api.admission import Refused
from strop.serve.api.audit import AuditLog
from strop.serve.api.confined import NotServed
from strop.serve.api.gate import NOTES, Gate, Refusal
from strop.serve.api.jobs import Conflict, Forbidden, Jobs
from strop.serve.api.readings import Runs
from strop.serve.api.routes_jobs import jobs_router
from strop.serve.api.routes_models import models_router
from strop.serve.api.routes_runs import runs_router
from strop.serve.api.routes_sampling import sampling_router
from strop.serve.api.settings import ServiceSettings
from strop.serve.api.shapes import AuditView, CallerView
from strop.serve.api.speakers import Speakers
from strop.serve.api.ways import Asking, Router
from strop.serve.registry.store import Registry

_STATUS: dict[type[Exception], int] = {Refused: 403, Forbidden: 403, Conflict: 409, UserError: 422}


class Service:
    """A service: its files are open, and `app` answers requests. `close` lets go of the files."""

    def __init__(self, settings: ServiceSettings) -> None:
        state = settings.state_folder()
        self.settings = settings
        self.audit = AuditLog(state)
        self.tokens = Tokens(state)
        self.jobs = Jobs(settings, self.audit)
        self.runs = Runs(settings.root)
        self._registry: Registry | None = None
        self.speakers = Speakers(kept=settings.models)
        self.app = self._made()

    def _made(self) -> FastAPI:
        app = FastAPI(
            title="strop",
            version=__version__,
            description="Submit recipes, follow runs, fetch what they made.",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            lifespan=self._living,
        )
        for router in (
            jobs_router(self.jobs, self.runs, streams=self.settings.limits.streams),
            runs_router(self.runs),
            sampling_router(self.runs, self.speakers),
            models_router(self.registry, self.runs),
            self._own(app),
        ):
            app.include_router(router)
        app.add_middleware(Gate, settings=self.settings, tokens=self.tokens, audit=self.audit)  # type: ignore[arg-type]
        for kind in (UserError, NotServed, Refusal, RequestValidationError, HTTPException):
            app.add_exception_handler(kind, _answer)
        return app

    def _own(self, app: FastAPI) -> Router:
        router = Router(tags=["service"])

        @router.api_route("/health", methods=["GET"])
        async def health() -> dict[str, str]:
            """Whether the service answers. Needs no token."""
            return {"status": "ok"}

        @router.way("GET", "/openapi.json", Role.viewer, include_in_schema=False)
        def document() -> Any:
            return JSONResponse(app.openapi())

        @router.way("GET", "/api/v1/me", Role.viewer)
        def me(caller: Asking) -> CallerView:
            """Who the token is of, and its role."""
            return CallerView(name=caller.name, role=caller.role.value, token=caller.token)

        @router.way("GET", "/api/v1/audit", Role.admin)
        def audit(
            after: Annotated[int, Query(ge=0, le=1 << 60)] = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 100
        ) -> AuditView:
            """Lines of the audit log behind a number. `strop serve audit verify` checks the log."""
            return AuditView(lines=self.audit.read(after=after, limit=limit))

        return router

    @contextlib.asynccontextmanager
    async def _living(self, app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (self.jobs.watch(), self.speakers.look())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await self.speakers.close()

    def registry(self) -> Registry:
        """The models that are kept; opened when it is first asked for."""
        if self._registry is None:
            self._registry = Registry(self.settings.root, self.settings.state_folder())
        return self._registry

    def close(self) -> None:
        """Let go of files; runs that were started go on."""
        if self._registry is not None:
            self._registry.close()
        self.jobs.close()
        self.tokens.close()
        self.audit.close()


async def _answer(request: Request, error: Exception) -> JSONResponse:
    """An error as callers see it: what, where, how to mend it."""
    headers: dict[str, str] = {}
    if isinstance(error, Refusal):
        status, what, where, mend, headers = error.status, error.what, "", error.mend, error.more
    elif isinstance(error, NotServed):
        status, what, where, mend = 404, "there is no such thing", "", ""
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, what, where, mend = 422, str(first["msg"]), ".".join(str(part) for part in first["loc"]), ""
    elif isinstance(error, HTTPException):
        status, what, where, mend = error.status_code, str(error.detail), "", ""
        headers = dict(error.headers or {})
    else:
        assert isinstance(error, UserError)
        status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
        what = error.block() if isinstance(error, ConfigError) and len(error.problems) > 1 else error.what
        where, mend = error.where, error.mend
    getattr(request.state, NOTES, {})["reason"] = what
    body = {"what": _shown(what), "where": _shown(where), "mend": _shown(mend)}
    return JSONResponse(body, status_code=status, headers=headers)


def _shown(text: str) -> str:
    """A text that can be sent, whatever the caller had put into it."""
    return text[:4000].encode("utf-8", "replace").decode()
