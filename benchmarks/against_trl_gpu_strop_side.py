"""strop's side of `against_trl_gpu.py`: the public loop, timed. Started by it, with the job as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import card
import measure


def main(job: dict[str, Any]) -> dict[str, Any]:
    """What each step took, the first of which is the warm-up, and what the start took."""
    import strop_side

    import strop

    started = time.perf_counter()
    found: dict[str, Any] = {}

    def began() -> None:
        found["start_seconds"] = time.perf_counter() - started
        card.forget_peak()

    def kept(steps: list[dict[str, float]], metrics: Mapping[str, float]) -> None:
        mismatch = {"mismatch_mean": metrics["mismatch/mean"], "mismatch_max": metrics["mismatch/abs_max"]}
        steps[-1] |= {**mismatch, "probe_gap": metrics["publish/probe_gap"], **card.memory()}
        # What is known so far, should a later step take too long.
        found.update(card.about(), weights=job["dtype"], steps=steps)
        found["versions"]["strop"] = strop.__version__
        Path(job["progress"]).write_text(json.dumps(found))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(strop_side.timed_steps(strop_side.recipe(job, folder), job["steps"], began=began, kept=kept))
    return found


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
