"""Promise 5: nothing is lost. Runs are killed with SIGKILL, the same command is given again until they are done, and
the result is compared with that of a run that nobody disturbed: bit for bit.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_processes import Process, kill_at, lines, started, write
from tiny_runs import HELD_OUT, environment, episodes_of, recipe, steps_of, weights_of
from tiny_stages import pipeline


def long_recipe(**changes: Any) -> dict[str, Any]:
    return recipe(**{"run.steps": 12, "checkpoint.every": 3, "data.eval": HELD_OUT, "evaluation.every": 4, **changes})


def same(left: Path, right: Path) -> None:
    """Two finished runs are the same, bit for bit."""
    assert weights_of(left) == weights_of(right)
    # Every step exactly once, in order, with the same numbers.
    assert steps_of(left) == steps_of(right)
    prompts = [Counter(record.prompt_id for record in episodes_of(run)) for run in (left, right)]
    assert prompts[0] == prompts[1]
    completions = [[(r.group, r.sample, r.completion_text) for r in episodes_of(run)] for run in (left, right)]
    assert completions[0] == completions[1]


# --- the promise ---------------------------------------------------------------------------------------------------


def test_killed_at_five_random_moments(tmp_path: Path, nursery: Callable[[Path], Process]) -> None:
    quiet, killed = (write(tmp_path / name, long_recipe()) for name in ("quiet", "killed"))
    chance = random.Random(2)
    # Increasing, or a later moment would lie before the checkpoint that the run goes on from. The first and the last
    # process come from the shell's command, those between from the nursery, which saves a minute of imports.
    for number, step in enumerate(sorted(chance.sample(range(1, 12), 5))):
        process = started(killed) if number == 0 else nursery(killed)
        # Between a line of metrics and the next lie an evaluation, a checkpoint, sampling and training.
        kill_at(process, killed / "runs" / "recipe", step, after=chance.random() * 0.04)
    assert started(killed).wait() == 0
    assert nursery(quiet).wait() == 0
    same(quiet / "runs" / "recipe", killed / "runs" / "recipe")
    run = killed / "runs" / "recipe"
    assert lines(run, "train") == list(range(1, 13))
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["status"] == "finished"
    assert len(manifest["resumed"]) == 5
    assert not list((run / "checkpoints").glob(".*.partial"))


WARMUP = {"steps": 20, "batch_size": 4}


@pytest.mark.parametrize(
    ("changes", "moments"),
    [
        pytest.param({"warmup": WARMUP}, [("warmup", 5), ("warmup", 15)], id="in the warm-up"),
        pytest.param({"model.lora": {"rank": 4, "dropout": 0.1}}, [("train", 5), ("train", 7)], id="with adapters"),
        pytest.param(
            {"warmup": WARMUP, "training.mini_batches": 2, "algorithm.kl_coef": 0.1},
            [("train", 4), ("train", 7)],
            id="with a reference that a warm-up made",
        ),
        pytest.param({"model.dtype": "bfloat16"}, [("train", 4)], id="with float32 masters"),
        pytest.param(
            {
                "data.train.arguments.count": 8,
                "data.curriculum": {},
                "rewards.verifiers": [{"kind": "regex", "pattern": "[0-4]$"}],
                "rollout.group_size": 2,
                "algorithm.without_spread": "resample",
            },
            [("train", 4), ("train", 7)],
            id="with a curriculum",
        ),
    ],
)
def test_killed_with(
    tmp_path: Path, nursery: Callable[[Path], Process], changes: dict[str, Any], moments: list[tuple[str, int]]
) -> None:
    data = long_recipe(**{"run.steps": 9, **changes})
    quiet, killed = (write(tmp_path / name, data) for name in ("quiet", "killed"))
    for kind, step in moments:
        kill_at(nursery(killed), killed / "runs" / "recipe", step, kind=kind)
    assert nursery(killed).wait() == 0, (killed / "output.txt").read_text()
    assert nursery(quiet).wait() == 0, (quiet / "output.txt").read_text()
    same(quiet / "runs" / "recipe", killed / "runs" / "recipe")
    if "warmup" in changes:
        assert lines(killed / "runs" / "recipe", "warmup") == list(range(1, 21))


# The checkpoint of step 6 is written behind, and is flushed for ever.
STUCK = """
import sys, time
from pathlib import Path
from strop.training import checkpoint

flush = checkpoint.sync_path

def stuck(path):
    if "step-000006" in str(path) and "model" in str(path):
        Path("flushing").touch()
        time.sleep(600)
    flush(path)

