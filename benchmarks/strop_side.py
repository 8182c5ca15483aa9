"""strop's side of `against_trl.py`: the public loop, timed. Started by it, with the job as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from typing import Any

import measure


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each measured step, and the peak memory of this process."""
    import strop

    with tempfile.TemporaryDirectory() as folder:
        steps = asyncio.run(_steps(recipe(job, folder), job["steps"]))
    return {"steps": steps, "peak": measure.peak_bytes(), "versions": {"strop": strop.__version__}}


def recipe(job: dict[str, Any], folder: str) -> Any:
    """The job as a recipe; what it does not say is strop's default."""
    from strop.config import Config

    return Config.model_validate(
        {
            "model": {"path": job["model"], "dtype": "float32"},
            "data": {"train": {"path": job["data"]}, "render": "text", "shuffle": False},
            "rewards": {"verifiers": [{"kind": "python", "function": "texts:coin"}]},
            "algorithm": {"name": "grpo"},
            "rollout": {
                "groups_per_step": job["prompts"],
                "group_size": job["group_size"],
                "max_new_tokens": job["new_tokens"],
            },
            "training": {"optimizer": {"learning_rate": job["learning_rate"]}},
            "checkpoint": {"every": 1_000_000},
            "tracking": {"display": "off", "tensorboard": False},
            # One more than is done: the closing checkpoint belongs to no step.
            "run": {"steps": job["steps"] + 2, "folder": folder},
            "hardware": {"device": "cpu", "threads": job["threads"]},
        }
    )


async def _steps(config: Any, measured: int) -> list[dict[str, float]]:
    import strop

    found = []
    async with strop.open_run(config, fresh=True) as run:
        await run.begin()
        for step in range(1, measured + 2):
            started = time.perf_counter()
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step = step
            await run.publish()
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
    return found[1:]


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
