"""The application: pages from `static/`, and answers about runs under `api/`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from strop.errors import MissingExtra, StropError, UserError

try:
    from fastapi import FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, RedirectResponse, Response
    from starlette.exceptions import HTTPException
except ImportError:
    raise MissingExtra("fastapi", extra="serve", needed_for="the viewer of runs") from None

from strop.serve.viewer import step_episodes
from strop.serve.viewer.answers import FRESH, answer
from strop.serve.viewer.catalog import Catalog, NotFound, inside
from strop.serve.viewer.differences import differences
from strop.serve.viewer.readings import Readings, Recipe, thinned
from strop.serve.viewer.timeline import timeline
from strop.tracking.timeline import read_step

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_COMPARED = 12
MOST_NAMES = 400
MOST_LOOKS = 2000
"""Looks at a machine that are sent at once; of more, means of equal parts."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Name = Annotated[str, Query(max_length=500)]
Step = Annotated[int, Query(ge=0, le=10**12)]


def build(run_roots: Sequence[str | Path], *, hosts: Sequence[str] | None = None) -> FastAPI:
    """The viewer of the runs in some folders; it only reads. May be mounted under a path of another application.

    Args:
        run_roots: folders of runs or pipelines, or folders that hold them.
        hosts: names by which browsers may ask for it, without the port. A page elsewhere whose name leads to this
            machine (DNS rebinding) is then refused. None: any name, for whoever checks that otherwise.

    Raises:
        MissingExtra: fastapi is not installed (on import).
    """
    app = FastAPI(title="strop viewer", docs_url=None, redoc_url=None, openapi_url=None)
    allowed = None if hosts is None else {host.lower() for host in hosts}

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if allowed is not None and _host(request) not in allowed:
            what = UserError("this name is not one of the viewer's", where=_host(request), mend="start it with --host")
            response = _problem(request, what, 421)
        else:
            response = await go_on(request)
        response.headers.update(HEADERS)
        return response

    _add_problems(app)
    _add_pages(app)
    _add_api(app, Catalog(run_roots), Readings())
    return app


def _host(request: Request) -> str:
    host = request.headers.get("host", "").lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


def _problem(request: Request, error: StropError, status: int) -> Response:
    told = {"what": error.what, "where": error.where, "mend": error.mend}
    return answer(request, {"problem": told}, status=status)


def _add_problems(app: FastAPI) -> None:
    """Whatever goes wrong is answered in one form."""

    @app.exception_handler(StropError)
    async def strop_error(request: Request, error: StropError) -> Response:
        return _problem(request, error, 404 if isinstance(error, NotFound) else 422)

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _problem(request, UserError(str(first["msg"]), where=where), 422)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _problem(request, UserError(str(error.detail), where=request.url.path[:200]), error.status_code)


def _add_pages(app: FastAPI) -> None:
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in KINDS}

    @app.get("/", include_in_schema=False)
    def index(request: Request) -> Response:
        if not request.url.path.endswith("/"):
            # Mounted under a path: what the page loads lies below it.
            return RedirectResponse(f"{request.url.path}/")
        return FileResponse(STATIC / "index.html", media_type="text/html", headers=FRESH)

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        # Looked up in what is there: a name never becomes part of a path.
        path = files.get(name)
        if path is None:
            raise HTTPException(404, "there is no such file")
        return FileResponse(path, media_type=KINDS[path.suffix], headers=FRESH)


def few(values: Sequence[float]) -> Sequence[float]:
    """At most `MOST_LOOKS` numbers."""
    return values if len(values) <= MOST_LOOKS else thinned(values, MOST_LOOKS)


def _add_api(app: FastAPI, catalog: Catalog, readings: Readings) -> None:
    tables = step_episodes.Tables()

    @app.get("/api/runs")
    def runs(request: Request) -> Response:
        return answer(request, {"runs": readings.glances(catalog.runs())})

    @app.get("/api/run")
    def run(request: Request, run: Name) -> Response:
        return answer(request, readings.whole(run, catalog.find(run)))

    @app.get("/api/series")
    def series(request: Request, run: Name, names: str = "", since: Name = "") -> Response:
        wanted = [name for name in names.split(",") if name][:MOST_NAMES]
        news = readings.tail(catalog.find(run)).news(since, wanted)
        kinds = {
            kind: {"step": steps, "time": times, "values": values}
            for kind, (steps, times, values) in news.kinds.items()
        }
        return answer(request, {"cursor": news.cursor, "reset": news.reset, "kinds": kinds})

    @app.get("/api/load")
    def load(request: Request, run: Name, since: Annotated[str, Query(max_length=16_000)] = "") -> Response:
        tail = readings.load(catalog.find(run))
        tail.poll()
        names = dict.fromkeys(name for names in tail.names().values() for name in names)
        news = tail.news(since, list(names)[:MOST_NAMES])
        kinds = {
            node: {"step": few(steps), "time": few(times), "values": {n: few(v) for n, v in values.items()}}
            for node, (steps, times, values) in news.kinds.items()
        }
        return answer(request, {"cursor": news.cursor, "reset": news.reset, "kinds": kinds})

    @app.get("/api/steps")
    def steps(request: Request, run: Name) -> Response:
        return answer(request, step_episodes.steps_with_episodes(catalog.find(run)))

    @app.get("/api/episodes")
    def episodes(request: Request, run: Name, step: Step, beside: bool = False) -> Response:
        where = catalog.find(run)
        path = step_episodes.file_of(where, step, beside=beside)
        version = None if Recipe.of(where).offline else step - 1
        return answer(request, {"step": step, "rows": tables.rows(path, trainer_version=version)})

    @app.get("/api/episode")
    def episode(
        request: Request, run: Name, step: Step, row: int, beside: bool = False, group: bool = False
    ) -> Response:
        where = catalog.find(run)
        path = step_episodes.file_of(where, step, beside=beside)
        return answer(request, step_episodes.episode(where, path, row, whole_group=group))

    @app.get("/api/timeline")
    def step_timeline(request: Request, run: Name, step: Step) -> Response:
        where = catalog.find(run)
        tail = readings.tail(where)
        tail.poll()
        line = tail.line("train", step)
        if line is None:
            raise NotFound(f"the run recorded no step {step}", where=run)
        recorded = read_step(inside(where, "timeline.jsonl"), step)
        return answer(request, {"step": step, "time": line[0]} | timeline(line[1], Recipe.of(where).values, recorded))

    @app.get("/api/config")
    def config(request: Request, run: Name) -> Response:
        try:
            text = inside(catalog.find(run), "config.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            raise NotFound("the run has no config.yaml", where=run) from None
        return answer(request, {"text": text})

    @app.get("/api/differences")
    def config_differences(request: Request, run: Annotated[list[str], Query(max_length=MOST_COMPARED)]) -> Response:
        recipes: dict[str, Any] = {name: Recipe.of(catalog.find(name)).values for name in run}
        return answer(request, {"differences": differences(recipes)})
