"""Routes of the registry: versions of models, their cards and signed manifests; approving and retiring them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Path, Request
from fastapi.responses import PlainTextResponse, Response

from strop.errors import UserError
from strop.serve.api.access import Role
from strop.serve.api.confined import refuse_links
from strop.serve.api.gate import Refusal
from strop.serve.api.readings import Runs
from strop.serve.api.shapes import Move, Registration, VersionView
from strop.serve.api.ways import Asking, Router, note
from strop.serve.registry.signing import NotAsSigned
from strop.serve.registry.store import Registry, Stage, Version, checkpoint_named

Number = Annotated[int, Path(ge=1, le=1 << 31)]
_TEXT: dict[int | str, Any] = {
    200: {"content": {"text/markdown": {"schema": {"type": "string"}}}, "description": "It."}
}


def models_router(registry: Callable[[], Registry], runs: Runs) -> Router:
    """Routes below `/api/v1/models`. registry: opened when it is first asked for."""
    router = Router(prefix="/api/v1/models", tags=["models"])

    def found(name: str, version: int) -> Version:
        try:
            return registry().get(name, version)
        except UserError:
            raise Refusal(404, "there is no such version") from None

    @router.way("GET", "", Role.viewer)
    def versions() -> list[VersionView]:
        """All versions of all models."""
        return [VersionView(**version.plain()) for version in registry().list()]

    @router.way("POST", "", Role.operator, status_code=201)
    def register(asked: Registration, request: Request, caller: Asking) -> VersionView:
        """Keep the model of a checkpoint as the next version of a name, a candidate."""
        note(request, "registry.add", asked.name, run=asked.run, checkpoint=asked.checkpoint)
        parts = runs.parts(asked.run)
        refuse_links(runs.root, parts, ("run.json", "config.yaml", "metrics.jsonl", "checkpoints"))
        run = runs.root.joinpath(*parts)
        made = registry().add(run, asked.name, checkpoint=checkpoint_named(run, asked.checkpoint), by=caller.name)
        note(request, "registry.add", f"{made.name} {made.version}")
        return VersionView(**made.plain())

    @router.way("GET", "/{name}/{version}", Role.viewer)
    def one_version(name: str, version: Number) -> VersionView:
        """One version."""
        return VersionView(**found(name, version).plain())

    @router.way("GET", "/{name}/{version}/card", Role.viewer, responses=_TEXT, response_class=PlainTextResponse)
    def card(name: str, version: Number) -> Response:
        """The model card of a version, in Markdown."""
        found(name, version)
        return PlainTextResponse(registry().card(name, version), media_type="text/markdown")

    @router.way("GET", "/{name}/{version}/manifest", Role.viewer, response_class=Response)
    def manifest(name: str, version: Number) -> Response:
        """The list of a version's files, byte for byte as it was signed; the signature is a part of the version."""
        found(name, version)
        return Response(registry().manifest(name, version), media_type="application/json")

    @router.way("POST", "/{name}/{version}/stage", Role.admin)
    def move(name: str, version: Number, asked: Move, request: Request, caller: Asking) -> VersionView:
        """Approve a candidate, whose files are checked first, or retire a version."""
        note(request, "registry.move", f"{name} {version}", stage=asked.stage)
        found(name, version)
        try:
            moved = registry().move(name, version, Stage(asked.stage), by=caller.name)
        except NotAsSigned as error:
            raise Refusal(409, error.what) from None
        return VersionView(**moved.plain())

    return router
