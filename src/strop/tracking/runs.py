"""What `strop runs list` and `strop runs show` say of the runs in a folder."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import UserError
from strop.tracking.metrics import MetricsRecord, read_metrics
from strop.tracking.pipeline_directory import MANIFEST
from strop.tracking.run_directory import Manifest, RunStatus, latest_checkpoint, read_manifest, status_of
from strop.tracking.summary import compare, short_path
from strop.tracking.text import show_duration, show_metric, show_number, sparkline

if TYPE_CHECKING:
    from rich.console import Console

STATUS_STYLES: dict[str, str] = {"running": "green", "finished": "default", "interrupted": "yellow", "failed": "red"}
CURVE_WIDTH = 60
ALARMS_SHOWN = 10


@dataclass(frozen=True)
class RunInfo:
    """A run at a glance.

    status: a run that says "running" while no process trains it is "interrupted". step: the last that was logged.
    reward, accuracy: of that step; None if not logged. seconds: time it was worked on, pauses between resumes left out.
    """

    name: str
    path: Path
    status: RunStatus
    step: int
    steps: int
    reward: float | None
    accuracy: float | None
    started: datetime
    seconds: float


def list_runs(folder: str | Path) -> list[RunInfo]:
    """The runs in a folder, newest first, those of a pipeline's stages as `pipeline/stage`; folders that hold no
    readable run are left out."""
    root = Path(folder)
    if not root.is_dir():
        return []
    runs = []
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        if (path / MANIFEST).is_file():
            runs += [dataclasses.replace(run, name=f"{path.name}/{run.name}") for run in list_runs(path)]
        elif (path / "run.json").is_file():
            try:
                runs.append(run_info(path))
            except UserError:
                continue
    return sorted(runs, key=lambda run: run.started, reverse=True)


def run_info(path: Path) -> RunInfo:
    """One run at a glance.

    Raises:
        UserError: the folder holds no run, or its manifest cannot be read.
    """
    manifest = read_manifest(path)
    return _info(path, manifest, read_metrics(path / "metrics.jsonl"))


def print_runs(runs: Sequence[RunInfo], console: Console | None = None) -> None:
    """Print runs as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    if not runs:
        console.print("no runs here yet; `strop train RECIPE` makes one", markup=False, highlight=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for heading in ("step", "reward", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("started", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(run.name),
            Text(run.status, style=STATUS_STYLES[run.status]),
            f"{run.step}/{run.steps}",
            show_metric("reward", run.reward),
            show_metric("accuracy", run.accuracy),
            _local(run.started),
            show_duration(run.seconds),
        )
    console.print(table)


def show_run(path: str | Path) -> str:
    """Everything worth knowing of a run or a pipeline, as plain text of several lines.

    Raises:
        UserError: there is no such run; the nearest names are given.
    """
    run = Path(path)
    if (run / MANIFEST).is_file():
        from strop.tracking.pipelines import show_pipeline

        return show_pipeline(run)
    if not (run / "run.json").is_file():
        raise _no_run(run)
    manifest = read_manifest(run)
    records = read_metrics(run / "metrics.jsonl")
    info = _info(run, manifest, records)
    sections = [
        _about(info, manifest),
        _scores(records),
        _alarms(run, manifest),
        _last_step(records),
        _files(run),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _info(path: Path, manifest: Manifest, records: Sequence[MetricsRecord]) -> RunInfo:
    steps = [record for record in records if record.kind == "train"]
    last = steps[-1] if steps else None
    status = status_of(path, manifest)
    try:
        started = datetime.fromisoformat(manifest.created)
        seconds = _worked(manifest, status, [record.time for record in records])
    except ValueError as error:
        raise UserError(f"the run's manifest cannot be read: {error}", where=str(path / "run.json")) from error
    return RunInfo(
        name=path.name,
        path=path,
        status=status,
        step=last.step if last else 0,
        steps=manifest.steps,
        reward=last.metrics.get("reward/mean") if last else None,
        accuracy=last.metrics.get("accuracy") if last else None,
        started=started,
        seconds=seconds,
    )


def _worked(manifest: Manifest, status: RunStatus, times: Sequence[float]) -> float:
    """Seconds from each start or resume to the last sign of life before the next one."""
    starts = [datetime.fromisoformat(when).timestamp() for when in (manifest.created, *manifest.resumed)]
    signs = list(times)
    if manifest.ended is not None:
        signs.append(datetime.fromisoformat(manifest.ended).timestamp())
    if status == "running":
        signs.append(datetime.now(UTC).timestamp())
    total = 0.0
    for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
        total += max((sign - start for sign in signs if start <= sign < end), default=0.0)
    return total


def _about(info: RunInfo, manifest: Manifest) -> list[str]:
    lines = [f"{info.name}: {info.status}, step {info.step} of {info.steps}, {show_duration(info.seconds)}"]
    facts: dict[str, str] = {"started": _local(info.started)}
    if manifest.resumed:
        facts["resumed"] = ", ".join(_local(datetime.fromisoformat(when)) for when in manifest.resumed)
    if manifest.error or manifest.stopped:
        facts["why"] = (manifest.error or manifest.stopped).split("\n")[0]
    if manifest.best:
        name = str(manifest.best["metric"])
        facts["best"] = f"step {manifest.best['step']}, {name} {show_metric(name, manifest.best['score'])}"
    if manifest.parent:
        facts["parent"] = manifest.parent
    for name, values in (("model", manifest.model), ("data", manifest.data), ("seeds", manifest.seeds)):
        if values:
            facts[name] = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    facts["versions"] = ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    if manifest.git:
        facts["commit"] = manifest.git["commit"][:12] + (" with changes" if manifest.git.get("dirty") else "")
    facts["config"] = manifest.config_hash[:16]
    facts["command"] = " ".join(manifest.command)
    return lines + _aligned({name: text for name, text in facts.items() if text})


def _scores(records: Sequence[MetricsRecord]) -> list[str]:
    evaluations = [record for record in records if record.kind == "eval"]
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    lines = [f"evaluation (step {first.step} → {last.step})"]
    found = [{name.removeprefix("eval/"): value for name, value in record.metrics.items()} for record in evaluations]
    shown = {name: compare(name, found[0], found[-1]) for name in found[-1]}
    scored = [at for at, scores in enumerate(found) if math.isfinite(scores.get("accuracy", math.nan))]
    if scored:
        best = max(scored, key=lambda at: found[at]["accuracy"])
        shown["best"] = f"accuracy {show_metric('accuracy', found[best]['accuracy'])} at step {evaluations[best].step}"
    return lines + _aligned(shown)


def _alarms(run: Path, manifest: Manifest) -> list[str]:
    """Signs of reward hacking, each with where to look; of many the last ones."""
    if not manifest.alarms:
        return []
    lines = [f"alarms ({len(manifest.alarms)})"]
    for alarm in manifest.alarms[-ALARMS_SHOWN:]:
        lines.append(f"  step {alarm['step']}  {alarm['name']}: {alarm['what']}")
        path = run / "episodes" / f"step-{alarm['step']:06d}.parquet"
        if alarm.get("group") is not None and path.exists():
            lines.append(f"    see group {alarm['group']}, sample {alarm['sample']} in {short_path(path)}")
    return lines


def _last_step(records: Sequence[MetricsRecord]) -> list[str]:
    steps = [record for record in records if record.kind == "train"]
    if not steps:
        return []
    lines = [f"step {steps[-1].step}"]
    lines += _aligned({name: show_metric(name, value) for name, value in steps[-1].metrics.items()})
    curves = {}
    for name in ("reward/mean", "accuracy"):
        values = [record.metrics[name] for record in steps if name in record.metrics]
        known = [value for value in values if math.isfinite(value)]
        if known:
            ends = f"{show_number(min(known))} to {show_number(max(known))}"
            curves[name] = f"{sparkline(values, CURVE_WIDTH)}  {ends}"
    return lines + ([""] if curves else []) + _aligned(curves)


def _files(run: Path) -> list[str]:
    files = {"folder": short_path(run)}
    checkpoint = latest_checkpoint(run)
    if checkpoint is not None:
        files["model"] = short_path(checkpoint / "model")
    episodes = sorted((run / "episodes").glob("step-*.parquet"))
    if episodes:
        files["episodes"] = f"{len(episodes)} files, the newest {short_path(episodes[-1])}"
    if (run / "events").is_dir():
        files["curves"] = f"tensorboard --logdir {short_path(run / 'events')}"
    if checkpoint is not None:
        files["next"] = f"strop sample {short_path(run)}"
    return ["files", *_aligned(files)]


def _aligned(facts: dict[str, str]) -> list[str]:
    width = max((len(name) for name in facts), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in facts.items()]


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _local(when: datetime) -> str:
    return when.astimezone().strftime("%Y-%m-%d %H:%M")


def _no_run(run: Path) -> UserError:
    names = [info.name for info in list_runs(run.parent)]
    near = difflib.get_close_matches(run.name, names, n=3) or names[:3]
    mend = f"there is {', '.join(str(run.parent / name) for name in near)}" if near else "`strop train` makes runs"
    return UserError("there is no run in this folder (it has no run.json)", where=str(run), mend=mend)
