"""A sandbox service: the same jobs and results over HTTP, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sandboxes import TIGHT

from strop.config.sandbox import SandboxSettings
from strop.errors import UserError
from strop.sandbox import remote
from strop.sandbox.build import make_sandbox
from strop.sandbox.calls import call_input, check_input, checked, value_of
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, Sandbox, SandboxError, SandboxResult
from strop.sandbox.server import Service


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def service(pool: Pool) -> Iterator[str]:
    with served(Service(("127.0.0.1", 0), pool, highest=TIGHT)) as url:
        yield url


def client(url: str, **given: object) -> Sandbox:
    return make_sandbox(SandboxSettings.model_validate({"backend": "auto", "url": url, **given}))


def run(sandbox: Sandbox, job: Job) -> SandboxResult:
    return asyncio.run(sandbox.run(job))


def test_a_job_has_the_same_result_there(service: str, pool: Pool) -> None:
    sandbox = client(service)
    assert sandbox.name == "remote"
    source = "import sys\nprint(open('f.bin', 'rb').read(), input())\nsys.stderr.write('é')\nsys.exit(2)"
    job = Job("script", source, inputs=("ä", "b"), files={"f.bin": b"\x00\xff"}, limits=TIGHT)
    there, here = run(sandbox, job), pool.submit(job).result()
    assert [(r.ended, r.code, r.stdout, r.stderr) for r in there.runs] == [
        (r.ended, r.code, r.stdout, r.stderr) for r in here.runs
    ]
    assert there.runs[0].stdout == "b'\\x00\\xff' ä\n"


def test_calls_and_checks_work_there(service: str) -> None:
    sandbox = client(service)
    source = "def f(x): return (x, {x})"
    called = run(sandbox, Job("call", source, inputs=(call_input("f", [2]),), limits=TIGHT))
    assert value_of(called.runs[0].value) == (2, {2})
    tests = (check_input("assert f(1) == (1, {1})"), check_input("assert f(1) == 2"))
    partner = Job("serve", source, inputs=("", ""), limits=TIGHT)
    result = run(sandbox, Job("check", inputs=tests, limits=TIGHT, partner=partner))
    assert [checked(one.value).passed for one in result.runs] == [True, False]
    assert [one.ended for one in result.partner] == ["ok", "ok"]


def test_many_jobs_go_there_at_once(service: str) -> None:
    sandbox = client(service, workers=4)

    async def all_of_them() -> list[SandboxResult]:
        jobs = [Job("script", f"print({n})", limits=TIGHT) for n in range(12)]
        return await asyncio.gather(*(sandbox.run(job) for job in jobs))

    assert [result.runs[0].stdout for result in asyncio.run(all_of_them())] == [f"{n}\n" for n in range(12)]


def test_limits_above_those_of_the_service_are_refused(service: str) -> None:
    job = Job("script", "", limits=TIGHT.model_copy(update={"memory_mib": 4096}))
    with pytest.raises(SandboxError, match="memory_mib is 4096, and this service allows 256"):
        run(client(service), job)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/run", b"{", 400),
        ("/run", b"[]", 400),
        ("/run", b'{"mode": "script", "files": {"../x": ""}}', 400),
        ("/run", b'{"mode": "script", "limits": {"cpu_seconds": -1}}', 400),
        ("/run", b'{"mode": "script", "surprise": 1}', 400),
        ("/run", b"", 413),
        ("/other", b"{}", 404),
    ],
)
def test_what_is_no_job_is_refused(service: str, path: str, body: bytes, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(service + path, data=body, method="POST"), timeout=10)
    assert caught.value.code == status
    assert "error" in json.loads(caught.value.read())


def test_a_token_is_asked_for(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "sesame")
    monkeypatch.setenv("WRONG", "barley")
    with served(Service(("127.0.0.1", 0), pool, highest=TIGHT, token="sesame")) as url:
        for variable in (None, "WRONG"):
            with pytest.raises(UserError, match="401: the access token is missing or wrong"):
                client(url, token_variable=variable)
        sandbox = client(url, token_variable="RIGHT")
        assert run(sandbox, Job("script", "print(1)", limits=TIGHT)).runs[0].stdout == "1\n"
    with pytest.raises(UserError, match="NOT_THERE is not set"):
        client(url, token_variable="NOT_THERE")


def test_an_address_where_nobody_answers_is_told_at_once() -> None:
    with pytest.raises(UserError, match="does not answer") as caught:
        client("http://127.0.0.1:9")
    assert caught.value.where == "sandbox.url"
    with pytest.raises(UserError, match="not the address of a service"):
        client("10.0.0.1:80")
    with pytest.raises(UserError, match="no address is given"):
        make_sandbox(SandboxSettings(backend="remote"))


@contextmanager
def answering(answer: Callable[[int], tuple[int, Any]]) -> Iterator[tuple[str, list[int]]]:
    """A service that gives an answer for the n-th job."""
    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"service": "strop-sandbox"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(len(asked))
            self._send(*answer(asked[-1]))

        def _send(self, status: int, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, asked


def test_a_busy_service_is_asked_again_and_a_failed_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    good = SandboxResult(runs=()).to_json()
    with answering(lambda n: (503, {"error": "busy"}) if n < 2 else (200, good)) as (url, asked):
        assert run(client(url), Job("script")) == SandboxResult(runs=())
        assert len(asked) == 3
    with answering(lambda n: (503, {"error": "busy"})) as (url, asked):
        with pytest.raises(SandboxError, match="busy"):
            run(client(url), Job("script"))
        assert len(asked) == remote.ATTEMPTS
    with answering(lambda n: (500, {"error": "the sandbox failed: no memory"})) as (url, asked):
        with pytest.raises(SandboxError, match="no memory"):
            run(client(url), Job("script"))
        assert len(asked) == 1


@pytest.mark.parametrize("answer", [[], {}, {"runs": [{"ended": "ok", "odd": 1}]}, {"runs": 5}, "text"])
def test_an_answer_that_is_no_result_is_an_error_of_the_sandbox(answer: Any) -> None:
    with answering(lambda n: (200, answer)) as (url, _), pytest.raises(SandboxError, match="no result"):
        run(client(url), Job("script"))


def test_the_server_is_a_command(pool: Pool) -> None:
    command = [sys.executable, "-m", "strop.sandbox.server", "--port", "0", "--workers", "1", "--memory-mib", "128"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TOKEN": "x"}) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert found is not None
            job = Job("script", "print(6 * 7)", limits=TIGHT.model_copy(update={"memory_mib": 128}))
            assert run(client(found[0]), job).runs[0].stdout == "42\n"
            with pytest.raises(SandboxError, match="this service allows 128"):
                run(client(found[0]), Job("script", limits=TIGHT))
        finally:
            process.terminate()
    # Anybody could reach it, and nothing would ask who they are.
    open_to_all = subprocess.run(
        [*command, "--host", "0.0.0.0"], capture_output=True, text=True, check=False, timeout=60
    )
    assert open_to_all.returncode == 2
    assert "--token-variable" in open_to_all.stderr
    assert pool.name == "bubblewrap"
