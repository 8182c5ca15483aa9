"""`strop report`: a run as one HTML file that can be mailed. It loads nothing and runs nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.serve.curves import curve
from strop.tracking.episodes import EpisodeRecord, read_episodes
from strop.tracking.load import MOST_CARDS, LoadTail
from strop.tracking.metrics import MetricsRecord, read_metrics
from strop.tracking.pipeline_directory import MANIFEST as PIPELINE
from strop.tracking.pipeline_directory import read_pipeline
from strop.tracking.run_directory import Manifest, read_manifest, status_of
from strop.tracking.runs import run_info
from strop.tracking.text import printable, show_duration, show_metric

SAMPLES = 8
LONGEST = 4000
"""Characters of a prompt or completion that are shown."""
SHOWN = (
    *("reward/mean", "accuracy", "eval/accuracy", "eval/reward", "eval/loss", "loss", "policy/entropy", "policy/kl"),
    *("policy/clip_fraction", "completion/length_mean", "completion/truncated_share", "grad_norm", "learning_rate"),
    *("advantage/zero_share", "mismatch/kl", "errors/share", "throughput/tokens_per_second"),
)
"""Metrics with a curve, where they are logged; every score of a verifier (`reward/…`) and evaluation (`eval/…`) has one
too."""
CPU = {"cpu_percent": "processors, percent", "run_cpu_percent": "processors by the run, percent"}
MOST_MACHINES = 8
"""Machines whose load is drawn."""
_PASSWORD = re.compile(r"://[^/@\s]+@")
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:920px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ccc}
table{border-collapse:collapse}td,th{text-align:left;padding:.15em 1.2em .15em 0;vertical-align:top}
th{font-weight:600}td.number{text-align:right;font-variant-numeric:tabular-nums}
pre{background:#f5f5f3;padding:.7em;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
figure{margin:0;display:inline-block;width:49%;min-width:330px}svg{width:100%;font:11px system-ui,sans-serif}
svg polyline{fill:none;stroke:#0b62a4;stroke-width:1.6}svg circle{fill:#0b62a4}svg .axis{fill:none;stroke:#999}
svg .end{text-anchor:end}svg .name{font-weight:600}.alarm{color:#a40b0b}.sample{margin:1.2em 0}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run or pipeline; returns its file, `report.html` in the run's folder when not given.

    Raises:
        UserError: there is no run, or the file cannot be written.
    """
    run = Path(run)
    text = report(run)
    target = run / "report.html" if out is None else Path(out)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written: {error.strerror}", where=str(target)) from error
    return target


def report(run: Path) -> str:
    """The page of a run, or of each run of a pipeline.

    Raises:
        UserError: there is no run.
    """
    if (run / PIPELINE).is_file():
        stages = [(entry.name, run / entry.run) for entry in read_pipeline(run).stages if entry.run is not None]
        parts = [part for name, folder in stages for part in _run(folder, f"{run.name}: {name}")]
    else:
        parts = list(_run(run, run.name))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_safe(run.name)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _run(folder: Path, title: str) -> Iterator[str]:
    manifest = read_manifest(folder)
    records = read_metrics(folder / "metrics.jsonl")
    yield f"<h1>{_safe(title)}</h1>"
    yield _table(_facts(folder, manifest))
    yield from _scores(manifest)
    yield from _alarms(manifest)
    yield from _curves(records)
    yield from _load(folder)
    yield from _samples(folder)
    yield from _config(folder)


def _facts(folder: Path, manifest: Manifest) -> list[tuple[str, str]]:
    info = run_info(folder)
    git, why = manifest.git or {}, manifest.error or manifest.stopped
    made_from = [f"{key}: {model.get('path')}, {model.get('fingerprint')}" for key, model in manifest.inputs.items()]
    facts = {
        "status": status_of(folder, manifest) + (f": {why}" if why else ""),
        "steps": f"{info.step} of {manifest.steps} in {show_duration(info.seconds)}",
        "begun": manifest.created,
        "ended": manifest.ended or "",
        "went on": ", ".join(manifest.resumed),
        "model": _pairs(manifest.model),
        "data": _pairs(manifest.data),
        "made from": "; ".join(made_from),
        "best": _pairs(manifest.best),
        "seeds": _pairs(manifest.seeds),
        "configuration": manifest.config_hash,
        "commit": f"{git.get('commit', '')}{' with changes' if git.get('dirty') else ''}" if git else "",
        "versions": _pairs(manifest.versions),
        "run": manifest.id,
    }
    return [(name, text) for name, text in facts.items() if text]


