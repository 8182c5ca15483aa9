"""A client of `strop serve`, of the standard library alone.

from strop.serve.client import Client
client = Client("http://127.0.0.1:8420", token)
job = client.submit("recipes/quickstart.yaml", "run.steps=20", name="mine")
for event in client.follow(job["id"]):
    print(event.name, event.data)
client.download_model(job["run"], "mine-model")
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from strop.errors import RunFailure, UserError

CHUNK = 1 << 20
_AGAIN = 5
"""How often a stream that broke off is opened again before that is an error."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a job: `job`, `metrics`, `restarted` or `end`, with what the service says of it."""

    name: str
    data: dict[str, Any]


class ServiceError(RunFailure):
    """The service refused, or could not be reached; `status` is 0 where there was no answer."""

    def __init__(self, status: int, what: str, *, where: str = "", mend: str = "") -> None:
        super().__init__(what, where=where, mend=mend)
        self.status = status


class Client:
    """A service, by its address and a token.

    Args:
        url: `http://HOST:PORT` or `https://…`; the variable `STROP_URL`, else this machine, when not given.
        token: what `strop serve token add` printed; the variable `STROP_TOKEN` when not given.
        authority: a file of certificates to trust, for a service whose own is signed by nobody known.
        timeout: seconds to wait for an answer.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        authority: str | Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        parts = urlsplit(url or os.environ.get("STROP_URL") or "http://127.0.0.1:8420")
        token = token or os.environ.get("STROP_TOKEN")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the address of a service", mend="write http://HOST:PORT or https://HOST")
        if not token:
            raise UserError("the service wants a token", mend="set STROP_TOKEN to what `strop serve token add` printed")
        self._host, self._port, self._secure = parts.hostname, parts.port, parts.scheme == "https"
        self._token, self._timeout = token, timeout
        self._context = ssl.create_default_context(cafile=authority) if self._secure else None

    def submit(
        self, recipe: str | Path, *overrides: str, name: str | None = None, backend: str = "local"
    ) -> dict[str, Any]:
        """Put a recipe into the queue; returns the job.

        Args:
            recipe: its file, whatever it extends is sent along; or its YAML text, if that has a line end.
            overrides: `section.key=value`. name: of the run.
        """
        body = {"recipe": _text_of(recipe), "overrides": list(overrides), "name": name, "backend": backend}
        found: dict[str, Any] = self.ask("POST", "/api/v1/jobs", body)
        return found

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        """Jobs, newest first. query: `state`, `limit`, `offset`."""
        found: list[dict[str, Any]] = self.ask("GET", "/api/v1/jobs", query=query)
        return found

    def job(self, job: str) -> dict[str, Any]:
        """One job."""
        return self._job("GET", job, "")

    def pause(self, job: str) -> dict[str, Any]:
        """Let a job save and leave."""
        return self._job("POST", job, "/pause")

    def resume(self, job: str) -> dict[str, Any]:
        """Go on with a job."""
        return self._job("POST", job, "/resume")

    def stop(self, job: str) -> dict[str, Any]:
        """End a job."""
        return self._job("POST", job, "/stop")

    def log(self, job: str) -> str:
        """All that a job printed."""
        found, at = b"", 0
        while True:
            answer = self._open("GET", f"/api/v1/jobs/{quote(job, safe='')}/log", query={"offset": at})
            part = answer.read()
            if not part:
                return found.decode(errors="replace")
            found, at = found + part, at + len(part)

    def follow(self, job: str) -> Iterator[Event]:
        """What happens to a job, from its beginning until it has ended. A connection that breaks is made again."""
        at, failures = "", 0
        while True:
            try:
                for event, behind in self._events(job, at):
                    at, failures = behind, 0
                    yield event
                    if event.name == "end":
                        return
            except (OSError, http.client.HTTPException, ServiceError) as error:
                if isinstance(error, ServiceError) and 0 < error.status < 500 and error.status != 429:
                    raise
                failures += 1
                if failures > _AGAIN:
                    raise
            time.sleep(min(10.0, 0.5 * 2**failures))

    def wait(self, job: str) -> dict[str, Any]:
        """The job when it has ended."""
        for _ in self.follow(job):
            pass
        return self.job(job)

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        found: list[dict[str, Any]] = self.ask("GET", "/api/v1/runs")
        return found

    def run(self, run: str) -> dict[str, Any]:
        """One run."""
        found: dict[str, Any] = self.ask("GET", f"/api/v1/runs/{_run(run)}")
        return found

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """All lines of a run's metrics."""
        return self._lines(run, "metrics")

    def load(self, run: str) -> list[dict[str, Any]]:
        """The load of the machines that a run was on: a line for each look at each of them."""
        return self._lines(run, "load")

    def _lines(self, run: str, what: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            part = self.ask("GET", f"/api/v1/runs/{_run(run)}/{what}", query={"after": after})
            if part["restarted"]:
                found = []
            found += part["records"]
            if not part["records"]:
                return found
            after = part["next"]

    def files(self, run: str) -> list[dict[str, Any]]:
        """The files of a run: path, bytes, changed."""
        found: list[dict[str, Any]] = self.ask("GET", f"/api/v1/runs/{_run(run)}/files")
        return found

    def download(self, run: str, path: str, target: str | Path) -> Path:
        """Fetch a file of a run. What of it was fetched before a connection broke is not fetched again."""
        target = Path(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        tag, done, size = "", 0, -1
        for attempt in range(_AGAIN + 1):
            headers = {"Range": f"bytes={done}-", "If-Range": tag} if done else {}
            try:
                answer = self._open("GET", f"/api/v1/runs/{_run(run)}/files/{quote(path)}", headers=headers)
                if answer.status != 206:
                    done, size = 0, int(answer.headers["content-length"])
                tag = answer.headers["etag"]
                with part.open("ab" if done else "wb") as file:
                    while data := answer.read(CHUNK):
                        file.write(data)
                        done += len(data)
                if done == size:
                    break
            except (OSError, http.client.HTTPException):
                if attempt == _AGAIN:
                    raise
        if done != size:
            raise ServiceError(0, f"{path} came in part only: {done} of {size} bytes", where=run)
        os.replace(part, target)
        return target

    def download_model(self, run: str, folder: str | Path, *, checkpoint: str = "latest") -> Path:
        """Fetch the model of a run's checkpoint: `latest`, `best`, or the number of a step."""
        if checkpoint.isdigit():
            name = f"step-{int(checkpoint):06d}"
        else:
            name = self._open("GET", f"/api/v1/runs/{_run(run)}/files/checkpoints/{quote(checkpoint)}").read().decode()
        below = f"checkpoints/{name.strip()}/model/"
        paths = [file["path"] for file in self.files(run) if file["path"].startswith(below)]
        if not paths:
            raise ServiceError(404, f"the run {run!r} has no model in its checkpoint {checkpoint!r}", where=below)
        for path in paths:
            self.download(run, path, Path(folder) / path.removeprefix(below))
        return Path(folder)

    def ask(self, method: str, path: str, body: Any = None, *, query: Mapping[str, Any] | None = None) -> Any:
        """Send a request and read the JSON of its answer.

        Raises:
            ServiceError: it was refused.
        """
        return json.loads(self._open(method, path, body, query=query).read())

    def _job(self, method: str, job: str, verb: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(method, f"/api/v1/jobs/{quote(job, safe='')}{verb}")
        return found

    def _events(self, job: str, at: str) -> Iterator[tuple[Event, str]]:
        headers = {"Last-Event-ID": at} if at else {}
        answer = self._open("GET", f"/api/v1/jobs/{quote(job, safe='')}/events", headers=headers)
        name, data = "", ""
        for raw in answer:
            line = raw.decode().rstrip("\r\n")
            if not line and name:
                yield Event(name, json.loads(data)), at
                name, data = "", ""
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                data = value
            elif key == "id":
                at = value

    def _open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request; no redirection is followed, so the token goes to this service only."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        more: dict[str, Any] = {"context": self._context} if self._secure else {}
        connection = kind(self._host, self._port, timeout=self._timeout, **more)
        sent = {"Authorization": f"Bearer {self._token}", "Connection": "close", **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        where = path + (f"?{urlencode(query)}" if query else "")
        try:
            connection.request(method, where, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
        except (ConnectionRefusedError, TimeoutError) as error:
            address = f"{self._host}:{self._port or (443 if self._secure else 80)}"
            raise ServiceError(0, f"no service answers: {error}", where=address, mend="start `strop serve`") from error
        if answer.status >= 400:
            raise _refusal(answer, f"{method} {path}")
        return answer


def _refusal(answer: http.client.HTTPResponse, where: str) -> ServiceError:
    try:
        said = json.loads(answer.read())
        texts = {key: str(said[key]) for key in ("what", "where", "mend")}
    except (ValueError, KeyError, TypeError):
        texts = {"what": f"the service answered {answer.status}", "where": where, "mend": ""}
    return ServiceError(answer.status, texts["what"], where=texts["where"] or where, mend=texts["mend"])


def _text_of(recipe: str | Path) -> str:
    """A recipe as one text, without files that it extends."""
    if isinstance(recipe, str) and "\n" in recipe:
        return recipe
    path = Path(recipe)
    text = path.read_text(encoding="utf-8")
    if not re.search(r"^\s*extends\s*:", text, re.MULTILINE):
        return text
    from strop.config import Config
    from strop.config.loading import resolved_yaml
    from strop.config.pipeline_loading import load_recipe, resolved_pipeline

    settings = load_recipe(path, [])
    return resolved_yaml(settings) if isinstance(settings, Config) else resolved_pipeline(settings)


def _run(name: str) -> str:
    return quote(name, safe=":")
