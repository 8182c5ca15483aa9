"""Whatever is asked along the OpenAPI document, or past it: no answer is an error of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from serve_at_hand import AtHand, put_run
from test_service_roles import LEAST

from strop.serve.api.access import Role

OPERATIONS = [(method, path) for method, path in LEAST if path != "/openapi.json"]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtHand]:
    there = AtHand(tmp_path_factory.mktemp("described") / "runs")
    put_run(there.root)
    yield there
    there.close()


@pytest.fixture(scope="module")
def document(described: AtHand) -> Any:
    return schemathesis.openapi.from_asgi(
        "/openapi.json", described.service.app, headers=headers(described, Role.admin)
    )


def headers(there: AtHand, role: Role) -> dict[str, str]:
    return {"Authorization": f"Bearer {there.tokens[role]}", "Host": "localhost"}


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: part.strip("/").replace("/", "."))
def test_no_answer_is_an_error_of_the_service(
    described: AtHand, document: Any, method: str, path: str, mode: Any
) -> None:
    asked = 0

    @hypothesis.settings(
        max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @hypothesis.given(case=document[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal asked
        for role in (Role.admin, Role.viewer):
            if role is Role.viewer:
                # And where there is something.
                case.path_parameters.update({"run": "done"} if "{run}" in path else {})
            answer = case.call(headers=headers(described, role))
            case.validate_response(answer, checks=[not_a_server_error])
            assert answer.status_code < 500, answer.text
            asked += 1

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:
        # A route without anything to fill in has nothing that could be wrong.
        assert mode is GenerationMode.NEGATIVE
        assert "{" not in path
        return
    assert asked
    assert described.audit() is not None


def test_the_document_says_what_each_route_needs(described: AtHand) -> None:
    document = described.service.app.openapi()
    for path, ways in document["paths"].items():
        for way in ways.values():
            if path == "/health":
                assert "security" not in way
                continue
            assert way["x-role"] in set(Role)
            assert way["security"] == [{"HTTPBearer": []}]
            assert {"401", "403", "404", "422", "429"} <= set(way["responses"])
            assert way.get("description") or way.get("summary")


def test_the_state_is_the_services_own(described: AtHand) -> None:
    state = described.root / ".service"
    assert state.stat().st_mode & 0o777 == 0o700
    assert Path(state / "access.db").stat().st_mode & 0o777 == 0o600
