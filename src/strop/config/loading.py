"""Reads a recipe: YAML files with `extends:`, then `key=value` overrides, then the strict schema.

Mappings are merged key by key; a list or a value replaces what was there; `null` removes a section, which then has its
defaults, or is the value of a key that may be null. An override sets exactly the key it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from strop.config import Config, dialect
from strop.config import explain as keys
from strop.config.base import StrictModel
from strop.config.problems import Path as KeyPath
from strop.config.problems import dotted, problems_of, shown
from strop.errors import ConfigError, UserError


@dataclass(frozen=True)
class _Layer:
    """One file of a recipe, or a mapping given in Python (which has no tree and no lines)."""

    name: str
    value: dict[str, Any]
    node: yaml.Node | None = None


@dataclass
class _Recipe:
    """What was read so far; later layers win over earlier ones, overrides over all layers."""

    layers: list[_Layer] = field(default_factory=list)
    overrides: list[tuple[KeyPath, str]] = field(default_factory=list)
    problems: list[UserError] = field(default_factory=list)

    def locate(self, path: KeyPath) -> str:
        """Where a key was written, or the section it is missing from."""
        for written, text in reversed(self.overrides):
            if written == path[: len(written)]:
                return f"command line: {text}"
        best, where = 0, self.layers[-1].name if self.layers else ""
        for layer in reversed(self.layers):
            depth, line, ended = _find(layer, path)
            if depth > best:
                best, where = depth, layer.name if line is None else f"{layer.name}, line {line}"
            if ended or depth == len(path):
                break
        if best < len(path):
            for written, text in reversed(self.overrides):
                if path == written[: len(path)]:
                    return f"command line: {text}"
        return where


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
        ConfigError: with every problem found, each with its key, value, place and mend.
    """
    recipe = _Recipe()
    if path is not None:
        _add_file(recipe, Path(path).expanduser(), [])
    if data is not None:
        recipe.layers.append(_Layer("the mapping given", data))
    if any(isinstance(problem, _Unread) for problem in recipe.problems):
        # A part of the recipe could not be read at all: what it lacks is not the user's mistake.
        raise ConfigError(recipe.problems)
    merged: Any = {}
    for layer in recipe.layers:
        merged = _merge(merged, layer.value)
    for text in overrides:
        merged = _override(recipe, merged, text)
    completed = _complete(merged, Config, None)
    try:
        config = Config.model_validate(completed, strict=True)
    except ValidationError as error:
        raise ConfigError(recipe.problems + problems_of(error, completed, recipe.locate)) from None
    if recipe.problems:
        raise ConfigError(recipe.problems)
    return config


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


# --- files ---------------------------------------------------------------------------------------------------------


class _Unread(UserError):
    """A file that could not be read."""


def _add_file(recipe: _Recipe, path: Path, chain: list[Path]) -> None:
    """Append a file's layers: those of the files it extends first."""
    try:
        document = dialect.read(_text_of(path), name=str(path))
    except ConfigError as error:
        recipe.problems += [_Unread(problem.what, where=problem.where, mend=problem.mend) for problem in error.problems]
        return
    except _Unread as error:
        recipe.problems.append(error)
        return
    recipe.problems += document.repeated
    if document.value is None:
        mend = "a recipe has at least `model:`, `data:` and `rewards:`"
        recipe.problems.append(_Unread(f"{path} is empty", where=str(path), mend=mend))
        return
    if not isinstance(document.value, dict):
        what = f"{path} is not a mapping of sections but {shown(document.value)}"
        recipe.problems.append(_Unread(what, where=str(path), mend="begin with lines such as `model:` and `data:`"))
        return
    value = dict(document.value)
    layer = _Layer(str(path), value, document.node)
    for parent in _parents(recipe, layer, value.pop("extends", None)):
        target = (path.parent / Path(parent).expanduser()).resolve()
        line = _find(layer, ("extends",))[1]
        here = [*chain, path.resolve()]
        if target in here:
            circle = " -> ".join(step.name for step in [*here[here.index(target) :], target])
            what, mend = f"recipes extend each other in a circle: {circle}", "remove one of the `extends`"
            recipe.problems.append(_Unread(what, where=f"{path}, line {line}", mend=mend))
        elif not target.exists():
            what = f"{path.name} extends {parent}, which does not exist"
            mend = _near_file(target) or f"the path is relative to {path.parent}"
            recipe.problems.append(_Unread(what, where=f"{path}, line {line}", mend=mend))
        else:
            _add_file(recipe, path.parent / Path(parent).expanduser(), here)
    recipe.layers.append(layer)