def _scores(manifest: Manifest) -> Iterator[str]:
    before, after = manifest.scores.get("before") or {}, manifest.scores.get("after") or {}
    if not before and not after:
        return
    yield "<h2>Scores on held-out data</h2>"
    rows = ["<tr><th></th><th>before</th><th>after</th></tr>"]
    for name in dict.fromkeys([*before, *after]):
        cells = [
            f'<td class="number">{_safe(show_metric(name, _number(side.get(name))))}</td>' for side in (before, after)
        ]
        rows.append(f"<tr><th>{_safe(name)}</th>{''.join(cells)}</tr>")
    yield f"<table>{''.join(rows)}</table>"


def _alarms(manifest: Manifest) -> Iterator[str]:
    if manifest.alarms:
        yield "<h2>Alarms</h2>"
        lines = [f"step {alarm.get('step')}: {alarm.get('name')}: {alarm.get('what')}" for alarm in manifest.alarms]
        yield "<ul>" + "".join(f'<li class="alarm">{_safe(line)}</li>' for line in lines) + "</ul>"


def _curves(records: Sequence[MetricsRecord]) -> Iterator[str]:
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.kind != "warmup":
            for name, value in record.metrics.items():
                found.setdefault(name, []).append((record.step, value))
    others = [name for name in found if name.startswith(("reward/", "eval/")) and name not in SHOWN]
    drawn = [svg for name in (*SHOWN, *sorted(others)) if name in found and (svg := curve(name, found[name]))]
    if drawn:
        yield "<h2>Curves</h2>"
        yield "".join(f"<figure>{svg}</figure>" for svg in drawn)


def _load(folder: Path) -> Iterator[str]:
    """Processors of each machine, and its cards on average, in percent over minutes."""
    tail = LoadTail(folder / "load.jsonl")
    machines = tail.news("", [*CPU, *(f"gpu_percent/{card}" for card in range(MOST_CARDS))]).kinds
    start = min((times[0] for _, times, _ in machines.values()), default=0.0)
    drawn = []
    for machine, (_, times, values) in list(machines.items())[:MOST_MACHINES]:
        cards = [column for name, column in values.items() if name not in CPU]
        rows = zip(*cards, strict=True) if cards else iter(())
        busy = {CPU[name]: column for name, column in values.items() if name in CPU} | {
            "cards, percent": [sum(row) / len(row) for row in rows]
        }
        for name, column in busy.items():
            points = [((time - start) / 60, value) for time, value in zip(times, column, strict=False)]
            drawn.append(curve(f"{name} ({machine})", points, over="minute"))
    if any(drawn):
        yield "<h2>Load of the machines</h2>"
        yield "".join(f"<figure>{svg}</figure>" for svg in drawn if svg)


def _samples(folder: Path) -> Iterator[str]:
    files = sorted((folder / "episodes").glob("step-*.parquet"))
    if not files:
        return
    try:
        episodes = [episode for episode in read_episodes(files[-1]) if episode.stream == 0]
    except (OSError, ValueError, KeyError, TypeError):
        # A file that another process is writing, or left half written.
        return
    yield f"<h2>Samples of {_safe(files[-1].stem)}</h2>"
    yield "<p>Those of the highest and of the lowest reward.</p>"
    for episode in _extremes(episodes):
        reward = show_metric("reward", episode.reward)
        correct = {True: ", correct", False: ", wrong", None: ""}[episode.correct]
        answer = f", answer {_cut(episode.answer)}" if episode.answer is not None else ""
        yield (
            f'<div class="sample">reward {_safe(reward)}{correct}, {_safe(episode.status)}{_safe(answer)}'
            f"<pre>{_safe(_cut(episode.prompt_text))}</pre><pre>{_safe(_cut(episode.completion_text))}</pre></div>"
        )


def _extremes(episodes: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """Half of the samples from above and half from below, each of another prompt as far as there are any."""
    known = sorted((e for e in episodes if math.isfinite(e.reward)), key=lambda e: (e.reward, e.group, e.sample))
    found: dict[tuple[int, int], EpisodeRecord] = {}
    for wanted, side in ((SAMPLES // 2, known[::-1]), (SAMPLES, known)):
        seen = {episode.group for episode in found.values()}
        for episode in side:
            if len(found) < wanted and episode.group not in seen:
                seen.add(episode.group)
                found[episode.group, episode.sample] = episode
    return list(found.values())


def _config(folder: Path) -> Iterator[str]:
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    yield "<h2>Configuration</h2>"
    # An address may have a password in it, and this page is made to be sent around.
    yield f"<pre>{_safe(_PASSWORD.sub('://…@', text))}</pre>"


def _table(facts: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{_safe(k)}</th><td>{_safe(v)}</td></tr>" for k, v in facts) + "</table>"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text):,} characters)"


def _safe(text: str) -> str:
    """A text as HTML, without control characters and those that turn the direction of writing."""
    return escape(printable(str(text)), quote=True)
