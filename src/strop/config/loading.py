"""Reads a recipe: YAML files with `extends:`, then `key=value` overrides, then the strict schema.

`null` removes a section or a mapping such as `arguments`, which then has its defaults, or is the value of a key that
may be null. An override sets exactly the key it names. How files are merged is in `config/layers.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from strop.config import Config, dialect
from strop.config import explain as keys
from strop.config.base import StrictModel
from strop.config.layers import Layer, Layers, entries_of
from strop.config.problems import Path as KeyPath
from strop.config.problems import dotted, problems_of
from strop.errors import ConfigError, UserError
from strop.paths import user_path


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, data: dict[str, Any] | None = None
) -> Config:
    """Read a recipe and check it against the schema.

    Args:
        path: the recipe's YAML file; None to start from `data` or from nothing.
        overrides: `section.key=value`, the value in YAML; entries of lists by index, `rewards.verifiers.0.weight=2`.
            A key that holds a text takes the text as it stands.
        data: a recipe as nested mappings, merged over the file's.

    Raises:
        ConfigError: with every problem found, each with its key, value, place and mend. A pipeline is one problem:
            `config/pipeline_loading.py` reads those.
    """
    layers = read_layers(path, data)
    if is_pipeline(merged := layers.merged()):
        raise ConfigError([_several(path, merged)])
    return validated(layers, overrides)


def read_layers(path: str | Path | None, data: dict[str, Any] | None) -> Layers:
    """The layers of a recipe or a pipeline. Raises ConfigError if a file cannot be read."""
    layers = Layers()
    if path is not None:
        layers.add_file(user_path(path), [])
    if data is not None:
        layers.layers.append(Layer("the mapping given", data))
    layers.stop_if_unread()
    return layers


def is_pipeline(merged: Any) -> bool:
    """Whether a recipe chains stages."""
    return isinstance(merged, dict) and "stages" in merged


def validated(layers: Layers, overrides: Sequence[str], *, below: str = "") -> Config:
    """What the layers and the overrides say, as a configuration.

    Args:
        below: what the keys of the overrides begin with, such as `stages.sft.`.

    Raises:
        ConfigError: with every problem found.
    """
    merged = layers.merged()
    for text in overrides:
        merged = override(layers, merged, text, below=below)
    completed = _complete(merged, Config, None)
    try:
        config = Config.model_validate(completed, strict=True)
    except ValidationError as error:
        raise ConfigError(layers.problems + problems_of(error, completed, layers.locate)) from None
    if layers.problems:
        raise ConfigError(layers.problems)
    return config


def _several(path: str | Path | None, merged: dict[str, Any]) -> UserError:
    """That one recipe is wanted, and a pipeline was given."""
    stages = list(merged["stages"]) if isinstance(merged["stages"], dict) else []
    name = Path(path).stem if path is not None else "NAME"
    one = f"the run of a stage, such as runs/{name}/{stages[-1]}" if stages else "the run of a stage"
    return UserError(
        f"this is a pipeline of several recipes ({', '.join(map(str, stages))}), and one is wanted here",
        where=str(path or "stages"),
        mend=f"name {one}; `strop train` and `strop config show` take a pipeline, `strop.load_pipeline` reads one",
    )


def resolved_yaml(config: Config) -> str:
    """The whole configuration with every default written out; `load_config` reads it back as an equal one.

    Raises:
        UserError: free-form `arguments` hold something that YAML has no plain form for.
    """
    return dialect.dump(config.model_dump())


def config_hash(config: Config) -> str:
    """SHA-256 of the configuration as canonical JSON, 64 hexadecimal digits; equal configurations have equal ones."""
    text = json.dumps(_plain(config), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ, as (key, value in a, value in b); None also where one of them lacks the key."""
    return list(_differences((), _plain(a), _plain(b)))


# --- overrides -----------------------------------------------------------------------------------------------------


def override(layers: Layers, data: Any, text: str, *, below: str = "") -> Any:
    """The data with one override applied; a copy along its path, because anchors share parts of it.

    Args:
        layers: notes the override, or the problem with it.
        below: the beginning of its key that leads to the data.
    """
    where = f"command line: {text}"
    key, equals, written = text.partition("=")
    key = key.strip().removeprefix(below)
    parts = key.split(".")
    if not equals or not all(parts):
        what = f"{text!r} is not an override"
        layers.problems.append(
            UserError(what, where=where, mend="write `section.key=value`, without spaces around `=`")
        )
        return data
    try:
        path = _indexed(parts, data)
        value = _parse(written, keys.find(key))
    except UserError as error:
        layers.problems.append(UserError(error.what, where=where, mend=error.mend))
        return data
    layers.overrides.append((path, text))
    return put(data, path, value)


