"""JSON in a completion: found, read strictly, and held against a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from strop.errors import UserError
from strop.rewards.failures import shorten

_FENCE = re.compile(r"^```(?:json|JSON)?[^\S\n]*\n(.*?)^```[^\S\n]*$", re.MULTILINE | re.DOTALL)


class SchemaCheck:
    """Whether texts are JSON that fits a schema.

    Args:
        schema: of the draft that its `$schema` names, else of the newest. where: its key path, for messages.

    Raises:
        UserError: it is no schema, or refers to something outside of itself.
    """

    def __init__(self, schema: dict[str, Any], *, where: str) -> None:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        kind = validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            path = "".join(f".{part}" for part in error.absolute_path)
            raise UserError(
                f"this is no JSON schema: {shorten(error.message, 200)}",
                where=where + path,
                mend=f"mend it; the rules are those of {kind.META_SCHEMA.get('$id', 'JSON Schema')}",
            ) from None
        for reference in _references(schema):
            if not reference.startswith("#") or not _leads_somewhere(schema, reference):
                raise UserError(
                    f"the schema refers to {reference!r}, which is not in it",
                    where=where,
                    mend="put what it refers to under `$defs` and write `#/$defs/NAME`",
                )
        # An empty registry: a reference is never fetched.
        self._validator = kind(schema, registry=Registry())

    def problem(self, text: str) -> str:
        """What is wrong with a text; empty if it is JSON that fits."""
        try:
            error = next(self._validator.iter_errors(json.loads(text, parse_constant=_refuse)), None)
        except RecursionError:
            return "no JSON: it is nested too deeply"
        except ValueError as problem:
            return f"no JSON: {shorten(str(problem), 100)}"
        if error is None:
            return ""
        place = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"the JSON does not fit the schema{' at ' + place if place else ''}: {shorten(error.message, 150)}"


def json_text(completion: str) -> str:
    """What is to be JSON: the only fenced block of a completion, or all of it."""
    blocks = _FENCE.findall(completion)
    return str(blocks[0]) if len(blocks) == 1 else completion.strip()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _leads_somewhere(schema: Any, reference: str) -> bool:
    """Whether `#`, `#/a/b` or `#anchor` is in a schema."""
    if reference == "#":
        return True
    if not reference.startswith("#/"):
        return reference[1:] in _anchors(schema)
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return False
    return True


def _anchors(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for one in schema for name in _anchors(one)}
    if not isinstance(schema, dict):
        return set()
    own = {str(schema[key]) for key in ("$anchor", "$dynamicAnchor") if key in schema}
    return own | {name for value in schema.values() for name in _anchors(value)}
