"""Walks over the configuration schema: what each key is, in words.

Keys are written as in an override, `training.optimizer.learning_rate`. A key of one kind of section or list entry is
written with the kind in brackets, `rewards.verifiers[numeric].tolerance`.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from strop.config import Config
from strop.config.base import StrictModel
from strop.config.elsewhere import mend_for
from strop.config.pipeline import KEYS as PIPELINE_KEYS
from strop.errors import UserError


@dataclass(frozen=True)
class Leaf:
    """One key of the schema that holds a value.

    path: dotted, as in the module's docstring. annotation: its type, with its bounds. default: what it is when nobody
    sets it, None too when `required`. description: the text below the field.
    """

    path: str
    annotation: Any
    default: Any
    description: str
    required: bool


@dataclass(frozen=True)
class Place:
    """A key of the schema, leaf or section. `kinds` names the kinds of list entries that have the key, if not all."""

    path: str
    annotation: Any
    default: Any
    description: str
    required: bool
    kinds: tuple[str, ...] = ()


def leaves() -> list[Leaf]:
    """Every key that holds a value, those of optional sections and of every kind of list entry included."""
    return [
        Leaf(place.path, place.annotation, place.default, place.description, place.required)
        for place in places()
        if not _is_section(place.annotation)
    ]


def explain(key: str) -> str:
    """What a key is: type, default and documentation; for a section also its keys, one line each.

    Args:
        key: a dotted key such as `training.optimizer`; empty for the whole recipe.

    Raises:
        UserError: there is no such key; the mend names the nearest one.
    """
    if key in PIPELINE_KEYS:
        return _of_pipeline(key)
    # The keys of a stage are those of any recipe.
    key = re.sub(r"^(?:stages\.[A-Za-z][\w-]*|defaults)(?:\.|$)", "", key)
    found = find(key) if key else Place("", Config, None, _text(Config.__doc__), True)
    if found is None:
        near = nearest(key)
        mend = f"did you mean `{near[0]}`?" if near else "`strop config explain` lists the sections"
        raise UserError(f"there is no key `{key}`", mend=mend_for(key) or mend)
    lines = [found.path or "a recipe", *(f"  {line}" for line in found.description.splitlines())]
    if not _is_section(found.annotation):
        lines.append(f"  type:    {describe(found.annotation)}")
    if found.path and not _is_section(found.annotation):
        lines.append(f"  default: {_default(found)}")
    elif found.path and found.default is None and not found.required:
        lines.append("  default: null, there is no such section")
    if found.kinds:
        lines.append(f"  only if `kind` is {_any_of([json.dumps(kind) for kind in found.kinds])}")
    for title, rows in _tables(found):
        width = max(len(name) for name, _ in rows)
        lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows)]
    if not key:
        lines += ["", "A file with `stages` chains several recipes: `strop config explain stages`."]
    return "\n".join(lines)


_A_PIPELINE = """\
defaults:
  run: {folder: runs, seed: 1}
