"""What a checkpoint was made of: data, configuration, code, and the models before it, back to where strop began."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.serve.registry.signing import sha256_of
from strop.tracking.metrics import read_metrics
from strop.tracking.run_directory import Manifest, read_manifest

DEEPEST = 50


def lineage_of(run: Path, checkpoint: str, *, root: Path) -> dict[str, Any]:
    """What a checkpoint of a run was made of, as JSON-ready values.

    Args:
        checkpoint: its folder's name. root: where the runs are kept, among which those before it are looked for.

    Raises:
        UserError: there is no such run.
    """
    return _of(run, checkpoint, _runs_by_id(root), DEEPEST)


def scores_at(run: Path, step: int) -> dict[str, float]:
    """What was measured on held-out data with the weights of a step; empty if nothing was."""
    found: dict[str, float] = {}
    for record in read_metrics(run / "metrics.jsonl", kind="eval"):
        if record.step == step:
            found = {name.removeprefix("eval/"): v for name, v in record.metrics.items() if math.isfinite(v)}
    return found


def _of(run: Path, checkpoint: str, runs: dict[str, Path], left: int) -> dict[str, Any]:
    manifest = read_manifest(run)
    config = run / "config.yaml"
    return {
        "run": manifest.id,
        "name": run.name,
        "checkpoint": checkpoint,
        "config_hash": manifest.config_hash,
        "config_sha256": sha256_of(config) if config.is_file() else "",
        "data": _plain(manifest.data),
        "model": _plain(manifest.model),
        "seeds": _plain(manifest.seeds),
        "versions": _plain(manifest.versions),
        "git": _plain(manifest.git),
        "created": manifest.created,
        "inputs": [_input(key, made, manifest, runs, left) for key, made in sorted(manifest.inputs.items())],
    }


def _input(key: str, made: dict[str, str], manifest: Manifest, runs: dict[str, Path], left: int) -> dict[str, Any]:
    """A model that a run began with or asked; with what it was made of, if that run is here."""
    found: dict[str, Any] = {"key": key, "path": made.get("path", ""), "fingerprint": made.get("fingerprint", "")}
    before = made.get("run")
    if before and before != manifest.id and left > 0:
        found["run"] = before
        if before in runs:
            try:
                found["made_of"] = _of(runs[before], made.get("checkpoint", ""), runs, left - 1)
            except UserError:
                found["made_of"] = None
    return found


def _runs_by_id(root: Path) -> dict[str, Path]:
    found = {}
    for file in (*root.glob("*/run.json"), *root.glob("*/*/run.json")):
        try:
            found[str(json.loads(file.read_text(encoding="utf-8"))["id"])] = file.parent
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _plain(values: Any) -> Any:
    """Values that JSON has one way to write: numbers that are not finite are null."""
    if isinstance(values, dict):
        return {str(key): _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
