"""The examples run, and the loop in sight is the loop of `strop train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "quickstart.py"
RECIPE = ROOT / "recipes" / "quickstart.yaml"
SMALL = [
    "model.create.hidden_size=32",
    "model.create.layers=1",
    "data.train.arguments.count=200",
    "data.eval.arguments.count=10",
    "warmup.data.arguments.count=200",
    "warmup.steps=3",
    "warmup.batch_size=8",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "evaluation.every=1",
    "run.steps=2",
    "tracking.tensorboard=false",
    "hardware.threads=1",
]
# One process for both, because most of what either takes is importing torch and transformers.
BOTH = f"""
import runpy, sys, strop
sys.argv[1:] = {[*SMALL, "run.folder=script"]!r}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
strop.train(strop.load_config({str(RECIPE)!r}, {[*SMALL, "run.name=loop", "run.folder=command"]!r}))
"""


def steps(run: Path) -> list[tuple[str, int]]:
    """Kind and step of each line of a run's metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"]) for line in lines]


def test_the_quickstart_fits_in_thirty_lines() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 30


def test_the_quickstart_is_what_strop_train_does(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BOTH], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    runs = [tmp_path / side / "loop" for side in ("script", "command")]
    # Equal weights say that every verb was called, in this order, with these arguments.
    weights = [(run / "checkpoints/step-000002/model/model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    assert steps(runs[0]) == steps(runs[1])
    assert "model: " in done.stdout
