"""Reads a pipeline: a recipe file whose top level has `stages:` instead of `model:` and `data:`.

Each stage is put together of `defaults:`, the files that it extends, what is written below it, and the overrides
`stages.NAME.section.key=value`; then it is an ordinary recipe, with the lines of all of these in its errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from strop.config import Config, dialect
from strop.config.elsewhere import mend_for
from strop.config.layers import Layer, Layers
from strop.config.loading import is_pipeline, load_config, override, put, read_layers, validated
from strop.config.pipeline import KEYS, PipelineConfig, problems_in
from strop.config.problems import Path as KeyPath
from strop.config.problems import dotted, shown
from strop.errors import ConfigError, UserError


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Config | PipelineConfig:
    """Read a recipe or a pipeline, whichever the file is. Raises ConfigError as `load_config` does."""
    if is_pipeline(read_layers(path, None).merged()):
        return load_pipeline(path, overrides)
    return load_config(path, overrides)


def load_pipeline(
    path: str | Path | None, overrides: Sequence[str] = (), *, data: dict[str, Any] | None = None
) -> PipelineConfig:
    """Read a pipeline and check every stage against the schema, and the stages against each other.

    Args:
        path: the pipeline's YAML file; None to start from `data`.
        overrides: `stages.NAME.section.key=value` for one stage, `defaults.section.key=value` for what they share.
        data: a pipeline as nested mappings, merged over the file's.

    Raises:
        ConfigError: with every problem found in any stage.
    """
    layers = read_layers(path, data)
    merged = layers.merged()
    if problems := [*layers.problems, *_wrong_shape(layers, merged)]:
        raise ConfigError(problems)
    name = merged.get("name")
    names = [stage for stage, value in merged["stages"].items() if value is not None]
    own: dict[str, list[str]] = {stage: [] for stage in names}
    for text in overrides:
        if text.startswith("name="):
            name = text.removeprefix("name=")
        elif not text.startswith("defaults."):
            stage, problem = _stage_of(text, names)
            problems += [problem] if problem is not None else []
            if stage:
                own[stage].append(text)
    shared = _defaults(layers, [text for text in overrides if text.startswith("defaults.")])
    shared.stop_if_unread()
    problems += shared.problems
    recipes = {stage: _recipe_of(layers, shared, stage) for stage in names}
    stages: dict[str, Config] = {}
    for stage, recipe in recipes.items():
        try:
            recipe.stop_if_unread()
            stages[stage] = validated(recipe, own[stage], below=f"stages.{stage}.")
        except ConfigError as error:
            problems += [in_stage(stage, problem) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    if problems := list(_between(name, stages, recipes, layers)):
        raise ConfigError(problems)
    return PipelineConfig(name=name, stages=stages)


def resolved_pipeline(config: PipelineConfig) -> str:
    """The whole pipeline with every default written out; `load_pipeline` reads it back as an equal one."""
    return dialect.dump(config.model_dump())


def in_stage(stage: str, problem: UserError) -> UserError:
    """A problem of a recipe that is a stage."""
    return UserError(f"stage {stage}: {problem.what}", where=problem.where, mend=problem.mend)


def _wrong_shape(layers: Layers, merged: Any) -> Iterator[UserError]:
    """What of the top level is not as a pipeline has it."""
    if not isinstance(merged, dict) or not isinstance(merged.get("stages"), dict):
        given = shown(merged.get("stages")) if isinstance(merged, dict) else shown(merged)
        mend = "write a name for each, such as `stages: {sft: {extends: sft.yaml}}`"
        yield UserError(f"`stages` must be a mapping of named recipes, got {given}", where="stages", mend=mend)
        return
    for key in merged:
        if key not in KEYS:
            known = key in Config.model_fields
            mend = (
                f"write `defaults: {{{key}: ...}}` for all stages, or put it into one" if known else mend_for(str(key))
            )
            close = get_close_matches(str(key), KEYS, n=1)
            mend = mend or (f"did you mean `{close[0]}`?" if close else f"a pipeline has {', '.join(KEYS)}")
            yield UserError(f"unknown key `{key}`: a pipeline has no `{key}`", where=layers.locate((key,)), mend=mend)
    if nameless := [stage for stage in merged["stages"] if not isinstance(stage, str)]:
        what = f"a stage's name must be a text, got {shown(nameless[0])}"
        yield UserError(what, where=layers.locate(("stages", nameless[0])), mend="begin it with a letter")
    sections: dict[KeyPath, Any] = {("defaults",): merged.get("defaults")}
    sections |= {("stages", str(stage)): value for stage, value in merged["stages"].items()}
    for path, value in sections.items():
        if value is not None and not isinstance(value, dict):
            what = f"`{dotted(path)}` must be a recipe, got {shown(value)}"
            yield UserError(what, where=layers.locate(path), mend="write its keys below it, or `extends: FILE`")
        elif isinstance(value, dict) and "stages" in value:
            what, mend = f"`{dotted(path)}` has `stages` of its own", "a stage is one recipe; put its stages here"
            yield UserError(what, where=layers.locate((*path, "stages")), mend=mend)
    if not isinstance(merged.get("name"), str | None):
        what = f"`name` must be a text, got {shown(merged['name'])}"
        yield UserError(what, where=layers.locate(("name",)), mend="put it in quotes")


def _mend_top(key: str) -> str:
    if key in Config.model_fields:
        return f"write `defaults: {{{key}: ...}}` for all stages, or put it into one"
    close = get_close_matches(key, KEYS, n=1)
    return f"did you mean `{close[0]}`?" if close else mend_for(key) or "`strop config explain stages` shows a pipeline"


def _stage_of(text: str, names: Sequence[str]) -> tuple[str, UserError | None]:
    """The stage that an override is for, or what is wrong with it."""
    where = f"command line: {text}"
    section, _, rest = text.partition(".")
    stage = rest.partition("=")[0].partition(".")[0]
    if section == "stages" and stage in names and rest.removeprefix(stage).startswith("."):
        return stage, None
    if section != "stages":
        key = text.partition("=")[0]
        mend = (
            f"write stages.{names[0] if names else 'NAME'}.{text} for one stage, or defaults.{text} for what they share"
        )
        return "", UserError(f"a pipeline has no key `{key}`", where=where, mend=mend)
    close = get_close_matches(stage, names, n=1)
    what = f"there is no stage {stage!r}" if stage not in names else f"{text!r} names no key of the stage"
    mend = f"did you mean stages.{close[0]}?" if close and stage not in names else f"the stages are {', '.join(names)}"
    return "", UserError(what, where=where, mend=mend)


def _defaults(layers: Layers, overrides: Sequence[str]) -> Layers:
    """What lies below every stage."""
    shared = Layers()
    for layer in layers.layers:
        if (below := layer.below(("defaults",))) is not None:
            _add(shared, below)
    merged = shared.merged()
    for text in overrides:
        before = len(shared.overrides)
        merged = override(shared, merged, text, below="defaults.")
        for path, _ in shared.overrides[before:]:
            shared.layers.append(Layer(f"command line: {text}", _alone(merged, path)))
    # A stage may say otherwise, which no override lets it.
    shared.overrides.clear()
    return shared


def _alone(merged: Any, path: KeyPath) -> dict[str, Any]:
    """Nothing but what a path leads to; a list whole, because lists replace each other."""
    named = path[: next((at for at, part in enumerate(path) if isinstance(part, int)), len(path))]
    value = merged
    for part in named:
        value = value[part]
    found: dict[str, Any] = put({}, named, value)
    return found


def _recipe_of(layers: Layers, shared: Layers, stage: str) -> Layers:
    """The layers of one stage."""
    recipe = Layers(layers=list(shared.layers))
    for layer in layers.layers:
        if (below := layer.below(("stages", stage))) is not None:
            _add(recipe, below)
    return recipe


def _add(target: Layers, layer: Layer) -> None:
    file = Path(layer.name)
    target.add(layer, [file.resolve()] if layer.node is not None else [])


def _between(
    name: str | None, stages: dict[str, Config], recipes: dict[str, Layers], top: Layers
) -> Iterator[UserError]:
    """What is wrong between stages that are right by themselves."""
    for stage, key, problem in problems_in(name, stages):
        if stage:
            path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
            where = recipes[stage].locate(path) or top.locate(("stages", stage))
            yield in_stage(stage, UserError(problem.what, where=where, mend=problem.mend))
        else:
            yield problem
