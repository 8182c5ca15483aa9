"""Promise 9: the same recipe in one process and in many gives the same run. Only the section `cluster` differs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.cluster.session import worker_environment
from strop.tracking.episodes import read_episodes

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
CPUS = 6
# Sums of two digits, of which a small model soon gets some right and some wrong.
EASY = ["data.train.arguments={count: 80, digits: 1}", "data.eval.arguments={count: 10, digits: 1, split: eval}"]
SMALL = ["model.create.hidden_size=64"]
COMMON = ["hardware={device: cpu, threads: 1}", "tracking={display: off, tensorboard: false}", "evaluation.every=0"]
RL = [
    *COMMON,
    "warmup=null",
    "model.create=null",
    *EASY,
    "checkpoint.every=2",
    # At a first update of a step the loss is the mean advantage, which is 0.
    "training.mini_batches=2",
]
FSDP = ["cluster.trainer={ranks: 2, backend: fsdp}"]
OF_THE_MACHINE = ("time/", "throughput/", "bubble/", "memory/", "publish/", "mismatch/")
"""Metrics that are not the same in two runs, or not in another process. `mismatch/` is rounding, near zero."""

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """`train("quickstart", "name", "key=value", ...)`: a run's folder; with `ray=True` on a cluster of six CPUs."""
    folder = tmp_path_factory.mktemp("runs")
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # From Ray 2.60 on a cluster that is started by itself asks for a token, and an address alone brings none.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **worker_environment(os.environ), **token, "OMP_NUM_THREADS": "1"}
    cluster = subprocess.Popen(
        [sys.executable, str(HERE / "cluster_to_attach_to.py"), str(CPUS)], env=environment, **pipes
    )
    trainer = subprocess.Popen([sys.executable, str(HERE / "recipes_to_run.py")], env=environment, **pipes)
    assert cluster.stdout is not None
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    address = ""

    def run(recipe: str, name: str, *overrides: str, ray: bool = False, strict: bool = False) -> Path:
        nonlocal address
        if ray and not address:
            address = cluster.stdout.readline().strip()
        given = [f"run.folder={folder}", f"run.name={name}", *overrides]
        given += [f"cluster.address={address}", "cluster.kind=ray"] if ray else []
        line = {"recipe": str(RECIPES / f"{recipe}.yaml"), "overrides": given, "strict": strict}
        print(json.dumps(line), file=trainer.stdin, flush=True)
        answer = json.loads(trainer.stdout.readline())
        assert "folder" in answer, answer["error"]
        return Path(answer["folder"])

    yield run
    for process in (trainer, cluster):
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def start(train: Train) -> str:
    """`model.path=...` of a model that can add a little."""
    warm = ["warmup.data.arguments={count: 80, flawed: 0.6, digits: 1}", "warmup.steps=40"]
    warm += ["warmup.optimizer.warmup_steps=10", "run.steps=1"]
    run = train("quickstart", "start", *COMMON, *EASY, *SMALL, *warm)
    return f"model.path={run / 'checkpoints' / 'step-000001' / 'model'}"


@pytest.fixture(scope="module")
def here(train: Train, start: str) -> Path:
    """Four steps in one process."""
    return train("quickstart", "here", *RL, "run.steps=4", "rollout.groups_per_step=8", start)


@pytest.fixture(scope="module")
def on_two(train: Train, start: str) -> Path:
    """Four steps on two trainer ranks, between which the weights are divided."""
    return train("quickstart", "on-two", *RL, "run.steps=4", "rollout.groups_per_step=8", start, *FSDP, ray=True)


def lines_of(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["kind"], record["step"]] = {
            name: value for name, value in record["metrics"].items() if not name.startswith(OF_THE_MACHINE)
        }
    return found


def sampled(run: Path) -> list[tuple[list[int], float]]:
    """Tokens and reward of every completion of every step."""
    paths = sorted((run / "episodes").glob("*.parquet"))
    assert paths
    return [(record.tokens.tolist(), record.reward) for path in paths for record in read_episodes(path)]


def assert_same(run: Path, expected: Path, *, relative: float = 1e-3, absolute: float = 1e-6) -> None:
    """All metrics of all lines. absolute: below it a number is rounding, as is a mean of advantages."""
    ours, theirs = lines_of(run), lines_of(expected)
    assert ours.keys() == theirs.keys()
    for at, line in theirs.items():
        assert ours[at].keys() == line.keys()
        assert ours[at] == pytest.approx(line, rel=relative, abs=absolute), at


