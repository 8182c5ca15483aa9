"""Turns pydantic's errors into what a user reads: the key, the value, what it must be, and the mend."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, get_origin

from pydantic import ValidationError

from strop.config import Config
from strop.config import explain as keys
from strop.config.elsewhere import MENDS, mend_for
from strop.errors import UserError

Path = tuple[str | int, ...]
Locate = Callable[[Path], str]
"""Says where a key was written, such as `recipe.yaml, line 12`; empty when nobody knows."""


_UNKNOWN = ("extra_forbidden", "invalid_key")


def problems_of(error: ValidationError, data: Any, locate: Locate) -> list[UserError]:
    """All problems in a recipe, one for each key.

    Args:
        error: what pydantic found.
        data: the recipe that was validated, nested mappings.
        locate: says where a key was written.
    """
    found: dict[Path, UserError] = {}
    for detail in error.errors(include_url=False):
        path, annotation = _key_path(detail["loc"], unknown=detail["type"] in _UNKNOWN)
        if path not in found:
            found[path] = _problem(path, annotation, dict(detail), data, locate)
    return list(found.values())


def dotted(path: Sequence[str | int]) -> str:
    """A path as it is written in an override."""
    return ".".join(str(part) for part in path)


def shown(value: Any) -> str:
    """A value as YAML would have it, on one line, shortened."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 80 else f'{text[:76]}..."'
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)


