"""What the display says of a run when it starts or goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.loops.base_run import BaseRun


def facts_of(run: BaseRun, about: dict[str, str]) -> dict[str, str]:
    """What a run is, by name. about: what runs of its kind say of themselves."""
    facts = {
        "model": f"{run.roles.loaded.name} ({run.roles.parameters})",
        "data": run.prepared.train.source.describe(),
        **about,
        "device": run.prepared.hardware.reasons[0],
        "processes": "; ".join(run.place.reasons),
        "sizes": "; ".join(run.roles.sizes.reasons),
        "run": str(run.folder),
    }
    return {name: value for name, value in facts.items() if value}


def why_done(run: BaseRun) -> str:
    """Why a run that goes on has nothing to do; empty where it has."""
    if run.step >= run.config.run.steps:
        return (
            f"all {run.step} steps of this run are done; raise run.steps to go on with it, or start a new run with "
            "--fresh"
        )
    if run.stopped:
        return (
            f"this run ended early, after step {run.step} of {run.config.run.steps}: {run.stopped}; raise "
            "evaluation.early_stop.patience to go on with it, or start a new run with --fresh"
        )
    return ""
