"""Every route for every role; and none of them for nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serve_at_hand import AtHand, put_run

from strop.serve.api.access import Role, Tokens

LEAST: dict[tuple[str, str], Role | None] = {
    ("GET", "/health"): None,
    ("GET", "/openapi.json"): Role.viewer,
    ("GET", "/api/v1/me"): Role.viewer,
    ("GET", "/api/v1/audit"): Role.admin,
    ("POST", "/api/v1/jobs"): Role.operator,
    ("GET", "/api/v1/jobs"): Role.viewer,
    ("GET", "/api/v1/jobs/{job}"): Role.viewer,
    ("GET", "/api/v1/jobs/{job}/recipe"): Role.viewer,
    ("GET", "/api/v1/jobs/{job}/log"): Role.viewer,
    ("GET", "/api/v1/jobs/{job}/events"): Role.viewer,
    ("POST", "/api/v1/jobs/{job}/pause"): Role.operator,
    ("POST", "/api/v1/jobs/{job}/resume"): Role.operator,
    ("POST", "/api/v1/jobs/{job}/stop"): Role.operator,
    ("GET", "/api/v1/runs"): Role.viewer,
    ("GET", "/api/v1/runs/{run}"): Role.viewer,
    ("GET", "/api/v1/runs/{run}/metrics"): Role.viewer,
    ("GET", "/api/v1/runs/{run}/load"): Role.viewer,
    ("GET", "/api/v1/runs/{run}/report"): Role.viewer,
    ("GET", "/api/v1/runs/{run}/files"): Role.viewer,
    ("GET", "/api/v1/runs/{run}/files/{path}"): Role.viewer,
    ("GET", "/api/v1/models"): Role.viewer,
    ("POST", "/api/v1/models"): Role.operator,
    ("GET", "/api/v1/models/{name}/{version}"): Role.viewer,
    ("GET", "/api/v1/models/{name}/{version}/card"): Role.viewer,
    ("GET", "/api/v1/models/{name}/{version}/manifest"): Role.viewer,
    ("POST", "/api/v1/models/{name}/{version}/stage"): Role.admin,
    ("GET", "/v1/models"): Role.viewer,
    ("POST", "/v1/chat/completions"): Role.operator,
    ("POST", "/v1/completions"): Role.operator,
}
"""The least role of each route: written here a second time, so that a route which asks for less is noticed."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "nothing", "messages": [{"role": "user", "content": "1+1="}]},
    "/v1/completions": {"model": "nothing", "prompt": "1+1="},
    "/api/v1/models": {"run": "done", "name": "sums"},
    "/api/v1/models/{name}/{version}/stage": {"stage": "approved"},
}
WHO = [None, *Role]


def routes(there: AtHand) -> set[tuple[str, str]]:
    """What the service answers: the routes of its OpenAPI document, and the document."""
    document = there.service.app.openapi()
    found = {(method.upper(), path) for path, ways in document["paths"].items() for method in ways}
    return {*found, ("GET", "/openapi.json")}


def test_every_route_is_in_the_matrix(there: AtHand) -> None:
    assert routes(there) == set(LEAST)


@pytest.mark.parametrize("who", WHO, ids=lambda who: who or "anonymous")
@pytest.mark.parametrize(("method", "path"), LEAST, ids=lambda part: part.strip("/").replace("/", "."))
def test_a_route_is_for_its_roles(
    at_hand: Callable[..., AtHand], quickstart: str, method: str, path: str, who: Role | None
) -> None:
    there = at_hand()
    put_run(there.root)
    # A job of each caller's own: what is asked here is the role, not the owner.
    caller = there.anonymous if who is None else getattr(there, who.value)
    owner = caller if who in (Role.operator, Role.admin) else there.admin
    made = owner("POST", "/api/v1/jobs", json={"recipe": quickstart})
    assert made.status_code == 201, made.text
    job = made.json()["id"]
    if path.endswith("/resume"):
        assert there.admin("POST", f"/api/v1/jobs/{job}/pause").status_code == 200
    if path.endswith("/events"):
        # A stream ends with its job.
        assert there.admin("POST", f"/api/v1/jobs/{job}/stop").status_code == 200
    if "{version}" in path:
        there.service.registry().add(there.root / "done", "sums", checkpoint="step-000003", by="me")
    before = there.service.jobs.store.newest(), there.service.registry().list()
    where = path.format(job=job, run="done", path="metrics.jsonl", name="sums", version=1)
    body = BODIES.get(path) or ({"recipe": quickstart, "name": "another"} if path.endswith("/jobs") else None)
    answer = caller(method, where, **({"json": body} if method == "POST" and body else {}))
    least = LEAST[method, path]
    if least is None or (who is not None and who.covers(least)):
        # Sampling comes as far as looking for the model.
        assert answer.status_code in ((404,) if path.startswith("/v1/c") else (200, 201)), answer.text
        return
    assert answer.status_code == (401 if who is None else 403)
    assert set(answer.json()) == {"what", "where", "mend"}
    assert (there.service.jobs.store.newest(), there.service.registry().list()) == before
    last = there.audit()[-1]
    assert (last["outcome"], last["status"], last["request"]) == ("refused", answer.status_code, f"{method} {where}")
    assert last["actor"] == ("anonymous" if who is None else f"the-{who}")


def test_operators_steer_their_own_jobs_and_admins_all(there: AtHand, quickstart: str) -> None:
    made = there.admin("POST", "/api/v1/jobs", json={"recipe": quickstart}).json()
    for verb in ("pause", "resume", "stop"):
        answer = there.operator("POST", f"/api/v1/jobs/{made['id']}/{verb}")
        assert answer.status_code == 403
        assert "the-admin's" in answer.json()["what"]
    assert there.admin("GET", f"/api/v1/jobs/{made['id']}").json()["state"] == "queued"
    own = there.operator("POST", "/api/v1/jobs", json={"recipe": quickstart}).json()
    assert there.operator("POST", f"/api/v1/jobs/{own['id']}/stop").json()["state"] == "stopped"
    assert there.admin("POST", f"/api/v1/jobs/{own['id']}/resume").json()["state"] == "queued"


def test_a_token_is_kept_as_a_hash_and_refused_once_revoked_or_expired(
    there: AtHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = there.tokens[Role.viewer]
    # It may have a dash itself.
    secret = token.split("-", 2)[2]
    for file in (there.root / ".service").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file
        assert file.stat().st_mode & 0o077 == 0, f"{file} can be read by others"
    assert there.viewer("GET", "/api/v1/me").json() == {
        "name": "the-viewer",
        "role": "viewer",
        "token": token.split("-")[1],
    }
    # Revoked by another process, as `strop serve token revoke` is.
    elsewhere = Tokens(there.root / ".service")
    elsewhere.revoke(token.split("-")[1])
    assert there.viewer("GET", "/api/v1/me").status_code == 401
    short = elsewhere.add("guest", Role.viewer, days=1)
    elsewhere.close()
    headers = {"Authorization": f"Bearer {short}"}
    assert there.anonymous("GET", "/api/v1/me", headers=headers).status_code == 200
    import strop.serve.api.access as access

    now = access.time.time()
    monkeypatch.setattr(access.time, "time", lambda: now + 86401)
    assert there.anonymous("GET", "/api/v1/me", headers=headers).status_code == 401
