"""What somebody hostile sends: refused, nothing changed, nothing told, and written to the audit log."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_at_hand import AtHand, put_run

from strop.serve.api.access import Role
from strop.serve.api.settings import Limits

CANARY = "the-canary-sings"
BASE = """\
model: {path: smollm2-135m}
data: {train: {path: "strop.data.arithmetic:problems", arguments: {count: 10}}}
rewards: {verifiers: [{kind: exact}]}
"""


def recipe(change: str = "", **sections: Any) -> str:
    """A recipe that an operator may submit, but for what is changed."""
    return yaml.safe_dump({**yaml.safe_load(BASE), **sections}) + change


def data(path: str, **more: Any) -> dict[str, Any]:
    return {"train": {"path": path, **more}}


def verifier(**settings: Any) -> dict[str, Any]:
    return {"verifiers": [settings]}


DATA: dict[str, Any] = yaml.safe_load(BASE)["data"]
CODE = verifier(kind="code")
RECIPES: dict[str, tuple[str, list[str]]] = {
    # Python of the caller's choice.
    "a verifier that is a Python function": (recipe(rewards=verifier(kind="python", function="os:system")), []),
    "the same by an override": (recipe(), ['rewards.verifiers=[{kind: python, function: "os:system"}]']),
    "data from a Python function": (recipe(data=data("subprocess:getoutput", arguments={"cmd": "id"})), []),
    "the same named as Python": (recipe(data=data("subprocess:getoutput", format="python")), []),
    "data from an attribute of a listed module": (recipe(data=data("strop.data.arithmetic:np.os")), []),
    "an environment that is a Python class": (recipe(environment={"kind": "python", "factory": "os:system"}), []),
    "self-play by a Python class": (recipe(environment={"kind": "self_play", "factory": "os:system"}), []),
    "an environment of Gymnasium by module": (
        recipe(environment={"kind": "gymnasium", "id": "evil.module:Env-v0", "actions": ["a", "b"]}),
        [],
    ),
    "a generate function of slime's form": (recipe(environment={"kind": "slime", "generate": "os:system"}), []),
    "a reward of slime's form": (recipe(rewards=verifier(kind="slime", function="os:system")), []),
    "an algorithm that is a Python class": (recipe(algorithm={"name": "os:system"}), []),
    "an order of the window that is a Python function": (
        recipe(rollout={"max_staleness": 2, "window": {"order": "os:system"}}),
        [],
    ),
    "a choice of past groups that is a Python function": (
        recipe(rollout={"window": {"past": {"groups": 1, "select": "os:system"}}}),
        [],
    ),
    "a tool that is a Python function": (
        recipe(environment={"kind": "tools", "tools": [{"kind": "function", "path": "os:system"}]}),
        [],
    ),
    "a taskset of verifiers": (recipe(data=data("verifiers:evil")), []),
    "a model whose folder has code": (recipe(model={"path": "smollm2-135m", "trust_remote_code": True}), []),
    "that by an override": (recipe(), ["model.trust_remote_code=true"]),
    # Programs.
    "a command line of an MCP server": (
        recipe(environment={"kind": "tools", "tools": [{"kind": "mcp", "command": ["sh", "-c", "id"]}]}),
        [],
    ),
    "programs of the model without a sandbox": (
        recipe(rewards=CODE, sandbox={"backend": "none", "allow_unsandboxed": True}),
        [],
    ),
    "an interpreter of the caller's": (recipe(rewards=CODE, sandbox={"python": "/bin/sh"}), []),
    # Addresses that the service would call (SSRF).
    "a reward service": (recipe(rewards=verifier(kind="http", url="http://169.254.169.254/latest/meta-data")), []),
    "a judge": (
        recipe(rewards=verifier(kind="judge", base_url="http://127.0.0.1:22", model="m", rubric="r {completion}")),
        [],
    ),
    "a sandbox service": (recipe(rewards=CODE, sandbox={"url": "http://10.0.0.1:80"}), []),
    "an MCP server by address": (
        recipe(environment={"kind": "tools", "tools": [{"kind": "mcp", "url": "http://127.0.0.1:6379"}]}),
        [],
    ),
    "an OpenEnv server": (recipe(environment={"kind": "openenv", "url": "http://127.0.0.1:9"}), []),
    "engines elsewhere": (
        recipe(rollout={"engine": {"kind": "openai", "server": {"urls": ["http://127.0.0.1:1"], "model": "m"}}}),
        [],
    ),
    "a tracker elsewhere": (recipe(), ["tracking.mlflow_uri=http://127.0.0.1:1"]),
    "a project on Weights & Biases": (recipe(), ["tracking.wandb_project=theirs"]),
    "a Ray cluster": (recipe(), ["cluster.kind=ray", "cluster.address=10.0.0.1:6379"]),
    # Files.
    "a run outside of the root": (recipe(run={"folder": "/tmp/elsewhere"}), []),
    "the same by dots": (recipe(), ["run.folder=runs/../../elsewhere"]),
    "data outside of the root": (recipe(data=data("/etc/passwd")), []),
    "data by dots": (recipe(data=data("../secret.jsonl")), []),
    "data through a link": (recipe(data=data("link.jsonl")), []),
    "data through a linked folder": (recipe(data=data("folder/secret.jsonl")), []),
    "the service's own files": (recipe(data=data(".service/audit.jsonl")), []),
    "a home folder": (recipe(data=data("~/data.jsonl")), []),
    "a file by an address": (recipe(data=data("file:///etc/passwd")), []),
    "a model outside of the root": (recipe(model={"path": "/"}), []),
    "a model on the Hub": (recipe(model={"path": "evil/model"}), []),
    "data on the Hub": (recipe(data=data("evil/data")), []),
    "what a teacher said, outside of the root": (
        yaml.safe_dump(
            {
                "model": {"path": "smollm2-135m"},
                "data": DATA,
                "supervised": {"method": "distillation", "targets": "/etc/passwd"},
            }
        ),
        [],
    ),
    "files of the service to extend": (recipe("extends: /etc/passwd\n"), []),
    "a stage that extends files": ("stages: {a: {extends: /etc/passwd}}\n", []),
}
UNREADABLE: dict[str, tuple[str, list[str]]] = {
    "a name that is hidden": (recipe(run={"name": "..."}), []),
    "a bomb of aliases": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        [],
    ),
    "a bomb of merges": (
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b} {{p: *{a}, q: *{a}, r: *{a}, s: *{a}}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        [],
    ),
    "an alias of itself": ("a: &a [*a]\n", []),
    "a deep nest": ("a: " + "[" * 100_000, []),
    "a tag that makes objects": ('a: !!python/object/apply:os.system ["id"]\n', []),
    "a bomb in an override": (recipe(), ["data.train.arguments={a: " + "[" * 2000]),
    "no YAML": ("\0\x01", []),
    "half a character": (recipe("# \ud800\n"), []),
    "half a character in a key": (recipe(), ["run.\ud800=1"]),
}


@pytest.fixture
def attacked(at_hand: Callable[..., AtHand], tmp_path: Path) -> AtHand:
    """A service with a run, whose folder somebody has put links into that lead out of it."""
    there = at_hand()
    run = put_run(there.root)
    (tmp_path / "secret.jsonl").write_text(json.dumps({"prompt": CANARY, "answer": CANARY}) + "\n")
    (there.root / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (there.root / "folder").symlink_to(tmp_path)
    (there.root / "linked").symlink_to(run)
    (run / "checkpoints" / "link.json").symlink_to(tmp_path / "secret.jsonl")
    (run / "checkpoints" / "out").symlink_to(tmp_path)
    (run / "episodes" / ".hidden").write_text(CANARY)
    (run / "notes.txt").write_text(CANARY)
    os.mkfifo(run / "checkpoints" / "pipe")
    return there


def refused(there: AtHand, answer: Any, *statuses: int, lines: int) -> None:
    """That an answer is a refusal, tells nothing, and is the last line of the audit log."""
    assert answer.status_code in statuses, f"{answer.status_code}: {answer.text[:300]}"
    assert CANARY not in answer.text
    assert "root:" not in answer.text
    found = there.audit()
    assert len(found) > lines, "nothing was written to the audit log"
    assert (found[-1]["outcome"], found[-1]["status"]) == ("refused", answer.status_code)


@pytest.mark.parametrize("what", [*RECIPES, *UNREADABLE])
def test_a_recipe_of_an_operator_is_refused(attacked: AtHand, what: str) -> None:
    text, overrides = {**RECIPES, **UNREADABLE}[what]
    lines = len(attacked.audit())
    body = json.dumps({"recipe": text, "overrides": overrides})
    began = time.monotonic()
    answer = attacked.operator("POST", "/api/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert time.monotonic() - began < 10
    refused(attacked, answer, 403 if what in RECIPES else 422, lines=lines)
    assert attacked.service.jobs.store.newest() == []
    assert list((attacked.root / ".service" / "jobs").iterdir()) == []
    assert attacked.audit()[-1]["actor"] == "the-operator"


def test_what_the_hostile_recipes_are_made_of_is_taken(attacked: AtHand) -> None:
    """Else they would be refused for another reason."""
    (attacked.root / "mine.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    for text, overrides in [
        (recipe(), []),
        (recipe(data=data("mine.jsonl")), []),
        (recipe(rewards=CODE), []),
        (recipe(run={"folder": "runs"}), []),
        (recipe(model={"path": "done"}), ["run.steps=3"]),
        (recipe(environment={"kind": "tools", "tools": [{"kind": "calculator"}]}), []),
    ]:
        answer = attacked.operator("POST", "/api/v1/jobs", json={"recipe": text, "overrides": overrides})
        assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    "what",
    [
        "a verifier that is a Python function",
        "data from a Python function",
        "a model whose folder has code",
        "a command line of an MCP server",
        "a reward service",
    ],
)
def test_an_administrator_may_submit_it(attacked: AtHand, what: str) -> None:
    text, overrides = RECIPES[what]
    answer = attacked.admin("POST", "/api/v1/jobs", json={"recipe": text, "overrides": overrides})
    assert answer.status_code == 201, answer.text


def test_not_even_an_administrator_has_runs_elsewhere(attacked: AtHand) -> None:
    lines = len(attacked.audit())
    answer = attacked.admin("POST", "/api/v1/jobs", json={"recipe": recipe(run={"folder": "/tmp/elsewhere"})})
    refused(attacked, answer, 403, lines=lines)


FILES = [
    "../../secret.jsonl",
    "..%2f..%2fsecret.jsonl",
    "%2e%2e/%2e%2e/secret.jsonl",
    "checkpoints/../../../secret.jsonl",
    "checkpoints/%2e%2e/%2e%2e/%2e%2e/secret.jsonl",
    "checkpoints%2f..%2f..%2f..%2fsecret.jsonl",
    "checkpoints\\..\\..\\secret.jsonl",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "checkpoints//latest",
    "checkpoints/link.json",
    "checkpoints/out/secret.jsonl",
    "checkpoints/pipe",
    "checkpoints",
    "episodes/.hidden",
    "notes.txt",
    "run.lock",
    "metrics.jsonl%00.txt",
    "checkpoints/latest%0d%0aX-Evil: 1",
    "checkpoints/" + "a" * 300,
    "checkpoints/" + "a/" * 200,
]


@pytest.mark.parametrize("path", FILES)
def test_a_path_that_leads_elsewhere_is_refused(attacked: AtHand, path: str) -> None:
    lines = len(attacked.audit())
    answer = attacked.viewer("GET", f"/api/v1/runs/done/files/{path}")
    refused(attacked, answer, 404, 422, lines=lines)
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize(
    "run",
    ["..", "%2e%2e", ".service", "linked", "folder", "done:..", "done%2f..", ":", "a:b:c", "done%00", "%0d%0aX: 1"],
)
@pytest.mark.parametrize("rest", ["", "/metrics", "/files", "/files/run.json"])
def test_a_run_that_is_none_is_refused(attacked: AtHand, run: str, rest: str) -> None:
    lines = len(attacked.audit())
    refused(attacked, attacked.viewer("GET", f"/api/v1/runs/{run}{rest}"), 404, lines=lines)


def test_lists_show_nothing_that_leads_elsewhere(attacked: AtHand) -> None:
    assert [run["name"] for run in attacked.viewer("GET", "/api/v1/runs").json()] == ["done"]
    listed = {file["path"] for file in attacked.viewer("GET", "/api/v1/runs/done/files").json()}
    assert listed == {
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "checkpoints/latest",
        "checkpoints/step-000003/model/config.json",
        "checkpoints/step-000003/model/model.safetensors",
        "episodes/step-000001.parquet",
    }


BODIES: dict[str, tuple[int, dict[str, Any]]] = {
    "a key that is not known, an address to call back": (
        422,
        {"json": {"recipe": BASE, "callback": "http://169.254.169.254/"}},
    ),
    "a folder for the run": (422, {"json": {"recipe": BASE, "run_dir": "/etc"}}),
    "a role of one's own": (422, {"json": {"recipe": BASE, "role": "admin"}}),
    "a name that climbs": (422, {"json": {"recipe": BASE, "name": "../x"}}),
    "a name with a line end": (422, {"json": {"recipe": BASE, "name": "x\n"}}),
    "a name with a header": (422, {"json": {"recipe": BASE, "name": "x\r\nSet-Cookie: a=b"}}),
    "a name that is a link": (409, {"json": {"recipe": BASE, "name": "linked"}}),
    "a name that is a run": (409, {"json": {"recipe": BASE, "name": "done"}}),
    "a backend that is a program": (422, {"json": {"recipe": BASE, "backend": "sh -c id"}}),
    "Ray where there is none": (422, {"json": {"recipe": BASE, "backend": "ray"}}),
    "a recipe that is too long": (422, {"json": {"recipe": "#" * (300 * 1024)}}),
    "too many overrides": (422, {"json": {"recipe": BASE, "overrides": ["a=1"] * 201}}),
    "an override that is too long": (422, {"json": {"recipe": BASE, "overrides": ["a=" + "1" * 5000]}}),
    "an override that is an option": (422, {"json": {"recipe": BASE, "overrides": ["--fresh"]}}),
    "a body that is too large": (413, {"content": b"x" * ((1 << 20) + 1)}),
    "one that comes in pieces": (413, {"content": iter([b"x" * 65536] * 20)}),
    "one that lies about its length": (413, {"content": b"{}", "headers": {"content-length": "99999999999"}}),
    "a length that is none": (413, {"content": b"{}", "headers": {"content-length": "-1"}}),
    "JSON that is deep": (422, {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}),
    "JSON that is none": (422, {"content": b"{", "headers": {"content-type": "application/json"}}),
    "a form": (422, {"data": {"recipe": BASE}}),
    "numbers that are none": (422, {"content": b'{"recipe": NaN}', "headers": {"content-type": "application/json"}}),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_body_is_refused(attacked: AtHand, what: str) -> None:
    status, body = BODIES[what]
    lines = len(attacked.audit())
    answer = attacked.operator("POST", "/api/v1/jobs", **body)
    refused(attacked, answer, status, *([400] if "JSON" in what else []), lines=lines)
    assert "set-cookie" not in answer.headers
    assert attacked.service.jobs.store.newest() == []


TOKENS = {
    "none": None,
    "empty": "",
    "Basic": "Basic dGhlLWFkbWluOg==",
    "no secret": "Bearer strop-{id}",
    "another's id": "Bearer strop-{id}-" + "A" * 43,
    "a secret cut off": "Bearer {token:.20}",
    "a secret with more": "Bearer {token}A",
    "a secret in capitals": "Bearer {upper}",
    "SQL": "Bearer strop-' OR 1=1 ---" + "A" * 43,
    "other digits": "Bearer strop-" + "１" * 12 + "-" + "A" * 43,
    "two in one": "Bearer {token}, Bearer {token}",
}


@pytest.mark.parametrize("what", TOKENS)
def test_a_token_that_is_none_is_refused(attacked: AtHand, what: str) -> None:
    token = attacked.tokens[Role.admin]
    given = TOKENS[what]
    headers: dict[str, Any] = {}
    if given is not None:
        head, _, secret = token.rpartition("-")
        text = (
            given.format(id=token.split("-")[1], upper=f"{head}-{secret.swapcase()}") if "{token" not in given else ""
        )
        text = text or given.replace("{token:.20}", token[:20]).replace("{token}", token)
        headers = {"Authorization": text.encode()}
    lines = len(attacked.audit())
    answer = attacked.anonymous("GET", "/api/v1/me", headers=headers)
    refused(attacked, answer, 401, lines=lines)
    assert attacked.audit()[-1]["actor"] == "anonymous"


def test_two_tokens_at_once_are_none(attacked: AtHand) -> None:
    lines = len(attacked.audit())
    both = [("Authorization", f"Bearer {attacked.tokens[role]}") for role in (Role.viewer, Role.admin)]
    refused(attacked, attacked.client.get("/api/v1/me", headers=both), 401, lines=lines)


@pytest.mark.parametrize(
    "headers",
    [{"X-Role": "admin"}, {"X-Forwarded-User": "the-admin"}, {"X-HTTP-Method-Override": "GET"}, {"X-Caller": "admin"}],
)
def test_headers_give_no_role(attacked: AtHand, headers: dict[str, str]) -> None:
    lines = len(attacked.audit())
    refused(attacked, attacked.viewer("GET", "/api/v1/audit", headers=headers), 403, lines=lines)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "localhost@evil.example", "", "0"])
def test_another_name_is_refused(attacked: AtHand, host: str) -> None:
    """A page that a browser loaded from elsewhere calls the service by the name it was loaded from."""
    lines = len(attacked.audit())
    refused(attacked, attacked.viewer("GET", "/api/v1/me", headers={"Host": host}), 421, 400, lines=lines)


def test_guessing_of_tokens_is_slowed(at_hand: Callable[..., AtHand]) -> None:
    there = at_hand(limits=Limits(failures=5))
    found = [there.anonymous("GET", "/api/v1/me", headers={"Authorization": f"Bearer {i}"}) for i in range(8)]
    assert [answer.status_code for answer in found] == [401] * 5 + [429] * 3
    # Whoever guesses cannot tell whether the next one would have been right.
    answer = there.viewer("GET", "/api/v1/me")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
    assert {line["status"] for line in there.audit()} == {401, 429}


def test_one_caller_cannot_take_all(at_hand: Callable[..., AtHand]) -> None:
    there = at_hand(limits=Limits(rate=0.001, burst=3))
    assert [there.viewer("GET", "/api/v1/me").status_code for _ in range(5)] == [200] * 3 + [429] * 2
    assert there.operator("GET", "/api/v1/me").status_code == 200
    assert there.audit()[-1]["status"] == 429


@pytest.fixture
def listening(attacked: AtHand) -> Iterator[tuple[AtHand, int]]:
    """The same service on a socket, for what no client library sends."""
    import uvicorn

    config = uvicorn.Config(attacked.service.app, port=0, log_level="critical", http="h11", lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        yield attacked, taken.getsockname()[1]
        server.should_exit = True
        thread.join()


def raw(port: int, head: str, body: bytes = b"") -> bytes:
    """What is answered to bytes as they are."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode("latin-1") + body)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_raw_requests_are_refused(listening: tuple[AtHand, int]) -> None:
    there, port = listening
    viewer = f"Host: localhost\r\nAuthorization: Bearer {there.tokens[Role.viewer]}\r\nConnection: close\r\n"
    traversals = [
        "/api/v1/runs/done/files/../../../../../../../../etc/passwd",
        "/api/v1/runs/../../../etc/passwd",
        "//etc/passwd",
        "/api/v1/runs/done/files/checkpoints/%252e%252e/%252e%252e/secret.jsonl",
    ]
    for path in traversals:
        lines = len(there.audit())
        answer = raw(port, f"GET {path} HTTP/1.1\r\n{viewer}\r\n")
        assert b" 404 " in answer.split(b"\r\n")[0], answer
        assert b"root:" not in answer
        assert CANARY.encode() not in answer
        assert len(there.audit()) == lines + 1
    # Two ways to say how long the body is: whatever is hidden in it must not be a request of its own.
    hidden = b"0\r\n\r\nGET /api/v1/audit HTTP/1.1\r\nHost: localhost\r\n\r\n"
    both = f"Content-Length: {len(hidden)}\r\nTransfer-Encoding: chunked\r\n"
    answer = raw(port, f"POST /api/v1/jobs HTTP/1.1\r\n{viewer}{both}\r\n", hidden)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith((b"HTTP/1.1 4",))
    # A header that ends early is another header, and that one is nothing to us.
    answer = raw(port, f"GET /api/v1/audit HTTP/1.1\r\n{viewer}X-A: b\r\nX-Role: admin\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403")
    # Headers without end.
    with pytest.raises(ConnectionError):
        raw(port, f"GET / HTTP/1.1\r\n{viewer}X: {'a' * 5_000_000}\r\n\r\n")


def test_a_body_that_does_not_come_is_not_waited_for(at_hand: Callable[..., AtHand]) -> None:
    import asyncio

    there = at_hand(limits=Limits(body_seconds=0.2))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def never() -> Any:
        await asyncio.sleep(60)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {there.tokens[Role.operator]}".encode())]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"10")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/jobs", "raw_path": b"/api/v1/jobs", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http", "root_path": ""}
    began = time.monotonic()
    asyncio.run(there.service.app(scope, never, send))
    assert time.monotonic() - began < 5
    assert sent[0]["status"] == 408
    assert there.audit()[-1]["status"] == 408