stages:
  sft: {extends: sft.yaml}
  judge:
    extends: judge.yaml
    model: {path: "stage:sft"}
  ppo:
    extends: ppo.yaml
    model: {path: "stage:sft"}
    rewards: {verifiers: [{kind: reward_model, path: "stage:judge"}]}"""


def _of_pipeline(key: str) -> str:
    """The page of a key that only pipelines have."""
    lines = [key, *(f"  {line}" for line in PIPELINE_KEYS[key].splitlines()), "", "a pipeline:"]
    lines += [f"  {line}" for line in _A_PIPELINE.splitlines()]
    return "\n".join([*lines, "", "Override keys of a stage as stages.NAME.KEY=VALUE, of all as defaults.KEY=VALUE."])


def find(key: str) -> Place | None:
    """The place of a key; indexes of list entries may be left out, given as a number, or replaced by the kind."""
    wanted = [part for part in re.split(r"[.\[\]]+", key) if part and not part.isdigit()]
    exact = [place for place in places() if place.path == key]
    found = exact or [place for place in places() if _spellings(place.path, wanted)]
    if not found and len(wanted) > 1 and (above := find(".".join(wanted[:-1]))):
        lists = items_of(above.annotation) or [above.annotation]
        entries = {kind: model for item in lists for model, kind in kinds_of(item)}
        model = entries.get(wanted[-1])
        return None if model is None else Place(f"{above.path}[{wanted[-1]}]", model, None, _text(model.__doc__), True)
    if len(found) < 2:
        return found[0] if found else None
    return _same_key_of(found)


def _same_key_of(found: list[Place]) -> Place:
    """One place for a key that several kinds of list entries have."""
    first = found[0]
    section = next(place for place in places() if place.path == first.path.rpartition("[")[0])
    lists = items_of(section.annotation) or [section.annotation]
    every = [kind for item in lists for _, kind in kinds_of(item)]
    kinds = [re.findall(r"\[(\w+)\]", place.path)[-1] for place in found]
    annotations = list(dict.fromkeys(place.annotation for place in found))
    descriptions = dict(zip(kinds, (place.description for place in found), strict=True))
    if len(set(descriptions.values())) == 1:
        description = first.description
    else:
        description = "\n".join(f"{kind}: {text}" for kind, text in descriptions.items())
    return Place(
        re.sub(r"\[\w+\]", "[]", first.path),
        annotations[0] if len(annotations) == 1 else Union[tuple(annotations)],  # noqa: UP007
        first.default,
        description,
        first.required,
        kinds=() if kinds == every else tuple(kinds),
    )


def nearest(key: str, *, within: Sequence[str] | None = None, cutoff: float = 0.6) -> list[str]:
    """Known keys that a wrong key may have meant, best first: by the last name, then by the section."""
    known = list(within) if within is not None else [place.path for place in places()]
    section, _, last = key.rpartition(".")

    def closeness(candidate: str) -> tuple[float, float, float]:
        home, _, name = candidate.rpartition(".")
        likeness = difflib.SequenceMatcher(None, last, name).ratio()
        shared = sum(section.startswith(above) for above in accumulate(home.split("."), "{}.{}".format))
        # A name that is right but in the wrong section beats a sibling that only looks alike; a sibling with a typo
        # beats a look-alike elsewhere.
        return (likeness + (0.2 if home == section else 0.0), -candidate.count("["), shared)

    # The sort keeps the order of the schema among equals, where `training` comes before `warmup`.
    ranked = sorted(((closeness(candidate), candidate) for candidate in known), key=lambda pair: pair[0], reverse=True)
    return [candidate for score, candidate in ranked[:3] if score[0] >= cutoff]


def places() -> list[Place]:
    """Every key of the schema, sections before their keys, in the order of the files."""
    return list(_all_places())


@cache
def _all_places() -> tuple[Place, ...]:
    return tuple(_walk("", Config, None))


def _walk(prefix: str, model: type[StrictModel], instance: StrictModel | None) -> Iterator[Place]:
    for name, field in model.model_fields.items():
        annotation = annotation_of(field)
        default = getattr(instance, name) if instance is not None else field.get_default(call_default_factory=True)
        required = field.is_required() and instance is None
        path = f"{prefix}.{name}" if prefix else name
        yield Place(path, annotation, None if required else default, _text(field.description), required)
        members = kinds_of(annotation)
        for member, kind in members:
            place = path if len(members) == 1 else f"{path}[{kind}]"
            yield from _walk(place, member, default if isinstance(default, member) else None)
        for item in items_of(annotation):
            for member, kind in kinds_of(item):
                yield from _walk(f"{path}[{kind}]", member, None)


# --- annotations ---------------------------------------------------------------------------------------------------


def annotation_of(field: FieldInfo) -> Any:
    """A field's type with its bounds, which pydantic keeps apart."""
    if not field.metadata:
        return field.annotation
    return Annotated[field.annotation, *field.metadata]