def _indexed(parts: list[str], data: Any) -> KeyPath:
    """The path of an override, with the numbers that are indexes of lists."""
    path: list[str | int] = []
    for part in parts:
        place = keys.find(dotted(path)) if path else None
        a_list = isinstance(data, list) or (
            data is None and place is not None and bool(keys.items_of(place.annotation))
        )
        if not a_list:
            path.append(part)
            data = data.get(part) if isinstance(data, dict) else None
            continue
        size = len(data or [])
        if not part.isdigit() or int(part) > size:
            entries = f"entries 0 to {size - 1}" if size else "no entries yet"
            what = f"`{dotted(path)}` is a list with {entries}; `{part}` is none of them"
            mend = f"`{dotted(path)}.{size}` appends one" if part.isdigit() else f"write `{dotted(path)}.0` and so on"
            raise UserError(what, mend=mend)
        path.append(int(part))
        data = data[int(part)] if data and int(part) < size else None
    return tuple(path)


def _parse(written: str, place: keys.Place | None) -> Any:
    types = [option for option, _ in keys.options(place.annotation)] if place is not None else []
    takes_text = str in types
    try:
        document = dialect.read(written, name="the value")
        if document.repeated:
            raise ConfigError(document.repeated)
    except ConfigError as error:
        if takes_text:
            return written
        raise UserError(error.what, mend="put it in single quotes for the shell, lists as '[a, b]'") from None
    value = document.value
    if not takes_text or isinstance(value, str):
        return value
    if value is None and place is not None and keys.optional(place.annotation):
        return None
    # `run.name=2026` and `data.prompt_template=Q: {question}` mean the text, whatever else YAML makes of them.
    return value if isinstance(value, list) and any(get_origin(t) is list for t in types) else written


def put(data: Any, path: KeyPath, value: Any) -> Any:
    """A copy of nested mappings and lists with another value at a path; mappings are made on the way."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        entries = list(data) if isinstance(data, list) else []
        inner = entries[first] if first < len(entries) else None
        entries[first : first + 1] = [put(inner, rest, value)]
        return entries
    mapping = dict(data) if isinstance(data, dict) else {}
    mapping[first] = put(mapping.get(first), rest, value)
    return mapping


def _complete(data: Any, model: type[StrictModel], default: BaseModel | None) -> Any:
    """What the user wrote, over what a section has by default, without the sections and mappings that `null` removes.

    A section may begin with other values than its class has (`warmup.optimizer`); setting one key of it must not
    change the others.
    """
    if not isinstance(data, dict):
        return data
    start = {} if default is None else {name: getattr(default, name) for name in default.model_fields_set}
    merged = {**start, **data}
    for name, its_field in model.model_fields.items():
        annotation = keys.annotation_of(its_field)
        sections = keys.models_of(annotation)
        if name not in merged:
            continue
        of_ones_own = get_origin(annotation) is dict
        if merged[name] is None and (sections or of_ones_own) and not keys.optional(annotation):
            del merged[name]
        elif len(sections) == 1:
            fallback = start.get(name, its_field.get_default())
            merged[name] = _complete(merged[name], sections[0], fallback if isinstance(fallback, BaseModel) else None)
    return merged


# --- comparison ----------------------------------------------------------------------------------------------------

_ABSENT = object()


def _plain(config: Config) -> Any:
    return config.model_dump()


def _differences(path: KeyPath, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if a is b or a == b:
        return
    inner = [found for part, x, y in _pairs(a, b) for found in _differences((*path, part), x, y)]
    if type(a) is not type(b):
        # Of a section that only one of them has, the keys that are null say nothing.
        inner = [found for found in inner if found[1] is not None or found[2] is not None]
    if inner:
        yield from inner
    else:
        yield dotted(path), None if a is _ABSENT else a, None if b is _ABSENT else b


def _pairs(a: Any, b: Any) -> list[tuple[str | int, Any, Any]]:
    """The entries of two mappings or two lists side by side; whatever is neither has none."""
    given = [value for value in (a, b) if isinstance(value, dict | list)]
    if not given or any(type(value) is not type(given[0]) for value in given):
        return []
    left, right = (entries_of(value) for value in (a, b))
    return [(part, left.get(part, _ABSENT), right.get(part, _ABSENT)) for part in dict.fromkeys([*left, *right])]
