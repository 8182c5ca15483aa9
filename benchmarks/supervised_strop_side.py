"""strop's side of `supervised_against_trl.py`: the public loop, timed. Started by it, with the job as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from typing import Any

import measure


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds and loss of each step, the first of which is the warm-up, and the peak memory of this process."""
    measure.use_threads(job["threads"])
    import strop

    with tempfile.TemporaryDirectory() as folder:
        steps = asyncio.run(_steps(recipe(job, folder), job["steps"]))
    return {"steps": steps, "peak": measure.peak_bytes(), "versions": {"strop": strop.__version__}}


def recipe(job: dict[str, Any], folder: str) -> Any:
    """The job as a recipe; what it does not say is strop's default."""
    from strop.config import Config

    columns = {"answer": "completion"} if job["method"] == "sft" else {}
    found: dict[str, Any] = {
        "model": {"path": job["model"], "dtype": "float32"},
        "data": {"train": {"path": job["data"], "columns": columns}, "render": "text", "shuffle": False},
        "supervised": {"method": job["method"], "batch_size": job["rows"]},
        "training": {"optimizer": {"learning_rate": job["learning_rate"]}},
        "checkpoint": {"every": 1_000_000},
        "tracking": {"display": "off", "tensorboard": False},
        # One more than is done: the closing checkpoint belongs to no step.
        "run": {"steps": job["steps"] + 2, "folder": folder},
        "hardware": {"device": "cpu", "threads": job["threads"]},
    }
    if job["method"] == "dpo":
        found["supervised"]["beta"] = job["beta"]
    return Config.model_validate(found)


async def _steps(config: Any, measured: int) -> list[dict[str, float]]:
    from rows import digest

    from strop.loops.supervised import open_supervised_run

    found = []
    async with open_supervised_run(config, fresh=True) as run:
        await run.begin()
        for step in range(1, measured + 2):
            started, started_cpu = time.perf_counter(), time.process_time()
            batch = await run.next_batch()
            stats = await run.update(batch)
            run.step = step
            metrics = run.record(batch, stats)
            await run.evaluate_and_save_if_due()
            total, cpu = time.perf_counter() - started, time.process_time() - started_cpu
            sizes = batch.lengths().tolist()
            examples = zip(batch.input_ids.split(sizes), batch.loss_mask.split(sizes), strict=True)
            found.append(
                {
                    "total": total,
                    "cpu": cpu,
                    "loss": metrics["loss"],
                    "tokens": metrics["tokens/read"],
                    "trained_tokens": metrics["tokens/trained"],
                    "digest": digest((ids.tolist(), mask.tolist()) for ids, mask in examples),
                }
            )
    return found


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