def options(annotation: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a type, each with its bounds; `X | None` has two."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        bounds: list[Any] = []
        for note in notes:
            bounds += note.metadata if isinstance(note, FieldInfo) else [note]
        return [(option, (*its_own, *bounds)) for option, its_own in options(inner)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in options(part)]
    return [(annotation, ())]


def models_of(annotation: Any) -> list[type[StrictModel]]:
    """The sections among the alternatives of a type."""
    return [option for option, _ in options(annotation) if isinstance(option, type) and issubclass(option, StrictModel)]


def items_of(annotation: Any) -> list[Any]:
    """The types of entries of the lists among the alternatives of a type."""
    return [get_args(option)[0] for option, _ in options(annotation) if get_origin(option) is list]


def kinds_of(annotation: Any) -> list[tuple[type[StrictModel], str]]:
    """The sections among the alternatives, each with the value of `kind` that selects it (empty when it has none)."""
    found = []
    for model in models_of(annotation):
        field = model.model_fields.get("kind")
        values = literals(annotation_of(field)) if field is not None else []
        found.append((model, str(values[0]) if len(values) == 1 else ""))
    return found


def literals(annotation: Any) -> list[Any]:
    """The fixed values among the alternatives of a type."""
    return [value for option, _ in options(annotation) if get_origin(option) is Literal for value in get_args(option)]


def optional(annotation: Any) -> bool:
    """Whether `null` is allowed."""
    return any(option in (None, type(None)) for option, _ in options(annotation))


def describe(annotation: Any) -> str:
    """A type in plain words, such as `a whole number above 0 or "auto"`."""
    fixed = [json.dumps(value) for value in literals(annotation)]
    words = []
    for option, bounds in options(annotation):
        if option in (None, type(None)):
            words.append("null")
        elif get_origin(option) is not Literal:
            words.append(_describe_one(option, bounds))
        elif fixed:
            words.append(fixed[0] if len(fixed) == 1 else f"one of {_any_of(fixed)}")
            fixed = []
    unclear = len(words) > 1 and any(" or " in word for word in words)
    return ", or ".join(words) if unclear else _any_of(words)


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def _describe_one(option: Any, bounds: tuple[Any, ...]) -> str:
    if get_origin(option) is list:
        least, most = (_bound(bounds, name) for name in ("min_length", "max_length"))
        few = str(least) if least == most else f"{least} or more"
        [item, *_] = [kind for kind, _ in options(get_args(option)[0]) if kind not in (None, type(None))]
        return f"a list of {few + ' ' if least else ''}{_PLURALS.get(item, 'entries')}"
    if get_origin(option) is dict or option is dict:
        return "a mapping of names to values"
    if isinstance(option, type) and issubclass(option, StrictModel):
        kind = kinds_of(option)[0][1]
        return f"a section of kind {json.dumps(kind)}" if kind else "a section"
    return _NAMES.get(option, "a value") + _range(bounds)


def _bound(bounds: tuple[Any, ...], name: str) -> int | None:
    found = [getattr(bound, name) for bound in bounds if getattr(bound, name, None)]
    return int(found[0]) if found else None


def _range(bounds: tuple[Any, ...]) -> str:
    limits: dict[str, Any] = {}
    for bound in bounds:
        for name in ("gt", "ge", "lt", "le"):
            if getattr(bound, name, None) is not None:
                limits[name] = getattr(bound, name)
    if {"ge", "le"} <= limits.keys():
        return f" from {limits['ge']} to {limits['le']}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    told = [f"{words[name]} {value}" for name, value in limits.items()]
    return f" {' and '.join(told)}" if told else ""


def _any_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# --- the pages of `explain` ----------------------------------------------------------------------------------------


def _is_section(annotation: Any) -> bool:
    return bool(models_of(annotation)) or any(models_of(item) for item in items_of(annotation))


def _spellings(path: str, wanted: list[str]) -> bool:
    parts = [part for part in re.split(r"[.\[\]]+", path) if part]
    return wanted in (parts, [part for part in re.split(r"\[\w+\]|\.", path) if part])


def _tables(place: Place) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    members = kinds_of(place.annotation)
    for model, kind in members:
        instance = place.default if isinstance(place.default, model) else None
        title = "keys:" if len(members) == 1 else f"kind: {kind}   {_text(model.__doc__)}"
        yield title, _rows(model, instance)
    for item in items_of(place.annotation):
        for model, kind in kinds_of(item):
            title = f"kind: {kind}" if kind else "keys of an entry:"
            yield f"{title}   {_text(model.__doc__)}", _rows(model, None)


def _rows(model: type[StrictModel], instance: StrictModel | None) -> list[tuple[str, str]]:
    rows = []
    for place in _walk("", model, instance):
        if "." in place.path or "[" in place.path:
            continue
        default = "required" if place.required else "" if _is_section(place.annotation) else _default(place)
        first = re.split(r"(?<=[.;])\s", " ".join(place.description.split()), maxsplit=1)[0].rstrip(";")
        rows.append((place.path, f"{first}  [{default}]" if default else first))
    return rows


def _default(place: Place) -> str:
    if place.required:
        return "none, it must be set"
    return "null" if place.default is None else json.dumps(place.default, ensure_ascii=False)


def _text(description: str | None) -> str:
    return "\n".join(line.strip() for line in (description or "").strip().splitlines())
