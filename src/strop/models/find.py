"""Finding a model: a folder, a run, a pipeline, a checkpoint, a fetched name, or a name on the Hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from strop.errors import ModelError, UserError
from strop.models.fetch import KNOWN, download_from_hub, is_fetched, model_folder
from strop.models.folder import read_json
from strop.paths import user_path

POINTERS = ("latest", "best")
"""Files in a run's `checkpoints/` that name one of its checkpoints."""


def resolve_model(path: str) -> Path:
    """The folder that a `model.path` means; a name on the Hub is downloaded first.

    A run's folder means the model of its latest checkpoint, a checkpoint's folder the model in it, the files
    `checkpoints/latest` and `checkpoints/best` of a run the model of the checkpoint that they name, and a pipeline's
    folder the model of its last stage. A folder that exists comes before a name.

    Raises:
        ModelError: there is no such folder or name, the name was not fetched yet, or the Hub cannot be reached.
    """
    folder = user_path(path)
    if folder.exists():
        return _model_inside(folder)
    if path.startswith("stage:"):
        raise ModelError(
            f"{path!r} names a stage of a pipeline, and this recipe is not one",
            mend="name the run that the stage trained, such as runs/PIPELINE/STAGE",
        )
    if path in KNOWN:
        if is_fetched(path):
            return model_folder(path)
        raise ModelError(f"the model {path!r} is not on this machine yet", mend=f"strop models fetch {path}")
    if folder.name == "best" and folder.parent.name == "checkpoints":
        raise _no_best(folder.parent)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        try:
            return download_from_hub(path)
        except ModelError as error:
            # With a local folder of the first name, `runs/quikstart` is more likely a slip than a name on the Hub.
            if not folder.parent.is_dir():
                what = f"there is no folder {path!r}, and {error.what}"
                raise ModelError(what, where=error.where, mend=error.mend) from error
    siblings = [str(folder.parent / f.name) for f in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(str(folder), siblings, n=1) or difflib.get_close_matches(path, KNOWN, n=1)
    raise ModelError(
        f"there is no model folder {path!r}",
        where=str(folder.absolute()),
        mend=f"did you mean {near[0]!r}?"
        if near
        else "check the path; `strop models list` shows names that can be used",
    )


def checkpoint_of(run: str, which: str) -> str:
    """The path of one checkpoint of a run, or of a pipeline's last stage.

    Args:
        which: `latest`, `best`, or the number of a step.

    Raises:
        UserError: this is not a run, or it has no such checkpoint; those it has are named.
    """
    folder = run_inside(user_path(run))
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(
            f"{run} is not a run with checkpoints, so none of them can be chosen",
            where=str(folder.absolute()),
            mend="name the folder of a run, or leave out --checkpoint",
        )
    if which in POINTERS and (checkpoints / which).is_file():
        return str(checkpoints / which)
    if which == "best":
        raise _no_best(checkpoints)
    target = checkpoints / f"step-{int(which):06d}" if which.isdigit() else None
    if target is not None and target.is_dir():
        return str(target)
    there = [*(name for name in POINTERS if (checkpoints / name).is_file()), *_steps(checkpoints)]
    raise UserError(
        f"the run has no checkpoint {which!r}",
        where=str(checkpoints),
        mend=f"there is {', '.join(there)}" if there else "train until its first checkpoint",
    )


def run_inside(folder: Path) -> Path:
    """The run that a folder means: that of a pipeline's last stage, given a pipeline; else the folder itself.

    Raises:
        UserError: the pipeline has not come to its last stage.
    """
    if not (folder / "pipeline.json").is_file():
        return folder
    stages = read_json(folder / "pipeline.json").get("stages") or []
    run = stages[-1].get("run") if stages else None
    if run is None or not (folder / run / "run.json").is_file():
        trained = [str(folder / stage["run"]) for stage in stages if stage.get("run")]
        raise ModelError(
            "the pipeline has not come to its last stage" + (f", {stages[-1].get('name')}" if stages else ""),
            where=str(folder),
            mend=f"name the run of a stage: {', '.join(trained)}" if trained else "train it first",
        )
    return folder / run


def _model_inside(folder: Path) -> Path:
    """The model's own folder, given it, a checkpoint's (`model/`) or a run's (`checkpoints/step-N/model/`)."""
    if (folder / "config.json").exists():
        return folder
    if (folder / "model" / "config.json").exists():
        return folder / "model"
    if folder.is_file() and folder.name in POINTERS:
        return _pointed_at(folder)
    folder = run_inside(folder)
    checkpoints = folder if (folder / "latest").is_file() else folder / "checkpoints"
    if (checkpoints / "latest").is_file():
        return _pointed_at(checkpoints / "latest")
    if (folder / "run.json").exists() or checkpoints.is_dir():
        raise ModelError(
            "the run has no checkpoint yet",
            where=str(folder),
            mend="train until its first checkpoint, or use another run",
        )
    return folder


def _pointed_at(pointer: Path) -> Path:
    target = pointer.parent / pointer.read_text(encoding="utf-8").strip() / "model"
    if target.is_dir():
        return target
    raise ModelError(
        f"the run's {pointer.name} checkpoint has no model",
        where=str(target),
        mend="name another checkpoint's folder",
    )


def _no_best(checkpoints: Path) -> ModelError:
    steps = _steps(checkpoints)
    return ModelError(
        "the run keeps no best checkpoint",
        where=str(checkpoints),
        mend="set checkpoint.best in its recipe and train it"
        + (f", or choose another: latest, {', '.join(steps)}" if steps else ""),
    )


def _steps(checkpoints: Path) -> list[str]:
    """The steps of the checkpoints in a folder, as numbers without leading zeros."""
    found = [path.name.removeprefix("step-") for path in checkpoints.glob("step-*") if (path / "model").is_dir()]
    return [str(step) for step in sorted(int(step) for step in found if step.isdigit())]