def look_up(data: Any, path: Sequence[str | int]) -> Any:
    """The value at a path; None when there is none."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _key_path(location: Sequence[str | int], *, unknown: bool) -> tuple[Path, Any]:
    """The key path in a pydantic location, which also holds names of union members, and the type at its end."""
    path: list[str | int] = []
    current: Any = Config
    for part in location:
        models = keys.models_of(current)
        items = keys.items_of(current)
        if len(models) > 1 and (member := dict(_by_kind(current)).get(str(part))) is not None:
            current = member
        elif len(models) == 1 and part in models[0].model_fields:
            path.append(part)
            current = keys.annotation_of(models[0].model_fields[str(part)])
        elif items and isinstance(part, int) and _only_lists(current):
            path.append(part)
            current = items[0]
        else:
            if unknown:
                path.append(part)
            break
    return tuple(path), current


def _only_lists(annotation: Any) -> bool:
    """Whether a type is a list, or null; of other unions pydantic names the member before it counts the entries."""
    return all(get_origin(option) is list or option in (None, type(None)) for option, _ in keys.options(annotation))


def _by_kind(annotation: Any) -> list[tuple[str, Any]]:
    return [(kind, model) for model, kind in keys.kinds_of(annotation)]


def _problem(path: Path, annotation: Any, detail: dict[str, Any], data: Any, locate: Locate) -> UserError:
    key, value, kind = dotted(path), look_up(data, path), detail["type"]
    if kind in _UNKNOWN:
        return _unknown(path, value, data, locate)
    if kind == "missing":
        return _missing(path, annotation, locate)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_kind(path, annotation, value, locate)
    if kind in ("value_error", "assertion_error"):
        return _refused(path, detail, value, annotation, locate)
    if path and isinstance(path[-1], int) and keys.models_of(annotation):
        kinds = [kind for _, kind in keys.kinds_of(annotation) if kind]
        expected = "a section with a `kind`" if kinds else "a section"
    else:
        expected = keys.describe(annotation)
    return UserError(
        f"`{key}` must be {expected}, got {shown(value)}" if key else f"a recipe is a mapping, got {shown(value)}",
        where=locate(path),
        mend=_mend_value(annotation, value) or _ask(key),
    )


def _unknown(path: Path, value: Any, data: Any, locate: Locate) -> UserError:
    key = dotted(path)
    section = f"`{dotted(path[:-1])}` has" if len(path) > 1 else "a recipe has"
    return UserError(
        f"unknown key `{key}`, given {shown(value)}: {section} no `{path[-1]}`",
        where=locate(path),
        mend=_mend_key(path, value, data),
    )


def _mend_key(path: Path, value: Any, data: Any) -> str:
    name = str(path[-1])
    siblings = _siblings(path, data)
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8)
    if close and dotted(path[-2:]) not in MENDS:
        return f"did you mean `{dotted((*path[:-1], close[0]))}`?"
    if special := mend_for(dotted(path)):
        return special
    known = keys.places()
    if isinstance(value, dict):
        same = [place for place in known if keys.models_of(place.annotation)]
    else:
        same = [place for place in known if not keys.models_of(place.annotation)]
    near = keys.nearest(dotted(path), within=[place.path for place in same], cutoff=0.7)
    if not near:
        near = keys.nearest(dotted(path), cutoff=0.7)
    if near and (kind := re.fullmatch(rf"(.+)\[(\w+)\]\.{re.escape(name)}", near[0])):
        return f"`{name}` belongs to `{kind[1]}` of kind {kind[2]}"
    if near:
        return f"did you mean `{near[0]}`?"
    if siblings:
        return f"the keys {'of this section' if len(path) > 1 else 'of a recipe'} are {', '.join(siblings)}"
    return "`strop config explain` lists the sections"


def _siblings(path: Path, data: Any) -> list[str]:
    """The keys that the section of a path has."""
    current: Any = Config
    for depth, part in enumerate(path[:-1]):
        models = keys.models_of(current)
        if isinstance(part, int):
            items = keys.items_of(current)
            kind = look_up(data, (*path[: depth + 1], "kind"))
            current = dict(_by_kind(items[0])).get(str(kind), items[0]) if items else None
        else:
            field = models[0].model_fields.get(part) if len(models) == 1 else None
            current = keys.annotation_of(field) if field is not None else None
    models = keys.models_of(current)
    return list(models[0].model_fields) if len(models) == 1 else []


def _missing(path: Path, annotation: Any, locate: Locate) -> UserError:
    key = dotted(path)
    place = keys.find(key)
    about = " ".join(place.description.split()) if place is not None else ""
    return UserError(
        f"`{key}` is missing; it must be {keys.describe(annotation)}" + (f": {about}" if about else ""),
        where=locate(path),
        mend=f"set it; `strop config explain {key}` says how",
    )


def _wrong_kind(path: Path, annotation: Any, value: Any, locate: Locate) -> UserError:
    kinds = [kind for _, kind in keys.kinds_of(annotation)]
    allowed = ", ".join(kinds)
    key = dotted((*path, "kind"))
    given = value.get("kind") if isinstance(value, dict) else None
    if given is None:
        return UserError(
            f"`{key}` is missing; it must be one of {allowed}", where=locate(path), mend=f"add `kind: {kinds[0]}`, say"
        )
    close = difflib.get_close_matches(str(given), kinds, n=1)
    return UserError(
        f"`{key}` must be one of {allowed}, got {shown(given)}",
        where=locate((*path, "kind")),
        mend=f"did you mean {shown(close[0])}?" if close else _ask(dotted(path[:-1])),
    )


def _refused(path: Path, detail: dict[str, Any], value: Any, annotation: Any, locate: Locate) -> UserError:
    """What a validator of strop said: of one key, or of several in a section."""
    message = str(detail.get("ctx", {}).get("error") or detail["msg"])
    key = dotted(path)
    if key and not keys.models_of(annotation):
        return UserError(f"`{key}` is refused, got {shown(value)}: {message}", where=locate(path), mend=_ask(key))
    named = _named_keys(path, message)
    places = list(dict.fromkeys(place for one in named if (place := locate(one))))
    return UserError(
        f"`{key}`: {message}" if key else message,
        where="; ".join(places) or locate(path),
        mend=_ask(dotted(named[0]) if named else key),
    )


def _named_keys(path: Path, message: str) -> list[Path]:
    """The keys that a validator's message names, written in full or as a key of its own section."""
    found: list[Path] = []
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        for candidate in (tuple(word.split(".")), (*path, *word.split("."))):
            if candidate not in found and keys.find(dotted(candidate)) is not None and (len(candidate) > 1):
                found.append(candidate)
    return found


def _mend_value(annotation: Any, value: Any) -> str:
    types = [option for option, _ in keys.options(annotation)]
    if isinstance(value, str):
        texts = [fixed for fixed in keys.literals(annotation) if isinstance(fixed, str)]
        close = difflib.get_close_matches(value.lower(), texts, n=1)
        if close:
            return f"did you mean {shown(close[0])}?"
        if bool in types and value.lower() in ("yes", "no", "on", "off"):
            return f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
        if (int in types or float in types) and re.fullmatch(r"[-+\d._]*\d[-+\d._eE]*", value):
            return "write the number without quotes"
        if any(get_origin(option) is list for option in types):
            return f"write a list: [{value}]"
    elif isinstance(value, float) and int in types and value.is_integer():
        return f"write {int(value)}"
    elif isinstance(value, int | float) and str in types:
        return f"put it in quotes: {shown(json.dumps(value).strip(chr(34)))}"
    elif isinstance(value, dict) and str in types:
        return "put a text that holds `: ` or `{` in quotes"
    return ""


def _ask(key: str) -> str:
    shortened = re.sub(r"\.\d+", "", key)
    return f"`strop config explain {shortened}` says what it may be" if shortened else ""
