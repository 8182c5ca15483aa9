"""The last words of a run: scores before and after, where the files are, what to try next."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from strop.tracking.display import Sample, Summary
from strop.tracking.text import one_line, show_duration, show_metric, show_number

if TYPE_CHECKING:
    from rich.console import Console

LABEL_WIDTH = 18
ALARMS_SHOWN = 5


def print_summary(console: Console, summary: Summary) -> None:
    """Print a summary. Paths and commands are never wrapped, so that they can be copied."""
    from rich.text import Text

    styles = {"finished": "bold green", "interrupted": "bold yellow", "failed": "bold red"}
    console.print()
    console.print(Text(_headline(summary), style=styles[summary.status]), soft_wrap=True)
    for label, text in _lines(summary):
        line = Text().append(f"  {label:<{LABEL_WIDTH}}", style="dim")
        style = "cyan" if label in ("next", "") else "bold red" if label == "alarms" else "default"
        line.append(text, style=style)
        console.print(line, soft_wrap=True)


def _headline(summary: Summary) -> str:
    what = f"{summary.run.name}: {summary.status}"
    if summary.status != "finished" or summary.stopped:
        what += " early," if summary.stopped else ""
        what += f" after step {summary.steps} of {summary.total_steps}"
    return what


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.problem or summary.stopped:
        yield "why", one_line(summary.problem or summary.stopped, 400)
    for name in dict.fromkeys([*(summary.before or {}), *(summary.after or {})]):
        yield name, compare(name, summary.before, summary.after, unit=" points")
    for index, alarm in enumerate(summary.alarms[-ALARMS_SHOWN:]):
        yield "" if index else "alarms", one_line(alarm, 200)
    steps = f"{summary.steps} steps in {show_duration(summary.seconds)}"
    if summary.tokens_sampled:
        steps += (
            f", {show_number(summary.tokens_sampled)} tokens sampled, {show_number(summary.tokens_trained)} trained"
        )
    yield "time", steps
    yield "run", short_path(summary.run)
    if summary.model is not None:
        yield "model", short_path(summary.model)
    if summary.best:
        yield "best", summary.best
    yield "metrics", short_path(summary.run / "metrics.jsonl")
    if summary.events is not None:
        yield "curves", f"tensorboard --logdir {short_path(summary.events)}"
    run = short_path(summary.run)
    made_up = [f"strop sample {run}"] if summary.model is not None else []
    commands = list(summary.next_commands) or [*made_up, f"strop runs show {run}"]
    for index, command in enumerate(commands):
        yield "" if index else "next", command


def compare(name: str, before: Mapping[str, float] | None, now: Mapping[str, float] | None, *, unit: str = "") -> str:
    """A score before and now: "41.0 % → 88.5 % (+47.5)", or the one that there is."""
    old, new = (before or {}).get(name), (now or {}).get(name)
    if old is None or new is None:
        return show_metric(name, new if old is None else old)
    shown = f"{show_metric(name, old)} → {show_metric(name, new)}"
    if shown.endswith("%"):
        return f"{shown} ({100 * (new - old):+.1f}{unit})"
    return shown


def scores_line(step: int, before: Mapping[str, float] | None, scores: Mapping[str, float]) -> str:
    """All scores of an evaluation in one line, against those before unless this is the first."""
    shown = ", ".join(f"{name} {compare(name, before, scores)}" for name in scores)
    return f"{f'step {step}' if step else 'start'}: {shown}"


def sample_line(sample: Sample, width: int) -> str:
    """A completion in one line: what was asked, what the model said, what it was worth."""
    tail = ""
    if sample.reward is not None:
        tail += f"  reward {show_number(sample.reward)}"
    if sample.correct is not None:
        tail += " ✓" if sample.correct else " ✗"
    if sample.correct is False and sample.answer is not None and width >= 60:
        tail += f" (answer {one_line(sample.answer, 12)})"
    room = max(20, width - len(tail) - 3)
    # The end of a prompt is the question; a long one is cut at its front.
    prompt = one_line(sample.prompt[::-1], min(len(sample.prompt), room // 2))[::-1]
    return f"{prompt} → {one_line(sample.completion, room - len(prompt))}{tail}"


def short_path(path: Path) -> str:
    """Relative to the working folder where the path lies below it."""
    full, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(full, here) if os.path.commonpath([full, here]) == here else str(path)
