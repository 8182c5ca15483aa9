"""What a run is called, which models it begins with and asks, and which runs made them."""

from __future__ import annotations

from pathlib import Path

from strop.config import Config
from strop.config.pipeline import model_paths
from strop.errors import UserError
from strop.models.find import resolve_model
from strop.models.folder import fingerprint_folder
from strop.tracking.run_directory import read_manifest

Inputs = dict[str, dict[str, str]]
"""By the key that names the model: `path` as the recipe has it, `folder` that it means now, `fingerprint` of its
contents, and of a model that strop trained `run` (the run's id) and `checkpoint`."""


def run_name(config: Config, recipe: str | None) -> str:
    """`run.name`, else the recipe's file name, else "run"."""
    return config.run.name or (Path(recipe).stem if recipe else "run")


def inputs_of(config: Config) -> Inputs:
    """The models that a recipe names, as they are now.

    Raises:
        ModelError: one is not there.
    """
    found: Inputs = {}
    for key, path in model_paths(config).items():
        folder = resolve_model(path)
        found[key] = {"path": path, "folder": str(folder), "fingerprint": fingerprint_folder(folder)} | _made_by(folder)
    return found


def same_models(then: Inputs, now: Inputs) -> set[str]:
    """The keys that name a model of the same contents as before, whatever its path is now."""
    return {key for key, model in now.items() if then.get(key, {}).get("fingerprint") == model["fingerprint"]}


def other_models(then: Inputs, now: Inputs) -> list[str]:
    """The keys that name another model than before."""
    return [key for key in now if key in then and key not in same_models(then, now)]


def _made_by(folder: Path) -> dict[str, str]:
    checkpoint = folder.parent
    if checkpoint.parent.name != "checkpoints":
        return {}
    try:
        return {"run": read_manifest(checkpoint.parent.parent).id, "checkpoint": checkpoint.name}
    except UserError:
        return {}
