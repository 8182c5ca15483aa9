"""A pipeline: named stages in order, each a recipe, of which later ones may begin with what earlier ones trained.

`stage:sft` in place of a model's path is the model that the stage `sft` ends with, `stage:sft@best` the best one it has
kept (`checkpoint.best`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self, get_args

from pydantic import model_validator
from pydantic.fields import FieldInfo

from strop.config import Config
from strop.config.base import NamesModel, StrictModel
from strop.errors import UserError

PREFIX = "stage:"
KEYS = {
    "name": "Name of the pipeline's folder, which lies in `run.folder`; the file's name when not set.",
    "defaults": "What the stages have in common: any keys of a recipe. They are merged below every stage.",
    "stages": "The stages by name, in the order in which they are trained. Each is a recipe, written here or in a file "
    "that it `extends`.\n`stage:NAME` in place of a model's path is the model that an earlier stage ends with, "
    "`stage:NAME@best` the best one\nthat its `checkpoint.best` has kept.",
}
"""The keys of a file that is a pipeline, beside `extends`."""

_STAGE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Reference:
    """A model that an earlier stage makes. best: the best checkpoint instead of the last one."""

    stage: str
    best: bool = False


def reference_of(path: str) -> Reference | None:
    """What a model's path says if it names a stage, else None.

    Raises:
        ValueError: what follows the name is not `@best`.
    """
    if not path.startswith(PREFIX):
        return None
    stage, at, which = path.removeprefix(PREFIX).partition("@")
    if at and which != "best":
        raise ValueError(
            f"{path!r} ends in {at + which!r}: write {PREFIX}{stage} for the last checkpoint, {PREFIX}{stage}@best for "
            "the best"
        )
    return Reference(stage, best=bool(at))


def model_paths(section: StrictModel) -> dict[str, str]:
    """Each key of a configuration that names a model, dotted, with the path it has."""
    return {key: path for key, path, _ in _paths("", section)}


def with_paths(section: Any, change: Callable[[str], str]) -> Any:
    """A copy of a configuration with other paths of models."""
    updates: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, str):
            new: Any = change(value) if _mark_of(field) is not None else value
        elif isinstance(value, StrictModel):
            new = with_paths(value, change)
        elif isinstance(value, list):
            new = [with_paths(entry, change) if isinstance(entry, StrictModel) else entry for entry in value]
        else:
            continue
        if new != value:
            updates[name] = new
    return section.model_copy(update=updates) if updates else section


def inputs(stage: Config) -> list[str]:
    """The stages whose models a stage uses, each once."""
    found = [reference_of(path) for path in model_paths(stage).values()]
    return list(dict.fromkeys(reference.stage for reference in found if reference is not None))


class PipelineConfig(StrictModel):
    """A whole pipeline; `strop config explain stages` says what its file looks like."""

    name: str | None = None
    """Name of the pipeline's folder, which lies in `run.folder`; the recipe's file name when not set."""
    stages: dict[str, Config]
    """The stages by name, in the order in which they are trained."""

    @property
    def folder(self) -> str:
        """Where the pipeline's folder lies: the `run.folder` that all stages share."""
        return next(iter(self.stages.values())).run.folder

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problems := list(problems_in(self.name, self.stages)):
            raise ValueError("; ".join(f"{problem.what} ({problem.mend})" for _, _, problem in problems))
        return self


def problems_in(name: str | None, stages: Mapping[str, Config]) -> Iterator[tuple[str, str, UserError]]:
    """What is wrong between the stages: (stage, key, problem), of which the first two may be empty."""
    if not stages:
        yield "", "", UserError("a pipeline needs at least one stage", where="stages", mend="add one below `stages`")
    if name is not None and (not name or "/" in name or name.startswith(".")):
        what = f"`name` is {name!r}, and a pipeline's name is one folder name: no slashes, no leading dot"
        yield "", "", UserError(what, where="name", mend="give it another name")
    shared = next(iter(stages.values())).run.folder if stages else ""
    for at, (stage, config) in enumerate(stages.items()):
        if not _STAGE_NAME.fullmatch(stage):
            what = f"a stage cannot be called {stage!r}: it is a folder and a part of keys"
            yield "", "", UserError(what, where=f"stages.{stage}", mend="use letters, digits, - and _, a letter first")
        if config.run.name is not None:
            what = f"`run.name` is {config.run.name!r}, and the run of a stage has the stage's name"
            yield stage, "run.name", UserError(what, mend="remove it, or set it to null where a file sets it")
        if config.run.folder != shared:
            what = f"`run.folder` is {config.run.folder!r}, and that of the first stage {shared!r}"
            mend = "let the stages lie in one folder: set defaults.run.folder and no other"
            yield stage, "run.folder", UserError(what, mend=mend)
        for key, path, mark in _paths("", config):
            problem = _wrong_reference(key, path, mark, at, stages)
            if problem is not None:
                yield stage, key, problem


def _wrong_reference(key: str, path: str, mark: NamesModel, at: int, stages: Mapping[str, Config]) -> UserError | None:
    try:
        reference = reference_of(path)
    except ValueError as error:
        return UserError(f"`{key}`: {error}", mend="choose one of the two")
    if reference is None:
        return None
    names = list(stages)
    if reference.stage not in stages:
        close = get_close_matches(reference.stage, names[:at], n=1)
        before = f"the stages before it are {', '.join(names[:at])}" if at else "it is the first stage"
        mend = f"did you mean {PREFIX}{close[0]}?" if close else before
        return UserError(f"`{key}` names the stage {reference.stage!r}, and there is none of that name", mend=mend)
    if names.index(reference.stage) >= at:
        what = f"`{key}` names the stage {reference.stage!r}, which is not trained before this one"
        other = reference.stage != names[at]
        return UserError(what, mend=f"put {reference.stage} before {names[at]}" if other else "name an earlier stage")
    made = stages[reference.stage]
    if reference.best and made.checkpoint.best is None:
        what = f"`{key}` asks for the best checkpoint of {reference.stage}, which keeps only its newest ones"
        return UserError(what, mend=f"set stages.{reference.stage}.checkpoint.best, or write {PREFIX}{reference.stage}")
    if mark.kind == "scalar" and not gives_scores(made):
        what = f"`{key}` wants a reward model, and the stage {reference.stage} makes a language model"
        return UserError(what, mend="name a stage that trains one (supervised.method: reward_model)")
    if mark.kind == "text" and gives_scores(made):
        what = f"`{key}` wants a language model, and the stage {reference.stage} makes one that gives scores"
        return UserError(what, mend="name a stage that trains one, or a verifier of kind reward_model for this one")
    return None


def gives_scores(config: Config) -> bool:
    """Whether a recipe trains a model with a scalar head."""
    return config.supervised is not None and config.supervised.method in ("reward_model", "process_reward")


def _paths(prefix: str, section: StrictModel) -> Iterator[tuple[str, str, NamesModel]]:
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        mark = _mark_of(field)
        if mark is not None and isinstance(value, str):
            yield key, value, mark
        elif isinstance(value, StrictModel):
            yield from _paths(f"{key}.", value)
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                if isinstance(entry, StrictModel):
                    yield from _paths(f"{key}.{number}.", entry)


def _mark_of(field: FieldInfo) -> NamesModel | None:
    options = get_args(field.annotation)
    notes = [*field.metadata, *(note for option in options for note in get_args(option))]
    return next((note for note in notes if isinstance(note, NamesModel)), None)
