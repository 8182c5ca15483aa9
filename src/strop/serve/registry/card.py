"""A model card, written from what was recorded and measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from strop.tracking.text import one_line, show_metric


def card(version: dict[str, Any]) -> str:
    """The card of a version in Markdown, with the front matter that the Hub reads.

    Args:
        version: as the registry keeps it: name, version, stage, registered, by, scores, before, lineage.
    """
    return "\n".join(_lines(version)) + "\n"


def _lines(version: dict[str, Any]) -> Iterator[str]:
    made = version["lineage"]
    yield "---"
    yield f"model_name: {version['name']}"
    yield "library_name: transformers"
    yield "tags: [strop]"
    yield "---"
    yield ""
    yield f"# {version['name']}, version {version['version']}"
    yield ""
    yield f"Stage: {version['stage']}. Registered {version['registered']} by {_code(version['by'])}."
    yield ""
    yield "## Scores"
    yield ""
    if version["scores"]:
        yield f"Measured on held-out data with the weights of this checkpoint ({_code(made['checkpoint'])})."
        yield ""
        yield "| score | this model | before training |"
        yield "|---|---|---|"
        for name, value in version["scores"].items():
            before = version["before"].get(name)
            shown = "" if before is None else show_metric(name, before)
            yield f"| {_code(name)} | {show_metric(name, value)} | {shown} |"
    else:
        yield "Nothing was measured with the weights of this checkpoint."
    yield ""
    yield "## Made of"
    yield ""
    yield from _made_of(made, "")
    yield ""
    yield "## Files"
    yield ""
    yield f"Signed by {_code(version['public_key'])}; SHA-256 of the manifest {_code(version['manifest_sha256'])}."


def _made_of(made: dict[str, Any], indent: str) -> Iterator[str]:
    yield f"{indent}- run {_code(made['name'])}, id {_code(made['run'])}, checkpoint {_code(made['checkpoint'])}"
    yield f"{indent}- configuration {_code(made['config_hash'])}"
    for what in ("data", "model", "seeds", "versions"):
        for key, value in (made.get(what) or {}).items():
            yield f"{indent}- {what}, {_plain(key)}: {_code(value)}"
    git = made.get("git") or {}
    if git:
        yield f"{indent}- commit {_code(git.get('commit'))}{' with changes' if git.get('dirty') else ''}"
    for given in made["inputs"]:
        path, fingerprint = _code(given["path"]), _code(given["fingerprint"])
        yield f"{indent}- {_plain(given['key'])}: {path}, fingerprint {fingerprint}"
        if given.get("made_of"):
            yield from _made_of(given["made_of"], f"{indent}  ")


def _code(value: Any) -> str:
    """A value that no reader of Markdown takes for anything else."""
    text = one_line(str(value), 200).replace("`", "'").replace("|", "/")
    return f"`{text}`"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", text)
