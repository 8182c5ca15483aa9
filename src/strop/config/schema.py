"""The JSON schema of recipe files, for editors."""

from __future__ import annotations

from typing import Any

from strop.config import Config
from strop.config.pipeline import KEYS as PIPELINE_KEYS

PART = "Part"


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe, with the description and default of every key. With `stages` it is a pipeline.

    What a recipe or a section has to have may come from a file that it extends or from the defaults of a pipeline, so
    only a recipe that stands alone is asked for all of it.
    """
    whole = Config.model_json_schema()
    definitions = whole["$defs"]
    parts = {f"{name}{PART}": _part(definition) for name, definition in definitions.items()}
    extends = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Files that are read first; what is written here is merged over them.",
    }
    properties = {**_part(whole)["properties"], "extends": extends}
    stage = {"$ref": f"#/$defs/Stage{PART}"}
    of_pipeline: dict[str, Any] = {
        "name": {"type": ["string", "null"]},
        "defaults": {"anyOf": [stage, {"type": "null"}]},
        "stages": {"type": "object", "additionalProperties": {"anyOf": [stage, {"type": "null"}]}},
    }
    for name, entry in of_pipeline.items():
        entry["description"] = PIPELINE_KEYS[name]
    parts[f"Stage{PART}"] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "strop recipe",
        "description": whole["description"],
        "type": "object",
        "properties": {**properties, **of_pipeline},
        "additionalProperties": False,
        "if": {"required": ["stages"]},
        "then": {"propertyNames": {"enum": ["extends", *of_pipeline]}},
        "else": {
            "propertyNames": {"not": {"enum": list(of_pipeline)}},
            "if": {"required": ["extends"]},
            "else": {"required": whole["required"], "properties": whole["properties"]},
        },
        "$defs": {**definitions, **parts},
    }


def _part(node: Any) -> Any:
    """A schema of the same keys, none of which has to be there. Entries of lists stay whole: lists are not merged."""
    if isinstance(node, list):
        return [_part(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if key == "$ref":
            found[key] = f"{value}{PART}"
        elif key == "items":
            found[key] = value
        elif not (key == "required" and isinstance(value, list)):
            found[key] = _part(value)
    return found
