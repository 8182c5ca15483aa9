"""Looking at all stages of a pipeline before the first one begins.

A stage that uses what an earlier one will make is looked at with a stand-in: a folder with the tokenizer, the context
and the kind of model that the earlier stage is going to end with, since these do not change in training. So everything
that is checked of a single recipe is checked here, but for the weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from strop.config import Config
from strop.config.pipeline import PipelineConfig, gives_scores, inputs, reference_of, with_paths
from strop.errors import ConfigError, UserError
from strop.loops.prepare import prepare
from strop.loops.prepare_examples import prepare_examples
from strop.models.find import resolve_model
from strop.models.folder import CAUSAL_ENDINGS, SCALAR_ENDING, read_json


def check_stages(config: PipelineConfig, done: Mapping[str, Path]) -> None:
    """Check the recipes of all stages that are to be trained. Writes nothing but to a temporary folder.

    Args:
        done: the runs of the stages that are not trained any more.

    Raises:
        ConfigError: with the first problem of each stage.
    """
    problems: list[UserError] = []
    with tempfile.TemporaryDirectory(prefix="strop-stages-") as place:
        models = {stage: str(run) for stage, run in done.items()}
        for stage, recipe in config.stages.items():
            if stage in done or any(name not in models for name in inputs(recipe)):
                continue
            settled = _with_models(recipe, models)
            try:
                models[stage] = str(_stand_in(settled, Path(place) / stage))
                _check(settled)
            except UserError as error:
                found = error.problems if isinstance(error, ConfigError) else [error]
                stand_ins = {name: path for name, path in models.items() if path.startswith(place)}
                problems += [_told(problem, stage, stand_ins) for problem in found]
    if problems:
        raise ConfigError(problems)


def _check(config: Config) -> None:
    if config.supervised is not None:
        prepare_examples(config)
    else:
        prepare(config).close()


def _with_models(recipe: Config, models: Mapping[str, str]) -> Config:
    def found(path: str) -> str:
        reference = reference_of(path)
        # Which checkpoint it will be makes no difference to what is looked at.
        return path if reference is None else models[reference.stage]

    settled: Config = with_paths(recipe, found)
    return settled


def _stand_in(config: Config, folder: Path) -> Path:
    """A folder that looks like the model that a stage will make."""
    if config.model.create is None:
        assert config.model.path is not None
        base = resolve_model(config.model.path)
    else:
        from strop.models.create import create_model
        from strop.models.save import save_model

        base = folder / "model"
        save_model(*create_model(config.model.create, seed=config.run.seed), base)
    if not gives_scores(config):
        return base
    scalar = folder / "scores"
    scalar.mkdir(parents=True)
    for file in base.iterdir():
        if file.name != "config.json" and file.is_file():
            (scalar / file.name).symlink_to(file.resolve())
    settings = read_json(base / "config.json")
    named = [str(name) for name in settings.get("architectures") or ["ForCausalLM"]]
    for ending in CAUSAL_ENDINGS:
        named = [f"{name.removesuffix(ending)}{SCALAR_ENDING}" if name.endswith(ending) else name for name in named]
    settings |= {"architectures": named, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (scalar / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return scalar


def _told(problem: UserError, stage: str, stand_ins: Mapping[str, str]) -> UserError:
    """A problem as one of a stage, in which stand-ins have the names of their stages."""

    def named(text: str) -> str:
        for name, path in stand_ins.items():
            text = text.replace(path, f"stage:{name}")
        return text

    return UserError(f"stage {stage}: {named(problem.what)}", where=named(problem.where), mend=named(problem.mend))
