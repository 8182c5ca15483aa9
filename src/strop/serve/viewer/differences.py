"""Where the recipes of runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT = object()
MOST_KEYS = 20_000
"""Keys of a recipe that are looked at; one with more was not written by strop."""


def flat(values: Any) -> dict[str, Any]:
    """Dotted keys of nested mappings and lists; an empty one is a value of its own."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting and len(found) < MOST_KEYS:
        key, value = waiting.pop()
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        children = [(f"{key}.{name}" if key else str(name), one) for name, one in inner]
        if children:
            waiting += reversed(children)
        elif key:
            found[key] = value
    return found


def differences(recipes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Keys that are not the same in all recipes, in the order in which they come.

    Args:
        recipes: name of a run -> what its config.yaml says.

    Returns:
        `key`, `values` by run, and `absent`: the runs that do not have it.
    """
    each = {name: flat(recipe) for name, recipe in recipes.items()}
    keys = list(dict.fromkeys(key for values in each.values() for key in values))
    found = []
    for key in keys:
        values = {name: recipe.get(key, ABSENT) for name, recipe in each.items()}
        told = [value for value in values.values() if value is not ABSENT]
        # `repr`: 1 and 1.0 and True are equal to Python, and not the same in a recipe.
        if len(told) < len(values) or len({repr(value) for value in told}) > 1:
            found.append(
                {
                    "key": key,
                    "values": {name: value for name, value in values.items() if value is not ABSENT},
                    "absent": [name for name, value in values.items() if value is ABSENT],
                }
            )
    return found
