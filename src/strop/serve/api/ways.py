"""How a route is declared: with the role that it needs, and with who asks at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer

from strop.serve.api.access import Caller, Role
from strop.serve.api.gate import CALLER, NOTES, Refusal
from strop.serve.api.shapes import Problem

ROLE = "x-role"
"""Where the OpenAPI document says which role a route needs."""
_SCHEME = HTTPBearer(auto_error=False, description="A token that `strop serve token add` made.")
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "Not a request that can be read.",
        401: "No token, or one that is not accepted.",
        403: "The role of the token does not allow it.",
        404: "There is no such thing.",
        408: "The request took too long to arrive.",
        409: "It does not go with how things are.",
        413: "The request is too large.",
        422: "Something in the request is wrong; `where` says what.",
        429: "Too many requests; `Retry-After` says when to ask again.",
    }.items()
}


class Router(APIRouter):
    """Routes of which each names the role that it needs; one without cannot be declared."""

    def way(self, method: str, path: str, role: Role, **more: Any) -> Callable[[Any], Any]:
        """Declare a route."""
        extra = {**more.pop("openapi_extra", {}), ROLE: role.value}
        return self.api_route(
            path,
            methods=[method],
            dependencies=[Depends(_SCHEME), Depends(_needs(role))],
            openapi_extra=extra,
            responses={**PROBLEMS, **more.pop("responses", {})},
            **more,
        )


def _needs(role: Role) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        found = getattr(request.state, CALLER, None)
        if found is None:
            raise Refusal(401, "no token that is accepted")
        if not found.role.covers(role):
            raise Refusal(403, f"this needs the role {role.value}, and the token has {found.role.value}")

    return check


def _caller(request: Request) -> Caller:
    found: Caller = getattr(request.state, CALLER)
    return found


Asking = Annotated[Caller, Depends(_caller)]
"""Who asks, in the arguments of a route."""


def note(request: Request, action: str, target: str = "", **more: Any) -> None:
    """What the audit log is to say of a request."""
    getattr(request.state, NOTES).update({"action": action, "target": target, **more})
