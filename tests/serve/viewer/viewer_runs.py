"""Run directories as strop's own recorder writes them, in the sizes and states that the viewer has to show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from strop.serve.viewer.app import build
from strop.tracking.episodes import EpisodeRecord, episodes_file, write_episodes
from strop.tracking.metrics import MetricsWriter
from strop.tracking.run_directory import RunDirectory
from strop.tracking.timeline import Span, StepTimeline, TimelineWriter

RECIPE = """\
algorithm: {name: grpo}
rollout: {engine: {kind: local}}
hardware: {device: cpu}
training:
  optimizer: {learning_rate: %s}
offline: null
supervised: null
"""
ALARM = {
    "name": "length", "step": 3, "value": 14.0, "limit": 12.0, "usual": 7.5,
    "what": "rewarded completions have 14 tokens, and usually 7.5", "group": 1, "sample": 1,
}  # fmt: skip
ROUTES = (
    "run",
    "series",
    "load",
    "steps",
    "config",
    "episodes?step=1",
    "episode?step=1&row=0",
    "timeline?step=1",
    "differences",
)
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script>&lt;b&gt;\u202e\x1b[31m\U0001f600'
SHOWN = "() => document.getElementById('page').dataset.shown === location.hash"
"""Whether a page of the viewer is there, and not still the one before."""
CHARACTERS = "0123456789+=<>abcdefgh "


def record(group: int, sample: int, length: int = 12, prompt: int = 4, seed: int = 0, **changes: Any) -> EpisodeRecord:
    """One episode of one turn with numbers of its own."""
    draw = np.random.default_rng((seed, group, sample + 1))
    mask = np.arange(length) >= prompt
    sampler = np.where(mask, -draw.exponential(1.0, length), np.nan).astype(np.float32)
    values: dict[str, Any] = {
        "group": group,
        "sample": sample,
        "prompt_id": f"row-{group:06d}",
        "prompt_text": "12+30=",
        "completion_text": f"completion {group}.{sample}",
        "answer": "42",
        "status": "stop",
        "reward": float(draw.integers(0, 2)),
        "correct": bool(sample % 2),
        "tokens": draw.integers(3, 3 + len(CHARACTERS), length).astype(np.int32),
        "loss_mask": mask,
        "sampler_logprobs": sampler,
        "trainer_logprobs": (sampler + draw.normal(0, 0.05, length)).astype(np.float32),
        "advantages": np.where(mask, draw.normal(), 0).astype(np.float32),
        "versions": np.where(mask, 1, -1).astype(np.int32),
        "components": {"exact": 1.0, "format": math.nan},
        "detail": "compared with 42",
        "row": {"prompt": "12+30=", "answer": "42"},
    }
    return EpisodeRecord(**{**values, **changes})


def metrics_of(step: int, **changes: float) -> dict[str, float]:
    """What a step of reinforcement learning records."""
    return {
        "reward/mean": 1 - 0.9**step,
        "accuracy": 1 - 0.9**step,
        "loss": 0.01 / step,
        "completion/length_mean": 8.0,
        "policy/entropy": 1.0,
        "staleness/max": 0.0,
        "mismatch/mean": 1e-6,
        "time/sampling": 0.5,
        "time/verifying": 0.125,
        "time/scoring": 0.0625,
        "time/training": 1.0,
        "time/publishing": 0.25,
        "time/alarms": 0.03125,
        "time/step": 2.0,
        "memory/process_gib": 1.5,
        "alarms/length": 8.0,
        "alarms/length_limit": 12.0,
        **changes,
    }


def make_run(
    folder: Path,
    name: str,
    *,
    steps: int = 3,
    episodes: Sequence[int] = (),
    groups: int = 2,
    size: int = 2,
    length: int = 12,
    tokenizer: bool = True,
    recipe: str = RECIPE % "1.0e-4",
    update: Mapping[str, Any] | None = None,
    status: str = "finished",
    error: str = "",
) -> Path:
    """A run with metrics of so many steps, and episodes of some of them."""
    run = RunDirectory.create(
        folder, name, config_yaml=recipe, steps=max(steps, 1), command=["strop", "train", "tiny.yaml"]
    )
    writer = MetricsWriter(run.metrics_path)
    for step in range(1, steps + 1):
        writer.log(step, metrics_of(step))
    writer.close()
    for step in episodes:
        records = [record(g, s, length, seed=step) for g in range(groups) for s in range(size)]
        write_episodes(episodes_file(run.episodes_folder, step), records)
    if tokenizer:
        write_tokenizer(run.path)
    run.update(**(update or {}))
    run.close(status, error=error)  # type: ignore[arg-type]
    return run.path


def write_spans(run: Path, *steps: int) -> None:
    """When the phases of some steps ran: two engines sample while the trainer trains."""
    spans = (
        Span("checkpoint", "driver", -0.5, 0.25),
        Span("sampling", "driver", 0.0, 0.5),
        Span("scoring", "trainer", 0.5, 0.25),
        Span("training", "trainer", 0.75, 1.0),
        Span("publishing", "trainer", 1.75, 0.25),
        Span("recording", "driver", 2.0, 0.125),
        Span("sampling", "engine 0", -0.25, 1.75),
        Span("sampling", "engine 1", 0.25, 0.5),
        Span("sampling", "engine 1", 1.0, 1.25),
        Span("verifying", "verifiers", 0.125, 0.25),
    )
    writer = TimelineWriter(run / "timeline.jsonl")
    for step in steps:
        writer.log(StepTimeline(step, 1e9 + step, 2.0, spans))
    writer.close()


def write_tokenizer(run: Path) -> None:
    """One token a character, where a checkpoint has it."""
    from tokenizers import Tokenizer, models

    words = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    from tokenizers import decoders

    tokenizer.decoder = decoders.Fuse()
    path = run / "checkpoints" / "step-000001" / "model" / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def append_line(run: Path, step: int, **changes: float) -> None:
    """One more step, by the project's own writer."""
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.log(step, metrics_of(step, **changes))
    writer.close()


def change_manifest(run: Path, **changes: Any) -> None:
    """Other values in run.json, also such as strop would not write."""
    path = run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def go(page: Any, where: str) -> Any:
    """Open a page of the viewer and wait until it is there."""
    page.goto(f"/{where}")
    page.wait_for_function(SHOWN)
    return page


def client_of(*roots: Path) -> TestClient:
    return TestClient(build(list(roots)), raise_server_exceptions=False)


def get(client: TestClient, path: str, status: int = 200, **query: Any) -> Any:
    answer = client.get(f"/api/{path}", params=query or None)
    assert answer.status_code == status, answer.text
    # Strict: Python's reader takes NaN, a browser's does not.
    return json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