checkpoint.sync_path = stuck
sys.argv = ["strop", "train", "recipe.yaml"]
import strop.cli
strop.cli.main()
"""


@pytest.mark.parametrize("changes", [{}, {"model.lora": {"rank": 4, "dropout": 0.1}}], ids=["all weights", "adapters"])
def test_killed_while_a_checkpoint_is_written_behind(
    tmp_path: Path, nursery: Callable[[Path], Process], changes: dict[str, Any]
) -> None:
    data = long_recipe(**{"run.steps": 9, "checkpoint.in_background": True, **changes})
    quiet, killed = (write(tmp_path / name, data) for name in ("quiet", "killed"))
    run = killed / "runs" / "recipe"
    with (killed / "output.txt").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK], cwd=killed, env=environment(), stdout=output, stderr=output
        )
    # Training goes on meanwhile, up to where the next checkpoint waits for this one.
    kill_at(Process(process.pid, killed, process.poll), run, 9)
    assert (killed / "flushing").exists()
    assert (run / "checkpoints" / "latest").read_text() == "step-000003\n"
    assert (run / "checkpoints" / ".step-000006.partial" / "model").is_dir()
    assert not (run / "checkpoints" / "step-000006").exists()
    assert nursery(killed).wait() == 0, (killed / "output.txt").read_text()
    assert nursery(quiet).wait() == 0, (quiet / "output.txt").read_text()
    same(quiet / "runs" / "recipe", run)
    assert lines(run, "train") == list(range(1, 10))
    assert not list((run / "checkpoints").glob(".*.partial"))


def test_killed_while_learning_from_a_file(tmp_path: Path, nursery: Callable[[Path], Process]) -> None:
    """Recorded completions: the order of the groups, and ratios against computed log-probabilities of the start."""
    from strop.config.loading import load_config
    from strop.loops.rollout import rollout

    file = tmp_path / "rollouts.parquet"
    rollout(load_config(None, data=recipe()), file, prompts=10)
    data = long_recipe(**{"data": {"train": {"path": str(file)}}, "offline": {"logprobs": "compute"}, "run.steps": 9})
    del data["rewards"], data["rollout"]["group_size"], data["evaluation"]
    quiet, killed = (write(tmp_path / name, data) for name in ("quiet", "killed"))
    for step in (4, 7):
        kill_at(nursery(killed), killed / "runs" / "recipe", step)
    assert nursery(killed).wait() == 0, (killed / "output.txt").read_text()
    assert nursery(quiet).wait() == 0, (quiet / "output.txt").read_text()
    same(quiet / "runs" / "recipe", killed / "runs" / "recipe")


def test_a_pipeline_killed_in_every_stage(tmp_path: Path, nursery: Callable[[Path], Process]) -> None:
    """Demonstrations, a reward model, PPO with both: killed in each, twice in the second, and at its very end."""
    data = pipeline(
        **{
            "defaults.tracking.display": "plain",
            "defaults.checkpoint": {"every": 4},
            "stages.sft.run.steps": 20,
            "stages.judge.run.steps": 30,
            "stages.ppo.run.steps": 9,
        }
    )
    quiet, killed = (write(tmp_path / name, data) for name in ("quiet", "killed"))
    runs = killed / "runs" / "recipe"
    moments = [("sft", 6), ("judge", 7), ("judge", 18), ("judge", 30), ("ppo", 5)]
    for number, (stage, step) in enumerate(moments):
        process = started(killed) if number == 0 else nursery(killed)
        kill_at(process, runs / stage, step)
    assert nursery(killed).wait() == 0, (killed / "output.txt").read_text()
    assert nursery(quiet).wait() == 0, (quiet / "output.txt").read_text()
    for stage in ("sft", "judge", "ppo"):
        same(quiet / "runs" / "recipe" / stage, runs / stage)
    resumed = [len(json.loads((runs / stage / "run.json").read_text())["resumed"]) for stage in ("sft", "judge", "ppo")]
    assert resumed[0] == 1
    assert resumed[1] >= 2
    assert resumed[2] == 1
    manifest = json.loads((runs / "pipeline.json").read_text())
    assert manifest["status"] == "finished"
    assert [(stage["status"], stage["run"]) for stage in manifest["stages"]] == [
        ("finished", "sft"),
        ("finished", "judge"),
        ("finished", "ppo"),
    ]
    # From the kill in the second stage on, the first is not trained any more; nor the second from that in the third on.
    said = (killed / "output.txt").read_text()
    assert said.count("stage sft: done, skipped") == 4
    assert said.count("stage judge: done, skipped") in (1, 2)
