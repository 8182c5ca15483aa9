"""`strop train --profile` and the speed figures where trainer and engines are in other processes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "loops"))

from tiny_runs import command, environment, recipe
from transformers import AutoConfig

from strop.planning.flops import work_of_config
from strop.tracking.episodes import read_episodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two trainer ranks and an engine; the second is profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    data = recipe(**{"cluster.kind": "ray", "cluster.trainer": {"ranks": 2, "backend": "ddp"}})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    done = subprocess.run(
        command("train", "recipe.yaml", "--profile", "2"), cwd=folder, env=environment(), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "recipe"


def test_the_profile_is_the_drivers_and_says_so(run: Path) -> None:
    folder = run / "profile" / "step-000002"
    text = (folder / "profile.txt").read_text(encoding="utf-8")
    assert "operators and memory of the other processes are not in it" in text
    assert "parts of training" not in text
    assert "weights" not in text
    with gzip.open(folder / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    phases = [event["name"] for event in events if event.get("cat") == "phase"]
    assert phases[:5] == ["sampling", "verifying", "scoring", "training", "publishing"]
    assert not any(event["name"] == "optimizer" for event in events)


def test_the_work_of_all_ranks_is_counted_and_divided_by_their_number(run: Path) -> None:
    work = work_of_config(AutoConfig.from_pretrained(run / "checkpoints" / "step-000002" / "model"))
    assert work is not None
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "train"]
    assert len(steps) == 2
    for step, metrics in enumerate(steps, start=1):
        lengths = np.array(
            [len(record.tokens) for record in read_episodes(run / "episodes" / f"step-{step:06d}.parquet")]
        )
        packed, trained = metrics["throughput/packed_tokens"], metrics["tokens/trained"]
        assert trained < packed <= lengths.sum()
        flops = work.computed(int(packed), int(metrics["throughput/attention_pairs"]), int(trained), lengths)
        assert metrics["throughput/training_tflops"] == pytest.approx(flops / metrics["time/training"] / 2 / 1e12)
