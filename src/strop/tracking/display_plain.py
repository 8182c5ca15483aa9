"""A line a step, for logs, pipes and continuous integration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.tracking.display import Level, Pace, Sample, StepView, Summary
from strop.tracking.summary import print_summary, sample_line, scores_line
from strop.tracking.text import one_line, printable, show_duration, show_metric

if TYPE_CHECKING:
    from rich.console import Console

HEADER_EVERY = 20
SAMPLE_EVERY = 30.0
"""Seconds between samples."""
PROGRESS_EVERY = 10.0
"""Seconds without a line after which a phase says how far it is."""
WARMUP_LINES = 10
STYLES: dict[str, str] = {"warning": "yellow", "error": "red", "alarm": "bold red"}

# Name of the metric, heading. Widths hold the widest value of each.
COLUMNS = (
    ("reward/mean", "reward", 7),
    ("accuracy", "accuracy", 8),
    ("preference/accuracy", "accuracy", 8),
    ("preference/margin", "margin", 8),
    ("loss", "loss", 8),
    ("token_accuracy", "tokens right", 12),
    ("perplexity", "perplexity", 10),
    ("distillation/divergence", "divergence", 10),
    ("distillation/agreement", "agreement", 9),
    ("completion/length_mean", "length", 7),
    ("kl/ref", "kl", 8),
    ("policy/entropy", "entropy", 7),
    ("throughput/tokens_per_second", "tok/s", 6),
    ("time/step", "s/step", 7),
)


class PlainDisplay:
    """One aligned line for each step, with the time that is left; the header again every 20 lines.

    Args:
        console: where lines go.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._pace = Pace(clock)
        self._before: Mapping[str, float] | None = None
        self._columns: tuple[tuple[str, str, int], ...] = ()
        self._lines = 0
        self._kind = ""
        self._phase = ""
        self._stepping = False
        self._last_line = clock()
        self._last_sample = -SAMPLE_EVERY

    def start(
        self,
        title: str,
        total_steps: int,
        facts: Mapping[str, Any],
        *,
        first_step: int = 0,
        before: Mapping[str, float] | None = None,
        history: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self._before = before
        self._pace.start()
        steps = f"{total_steps} steps" + (f", going on after step {first_step}" if first_step else "")
        self._print(f"{title}: {steps}")
        width = max((len(name) for name in facts), default=0)
        for name, fact in facts.items():
            self._print(f"  {name:<{width}}  {one_line(str(fact), 200)}")

    def phase(self, name: str) -> None:
        # Within steps phases follow each other too quickly for a line each.
        if not self._stepping and name != self._phase:
            self._print(f"{name} …")
        self._phase = name

    def progress(self, phase: str, done: int, total: int) -> None:
        self._phase = phase
        if self._clock() - self._last_line >= PROGRESS_EVERY:
            self._print(f"  {phase} {done}/{total}")

    def step(self, view: StepView) -> None:
        if view.kind != self._kind:
            self._begin(view)
        self._pace.tick(view.kind)
        if view.kind == "warmup" and view.step % max(1, view.total_steps // WARMUP_LINES) and not _is_last(view):
            return
        if self._lines % HEADER_EVERY == 0:
            self._header(view)
        self._lines += 1
        cells = [f"{view.step:>{len(str(view.total_steps))}}/{view.total_steps}"]
        cells += [
            f"{show_metric(name, view.metrics.get(name)).removesuffix(' s'):>{width}}"
            for name, _, width in self._columns
        ]
        cells.append(f"{show_duration(self._pace.remaining(view.total_steps - view.step)):>7}")
        self._print("  ".join(cells))
        if view.sample is not None and (view.step == 1 or self._clock() - self._last_sample >= SAMPLE_EVERY):
            self._sample(view.sample)

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        if not self._stepping or self._kind == "warmup":
            self._pace.mark()
        before = self._before
        self._before = self._before or dict(scores)
        self._print(f"evaluation at {scores_line(step, before, scores)}")

    def message(self, text: str, level: Level = "info") -> None:
        self._print(text if level == "info" else f"{level}: {text}", style=STYLES.get(level))

    def finish(self, summary: Summary) -> None:
        print_summary(self._console, summary)

    def close(self) -> None: ...

    def _begin(self, view: StepView) -> None:
        """The first line of the warm-up or of the training."""
        self._kind, self._lines, self._stepping = view.kind, 0, True
        if view.kind == "warmup":
            self._print("warm-up")

    def _header(self, view: StepView) -> None:
        self._columns = tuple(column for column in COLUMNS if column[0] in view.metrics)
        cells = [f"{'step':>{2 * len(str(view.total_steps)) + 1}}"]
        cells += [f"{heading:>{width}}" for _, heading, width in self._columns]
        self._print("  ".join([*cells, f"{'left':>7}"]), style="bold")

    def _sample(self, sample: Sample) -> None:
        self._last_sample = self._clock()
        self._print(f"  sample: {sample_line(sample, max(60, self._console.width - 10))}", style="dim")

    def _print(self, text: str, *, style: str | None = None) -> None:
        self._last_line = self._clock()
        self._console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def _is_last(view: StepView) -> bool:
    return view.step == view.total_steps
