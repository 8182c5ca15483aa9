"""strop's side of `against_trl.py`: the public loop, timed. Started by it, with the job as JSON.

`against_trl_gpu_strop_side.py` uses it too, with jobs that also name a device, a number format and an engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import measure


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each measured step, and the peak memory of this process."""
    import strop

    with tempfile.TemporaryDirectory() as folder:
        steps = asyncio.run(timed_steps(recipe(job, folder), job["steps"]))[1:]
    return {"steps": steps, "peak": measure.peak_bytes(), "versions": {"strop": strop.__version__}}


def recipe(job: Mapping[str, Any], folder: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The job as a recipe, with changes by dotted key; what it does not say is strop's default."""
    from strop.config import Config

    data: dict[str, Any] = {
        "model": {"path": job["model"], "dtype": job.get("dtype", "float32")},
        "data": {"train": {"path": job["data"]}, "render": "text", "shuffle": False},
        "rewards": {"verifiers": [{"kind": "python", "function": "texts:coin"}]},
        "algorithm": {"name": "grpo"},
        "rollout": {
            "groups_per_step": job["prompts"],
            "group_size": job["group_size"],
            "max_new_tokens": job["new_tokens"],
            "engine": job.get("engine", {}),
        },
        "training": {"optimizer": {"learning_rate": job["learning_rate"]}},
        # The one of the beginning is written at once, or it would be written beside the steps.
        "checkpoint": {"every": 1_000_000, "in_background": False},
        "tracking": {"display": "off", "tensorboard": False},
        # One more than is done: the closing checkpoint belongs to no step.
        "run": {"steps": job["steps"] + 2, "folder": folder},
        "hardware": {"device": job.get("device", "cpu"), "threads": job["threads"]},
    }
    for key, value in (changes or {}).items():
        *path, name = key.split(".")
        section = data
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return Config.model_validate(data)


async def timed_steps(
    config: Any,
    measured: int,
    *,
    began: Callable[[], None] = lambda: None,
    kept: Callable[[list[dict[str, float]], Mapping[str, float]], None] = lambda steps, metrics: None,
) -> list[dict[str, float]]:
    """What each step took, the first of which is the warm-up.

    Args:
        began: called when everything is loaded. kept: called after each step, with the steps so far and all metrics of
            the last.
    """
    import strop

    found: list[dict[str, float]] = []
    async with strop.open_run(config, fresh=True) as run:
        await run.begin()
        began()
        for step in range(1, measured + 2):
            started = time.perf_counter()
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step = step
            await run.publish()
            await run.look(groups)
            metrics = run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
            total = time.perf_counter() - started
            parts = {part: metrics[f"time/{part}"] for part in ("sampling", "training", "publishing")}
            scoring = metrics["time/verifying"] + metrics["time/scoring"]
            found.append(
                {
                    "total": total,
                    **parts,
                    "scoring": scoring,
                    "other": total - scoring - sum(parts.values()),
                    "tokens": metrics["tokens/sampled"],
                    "prompt_tokens": float(batch.input_ids.shape[0]) - metrics["tokens/sampled"],
                }
            )
            kept(found, metrics)
    return found


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
