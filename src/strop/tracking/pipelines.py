"""What is said of a pipeline: its stages with their scores before and after, where the files are, what to try next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from strop.tracking.pipeline_directory import PipelineManifest, StageEntry, pipeline_status, read_pipeline, stage_status
from strop.tracking.run_directory import Manifest, latest_checkpoint, read_manifest
from strop.tracking.runs import run_info
from strop.tracking.summary import compare, short_path
from strop.tracking.text import show_duration

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"finished": "bold green", "interrupted": "bold yellow", "failed": "bold red", "running": "bold green"}


def show_pipeline(folder: Path) -> str:
    """Everything worth knowing of a pipeline, as plain text of several lines.

    Raises:
        UserError: there is no pipeline in the folder.
    """
    manifest = read_pipeline(folder)
    lines = [_headline(folder, manifest)]
    if manifest.error:
        lines.append(f"  why     {manifest.error}")
    lines += _stages(folder, manifest)
    return "\n".join([*lines, "", "files", *_files(folder, manifest)])


def print_pipeline(console: Console, folder: Path) -> None:
    """Print the closing summary of a pipeline."""
    from rich.text import Text

    manifest = read_pipeline(folder)
    console.print()
    style = STYLES[pipeline_status(folder, manifest)]
    console.print(Text(_headline(folder, manifest), style=style), soft_wrap=True)
    for line in [*_stages(folder, manifest), *_files(folder, manifest)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def finished_line(stage: str, run: Path) -> str:
    """What is said of a stage that is done already."""
    manifest = read_manifest(run)
    scores = _scores(manifest)
    return f"stage {stage}: done, skipped ({short_path(run)}{f'; {scores}' if scores else ''})"


def _headline(folder: Path, manifest: PipelineManifest) -> str:
    done = sum(stage_status(folder, entry) == "finished" for entry in manifest.stages)
    what = f"{folder.name}: {pipeline_status(folder, manifest)}"
    return f"{what}, {done} of {len(manifest.stages)} stages done"


def _stages(folder: Path, manifest: PipelineManifest) -> list[str]:
    rows = [_row(folder, entry) for entry in manifest.stages]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(4)]
    return [
        "  " + "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _row(folder: Path, entry: StageEntry) -> tuple[str, ...]:
    status = stage_status(folder, entry)
    if entry.run is None or status == "waiting":
        return entry.name, status, "", "", ""
    run = folder / entry.run
    info, manifest = run_info(run), read_manifest(run)
    what = [_scores(manifest)]
    if manifest.stopped:
        what.append(f"ended early: {manifest.stopped}")
    if manifest.best:
        what.append(f"best at step {manifest.best['step']}")
    return (
        entry.name,
        status,
        f"{info.step}/{info.steps} steps",
        show_duration(info.seconds),
        "; ".join(text for text in what if text),
    )


def _scores(manifest: Manifest) -> str:
    before, after = (manifest.scores.get(name) or {} for name in ("before", "after"))
    return ", ".join(f"{name} {compare(name, before, after)}" for name in dict.fromkeys([*before, *after]))


def _files(folder: Path, manifest: PipelineManifest) -> Iterator[str]:
    yield f"  folder  {short_path(folder)}"
    runs = [folder / entry.run for entry in manifest.stages if entry.run is not None]
    last = next((run for run in reversed(runs) if latest_checkpoint(run) is not None), None)
    if last is None:
        return
    yield f"  model   {short_path((latest_checkpoint(last) or last) / 'model')}"
    if (last / "checkpoints" / "best").is_file():
        yield f"  best    {short_path(last / 'checkpoints' / 'best')}"
    yield f"  next    strop runs show {short_path(last)}"