def test_the_reference_run_learns_something(here: Path) -> None:
    """Or all that is compared might be zeros."""
    steps = [line for (kind, _), line in lines_of(here).items() if kind == "train"]
    assert len(steps) == 4
    assert all(line["grad_norm"] > 1e-3 and abs(line["loss"]) > 1e-4 for line in steps)
    assert len({line["loss"] for line in steps}) == 4


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param([], id="colocated"),
        pytest.param(["cluster.engines.count=2"], id="two-engines"),
        pytest.param(["rollout.engine.sleep=always"], id="colocated-in-turn"),
        pytest.param(["cluster.engines.count=2", "rollout.engine.sleep=always"], id="two-engines-in-turn"),
    ],
)
def test_a_recipe_gives_the_same_run_on_ray(
    train: Train, start: str, here: Path, cluster: list[str], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    run = train("quickstart", name, *RL, "run.steps=4", "rollout.groups_per_step=8", start, *cluster, ray=True)
    assert sampled(run) == sampled(here)
    assert_same(run, here)


def test_so_it_does_on_two_ranks(here: Path, on_two: Path) -> None:
    assert sampled(on_two) == sampled(here)
    assert_same(on_two, here)


def test_ranks_say_together_what_rounding_does_to_the_probe(train: Train, start: str) -> None:
    """Where nothing is taken for rounding that the ranks did not measure."""
    overrides = ["run.steps=1", "rollout.groups_per_step=4", start, *FSDP, "rollout.engine.pack_weights=true"]
    run = train("quickstart", "rounding", *RL, *overrides, ray=True, strict=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["metrics"]["publish/probe_gap"] for line in lines if "publish/probe_gap" in line["metrics"]]
    assert gaps
    assert all(1e-12 < gap < 1e-4 for gap in gaps)


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_engines_and_ranks_agree_to_the_last_bit_in_the_consistent_mode(train: Train, start: str, backend: str) -> None:
    """Each side is in processes of its own, which have the weights and the mode from the recipe alone."""
    mode = ["rollout.engine.consistent=true", "model.dtype=bfloat16", "cluster.engines.count=2"]
    mode += [f"cluster.trainer={{ranks: 2, backend: {backend}}}"]
    run = train(
        "quickstart", f"consistent-{backend}", *RL, *mode, "run.steps=3", "rollout.groups_per_step=8", start, ray=True
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [
        (m["mismatch/max"], m["mismatch/mean"]) for m in (line["metrics"] for line in steps if line["kind"] == "train")
    ]
    assert gaps == [(0.0, 0.0)] * 3


def test_a_run_of_two_ranks_goes_on_with_one_and_with_four(train: Train, start: str, on_two: Path) -> None:
    settings = [*RL, "rollout.groups_per_step=8", start]
    stopped = train("quickstart", "stopped", *settings, "run.steps=2", *FSDP, ray=True)
    assert max(step for _, step in lines_of(stopped)) == 2
    shutil.copytree(stopped, stopped.with_name("by-one"))
    ones = train("quickstart", "by-one", *settings, "run.steps=4")
    fours = train("quickstart", "stopped", *settings, "run.steps=4", "cluster.trainer={ranks: 4}", ray=True)
    assert fours == stopped
    for run in (ones, fours):
        assert sampled(run) == sampled(on_two)
        whole, parts = lines_of(on_two), lines_of(run)
        for name in ("loss", "grad_norm"):
            assert parts["train", 3][name] == pytest.approx(whole["train", 3][name], rel=1e-5, abs=1e-7), name
        # The step after it stands on what the optimizer remembered as well.
        assert parts["train", 4] == pytest.approx(whole["train", 4], rel=1e-3, abs=1e-6)


SFT = [*COMMON, *EASY, *SMALL, "run.steps=4", "supervised.batch_size=16", "training.optimizer.schedule=constant"]
PPO = [*RL, "run.steps=3", "rollout.groups_per_step=32", "critic.warmup_steps=1"]


def test_supervised_learning_on_two_ranks(train: Train) -> None:
    alone = train("sft-tiny", "sft-here", *SFT)
    ranks = train("sft-tiny", "sft-on-two", *SFT, *FSDP, ray=True)
    assert_same(ranks, alone)


@pytest.mark.parametrize("shared", [False, True], ids=["own-critic", "shared-critic"])
def test_ppo_on_two_ranks(train: Train, start: str, shared: bool) -> None:
    critic = "critic={shared: true, warmup_steps: 1, optimizer: {learning_rate: 1.0e-3}}"
    settings = [*PPO, start, *([critic] if shared else [])]
    alone = train("ppo-tiny", f"ppo-here-{shared}", *settings)
    ranks = train("ppo-tiny", f"ppo-on-two-{shared}", *settings, *FSDP, ray=True)
    assert sampled(ranks) == sampled(alone)
    assert_same(ranks, alone)
    if shared:
        return
    # Each rank writes what it held while the ranks go on, and it is what it would have been.
    behind = train("ppo-tiny", "ppo-behind", *settings, *FSDP, "checkpoint.in_background=true", ray=True)
    assert sampled(behind) == sampled(ranks)
    for step in (2, 3):
        ours, theirs = (files_of(run / "checkpoints" / f"step-{step:06d}") for run in (behind, ranks))
        assert ours.keys() == theirs.keys()
        assert "state/critic/sharded/__1_0.distcp" in ours
        for name, content in theirs.items():
            assert ours[name] == content, f"step {step}: {name}"


def files_of(folder: Path) -> dict[str, bytes]:
    """All but a description that names its folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".metadata"
    }
