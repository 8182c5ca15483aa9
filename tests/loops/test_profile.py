"""`strop train --profile` and the speed figures of every step: real runs in processes of their own."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_runs import HELD_OUT, command, environment, episodes_of, recipe, steps_of, weights_of

from strop.config.loading import load_config
from strop.errors import UserError
from strop.loops.profile_page import REST
from strop.loops.profile_step import step_to_profile
from strop.loops.train import train
from strop.planning.flops import work_of_config
from strop.tracking.episodes import read_episodes
from strop.training.ranges import PARTS

SFT: dict[str, Any] = {
    **{key: value for key, value in recipe().items() if key not in ("rewards", "rollout")},
    "supervised": {"method": "sft", "batch_size": 8},
}
LONG = {"run.steps": 4, "checkpoint.every": 2, "data.eval": HELD_OUT, "evaluation.every": 3}


def run(folder: Path, data: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return subprocess.run(
        command("train", "recipe.yaml", *arguments), cwd=folder, env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def done(folder: Path, data: dict[str, Any], *arguments: str) -> tuple[Path, str]:
    """The folder of a run that went well, and what it said."""
    found = run(folder, data, *arguments)
    assert found.returncode == 0, found.stderr
    return folder / "runs" / "recipe", found.stdout + found.stderr


def table(text: str) -> dict[str, float]:
    """Seconds of the phases, as the page shows them."""
    block = text.split("phase ", 1)[1].split("\n\n")[0]
    return {name: float(number) for name, number in re.findall(r"^(\S.*?)  +(\d+\.\d{4}) ", block, re.MULTILINE)}


def trace_of(run: Path, step: int) -> list[dict[str, Any]]:
    with gzip.open(run / "profile" / f"step-{step:06d}" / "trace.json.gz", "rt", encoding="utf-8") as file:
        return list(json.load(file)["traceEvents"])


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return done(
        tmp_path_factory.mktemp("profiled") / "run", recipe(**LONG, **{"tracking.display": "plain"}), "--profile"
    )


@pytest.fixture(scope="module")
def text(profiled: tuple[Path, str]) -> str:
    return (profiled[0] / "profile" / "step-000003" / "profile.txt").read_text(encoding="utf-8")


def test_a_profiled_run_is_bit_equal_to_one_that_is_not(profiled: tuple[Path, str], tmp_path: Path) -> None:
    plain, _ = done(tmp_path / "plain", recipe(**LONG))
    assert steps_of(profiled[0]) == steps_of(plain)
    assert weights_of(profiled[0]) == weights_of(plain)
    mine, theirs = (
        [(e.prompt_text, e.completion_text, e.reward) for e in episodes_of(path)] for path in (profiled[0], plain)
    )
    assert mine == theirs
    assert not (plain / "profile").exists()


def test_the_third_step_is_recorded_and_the_end_says_where(profiled: tuple[Path, str]) -> None:
    folder, said = profiled
    assert [path.name for path in (folder / "profile").iterdir()] == ["step-000003"]
    names = sorted(path.name for path in (folder / "profile" / "step-000003").iterdir())
    assert names == ["profile.txt", "trace.json.gz"]
    assert "profile of step 3: runs/recipe/profile/step-000003/profile.txt" in said
    assert "USDT" not in said


def test_the_trace_has_the_phases_and_the_parts_of_training(profiled: tuple[Path, str]) -> None:
    events = [event for event in trace_of(profiled[0], 3) if event.get("ph") == "X"]
    phases = {event["name"]: event for event in events if event.get("cat") == "phase"}
    expected = ["sampling", "verifying", "scoring", "training", "publishing", "alarms", "recording", "evaluating"]
    assert list(phases) == expected
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in phases.values()]
    assert all(before[1] <= after[0] + 1 for before, after in pairwise(ends))
    named = {name: [e for e in events if e["name"] == name and e.get("cat") == "user_annotation"] for name in PARTS}
    start, end = phases["training"]["ts"], phases["training"]["ts"] + phases["training"]["dur"]
    for part in set(PARTS) - {"gradients"}:
        assert any(start <= e["ts"] and e["ts"] + e["dur"] <= end for e in named[part]), part
    assert len(named["optimizer"]) == 1
    # The engine samples in the event loop, and what it computes lies in the phase that is named for it.
    products = [e["ts"] for e in events if e["name"] == "aten::mm"]
    sampling = phases["sampling"]
    assert any(sampling["ts"] <= at <= sampling["ts"] + sampling["dur"] for at in products)
    first, last = min(s for s, _ in ends), max(e for _, e in ends)
    assert all(first <= at <= last for at in products)


def test_the_phases_add_up_to_the_step(text: str, profiled: tuple[Path, str]) -> None:
    rows = table(text)
    whole = rows.pop("whole step")
    assert sum(rows.values()) == pytest.approx(whole, abs=1e-4 * len(rows))
    assert rows.pop(REST) < 0.2 * whole
    # The same clocks are in the metrics.
    [metrics] = [
        record["metrics"]
        for line in (profiled[0] / "metrics.jsonl").read_text().splitlines()
        if (record := json.loads(line))["kind"] == "train" and record["step"] == 3
    ]
    for phase in ("sampling", "verifying", "scoring", "training", "publishing", "alarms"):
        assert rows[phase] == pytest.approx(metrics[f"time/{phase}"], abs=1e-4), phase


def test_the_page_says_what_takes_the_time_and_the_memory(text: str, profiled: tuple[Path, str]) -> None:
    assert text.startswith("Step 3 of recipe: created, cpu (1 CPU threads")
    rows = table(text)
    whole = rows.pop("whole step")
    found = re.search(r"^([\d.]+) % of the step is ([\w ]+?)(,|\.$)", text, re.MULTILINE)
    assert found is not None
    # Two phases can take the same time, as far as the page shows it.
    assert rows[found[2]] == max(rows.values())
    share = rows[found[2]] / whole
    # Seconds are shown to the fourth place, percent to the first.
    assert float(found[1]) == pytest.approx(100 * share, abs=0.05 + 100 * 0.5e-4 * (1 + share) / whole)
    parts = text.split("parts of training")[1].split("\n\n")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+) %", parts)]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    for part in ("packing", "blocks", "attention", "output head", "optimizer"):
        assert f"\n  {part} " in parts
    operators = text.split("operators  ")[1].split("\n\n")[0]
    computed = {e["name"].removeprefix("aten::") for e in trace_of(profiled[0], 3) if e.get("cat") == "cpu_op"}
    # Which of them takes the longest is the machine's to say, whose other work stops now this one and now that.
    for phase in ("training", "sampling"):
        row = re.search(rf"^  {phase} +[\d.]+ (.+(?:\n {{10}}.+)*)", operators, re.MULTILINE)
        assert row is not None
        shown = re.findall(r"(\S+) [\d.]+ %", row[1])
        assert shown
        assert set(shown) <= computed, phase
    memory = dict(re.findall(r"^  ([\w ]+?)  +([\d.]+)(?:   \(.*\))?$", text.split("memory  ")[1], re.MULTILINE))
    assert {"peak", "weights", "gradients", "optimizer state", "rest"} <= memory.keys()
    kept = sum(float(size) for name, size in memory.items() if name != "peak")
    assert kept == pytest.approx(float(memory["peak"]), abs=0.1 * len(memory))


def test_a_supervised_run_is_profiled_bit_equal(tmp_path: Path) -> None:
    profiled, _ = done(tmp_path / "profiled", SFT, "--profile", "2")
    plain, _ = done(tmp_path / "plain", SFT)
    assert steps_of(profiled) == steps_of(plain)
    assert weights_of(profiled) == weights_of(plain)
    rows = table((profiled / "profile" / "step-000002" / "profile.txt").read_text())
    assert list(rows) == ["preparing", "training", "recording", "checkpoint", REST, "whole step"]
    assert {e["name"] for e in trace_of(profiled, 2)} >= {"preparing", "training", "blocks", "output head"}


def test_a_step_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    found = run(tmp_path / "run", recipe(), "--profile", "3")
    assert found.returncode == 2
    assert "the run has no step 3: its steps are 1 to 2" in found.stderr
    assert "where: --profile 3" in found.stderr
    assert not (tmp_path / "run" / "runs").exists()


def test_a_step_is_counted_from_where_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(load_config(None, data=recipe()))

    def of(asked: Any, *, steps: int, fresh: bool = False) -> int:
        return step_to_profile(load_config(None, data=recipe(**{"run.steps": steps})), asked, fresh=fresh, recipe=None)

    assert of("default", steps=9) == 5
    assert of("default", steps=3) == 3
    assert of("default", steps=9, fresh=True) == 3
    assert of("default", steps=2, fresh=True) == 2
    with pytest.raises(UserError, match="step 2 of this run is done: it goes on behind step 2") as caught:
        of(2, steps=9)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="all 2 steps of this run are done"):
        of("default", steps=2)
    assert of(2, steps=9, fresh=True) == 2


def test_a_pipeline_is_not_profiled(tmp_path: Path) -> None:
    from tiny_stages import pipeline

    found = run(tmp_path / "run", pipeline(), "--profile")
    assert found.returncode == 2
    assert "where: --profile" in found.stderr
    assert "mend:" in found.stderr


def lines_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["metrics"] for record in records if record["kind"] == "train"]


def test_every_step_has_its_speed(profiled: tuple[Path, str]) -> None:
    """Each figure is what the tokens and seconds beside it come to; there is no MFU without a known card."""
    from transformers import AutoConfig

    latest = (profiled[0] / "checkpoints" / "latest").read_text().strip()
    work = work_of_config(AutoConfig.from_pretrained(profiled[0] / "checkpoints" / latest / "model"))
    assert work is not None
    for step, metrics in enumerate(lines_of(profiled[0]), start=1):
        sampled, trained = metrics["tokens/sampled"], metrics["tokens/trained"]
        assert metrics["throughput/sampling_tokens_per_second"] == pytest.approx(sampled / metrics["time/sampling"])
        records = list(read_episodes(profiled[0] / "episodes" / f"step-{step:06d}.parquet"))
        lengths = np.array([len(record.tokens) for record in records])
        rate = lengths.sum() / metrics["time/training"]
        assert metrics["throughput/training_tokens_per_second"] == pytest.approx(rate)
        packed, pairs = metrics["throughput/packed_tokens"], metrics["throughput/attention_pairs"]
        assert trained < packed <= lengths.sum()
        flops = work.computed(int(packed), int(pairs), int(trained), lengths)
        expected = flops / metrics["time/training"] / 1e12
        assert metrics["throughput/training_tflops"] == pytest.approx(expected)
        assert "throughput/mfu" not in metrics
        # Nothing is asked of a model between sampling and training here.
        assert "throughput/scoring_tokens_per_second" not in metrics