def _parents(recipe: _Recipe, layer: _Layer, extends: Any) -> list[str]:
    parents = [extends] if isinstance(extends, str) else [] if extends is None else extends
    if isinstance(parents, list) and all(isinstance(parent, str) for parent in parents):
        return parents
    what = f"`extends` must be a file name or a list of file names, got {shown(extends)}"
    where = f"{layer.name}, line {_find(layer, ('extends',))[1]}"
    recipe.problems.append(_Unread(what, where=where, mend="write `extends: base.yaml`"))
    return []


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        mend = _near_file(path)
        if "=" in path.name and not mend:
            mend = "the first argument is the recipe's file, overrides follow it"
        raise _Unread(f"there is no recipe {path}", where=str(path.absolute()), mend=mend) from None
    except IsADirectoryError:
        mend = "name the `.yaml` file in it" if any(path.glob("*.yaml")) else "name a `.yaml` file"
        raise _Unread(f"{path} is a folder, not a recipe", where=str(path.absolute()), mend=mend) from None
    except UnicodeDecodeError as error:
        what = f"{path} is not a text file: byte {error.start} is not UTF-8"
        raise _Unread(what, where=str(path), mend="name the recipe's `.yaml` file") from None
    except OSError as error:
        raise _Unread(f"{path} cannot be read: {error.strerror}", where=str(path)) from None


def _near_file(path: Path) -> str:
    """A mend that names a recipe with a similar name, beside the path or in `recipes/`."""
    folders = dict.fromkeys([path.parent, Path("recipes")])
    found = {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.y*ml"))}
    close = get_close_matches(path.stem, found, n=1)
    if close:
        return f"did you mean {found[close[0]]}?"
    return f"recipes there are {', '.join(str(file) for file in list(found.values())[:8])}" if found else ""


def _find(layer: _Layer, path: KeyPath) -> tuple[int, int | None, bool]:
    if layer.node is not None:
        return dialect.line_of(layer.node, path)
    value: Any = layer.value
    for depth, part in enumerate(path):
        entries = _entries(value)
        if part not in entries:
            return depth, None, not isinstance(value, dict)
        value = entries[part]
    return len(path), None, True


# --- merging and overrides -----------------------------------------------------------------------------------------


def _merge(low: Any, high: Any) -> Any:
    if not isinstance(low, dict) or not isinstance(high, dict):
        return high
    return {**low, **{key: _merge(low[key], value) if key in low else value for key, value in high.items()}}


def _override(recipe: _Recipe, data: Any, text: str) -> Any:
    """The data with one override applied; a copy along its path, because anchors share parts of it."""
    where = f"command line: {text}"
    key, equals, written = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        what = f"{text!r} is not an override"
        recipe.problems.append(
            UserError(what, where=where, mend="write `section.key=value`, without spaces around `=`")
        )
        return data
    try:
        path = _indexed(parts, data)
        value = _parse(written, keys.find(key.strip()))
    except UserError as error:
        recipe.problems.append(UserError(error.what, where=where, mend=error.mend))
        return data
    recipe.overrides.append((path, text))
    return _put(data, path, value)


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


def _put(data: Any, path: KeyPath, value: Any) -> Any:
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        entries = list(data) if isinstance(data, list) else []
        inner = entries[first] if first < len(entries) else None
        entries[first : first + 1] = [_put(inner, rest, value)]
        return entries
    mapping = dict(data) if isinstance(data, dict) else {}
    mapping[first] = _put(mapping.get(first), rest, value)
    return mapping


def _complete(data: Any, model: type[StrictModel], default: BaseModel | None) -> Any:
    """What the user wrote, over what a section has by default, without the sections that `null` removes.

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
        if merged[name] is None and sections and not keys.optional(annotation):
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
    left, right = (_entries(value) for value in (a, b))
    return [(part, left.get(part, _ABSENT), right.get(part, _ABSENT)) for part in dict.fromkeys([*left, *right])]


def _entries(value: Any) -> dict[str | int, Any]:
    return dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
