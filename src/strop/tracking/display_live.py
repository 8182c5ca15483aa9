"""The live panel: progress, last values and their curves, evaluations, a sample, warnings."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from strop.tracking.display import Level, Pace, Sample, StepView, Summary
from strop.tracking.summary import print_summary, sample_line, scores_line
from strop.tracking.text import one_line, printable, show_duration, show_metric, sparkline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

HISTORY = 1000
"""Steps that curves reach back."""
CELL_WIDTH = 37
"""Least width of one metric: its name, its value, a curve."""
NAME_WIDTH = 13
VALUE_WIDTH = 10
PHASE_WIDTH = 50
REFRESH_PER_SECOND = 2
"""Drawing takes some 10 ms of the interpreter, which the engine's own Python would like to have."""
STYLES: dict[str, str] = {"warning": "yellow", "error": "bold red", "alarm": "bold red"}

# In order of importance: a low terminal shows the first ones. Names that are not here are not shown.
METRICS = {
    "reward/mean": "reward",
    "accuracy": "accuracy",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
    "token_accuracy": "tokens right",
    "perplexity": "perplexity",
    "distillation/divergence": "divergence",
    "distillation/agreement": "agreement",
    "completion/length_mean": "length",
    "kl/ref": "KL reference",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clipped",
    "critic/explained_variance": "explained",
    "loss": "loss",
    "grad_norm": "grad norm",
    "throughput/tokens_per_second": "tokens/s",
    "memory/process_gib": "memory",
    "memory/cuda_gib": "GPU memory",
    "staleness/max": "staleness",
    "completion/truncated_share": "truncated",
    "advantage/zero_share": "no advantage",
    "kl/sampler": "KL sampler",
    "learning_rate": "learning rate",
    "time/step": "step time",
}
HIGHER_IS_BETTER = frozenset(
    ("reward/mean", "accuracy", "preference/accuracy", "token_accuracy", "distillation/agreement")
)


class LiveDisplay:
    """A panel at the bottom of the terminal, redrawn in place; messages and evaluations scroll by above it.

    The panel is drawn by a thread of its own, so that clock and spinner move while a step computes.

    Args:
        console: the terminal.
        clock: seconds, monotonic.
        auto_refresh: draw from a thread; tests draw by hand.
    """

    def __init__(
        self, console: Console, *, clock: Callable[[], float] = time.monotonic, auto_refresh: bool = True
    ) -> None:
        self._console = console
        self._pace = Pace(clock)
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._auto_refresh = auto_refresh
        self._spinner = Spinner("dots" if _speaks_unicode(console) else "line")
        self._title, self._total, self._done, self._kind = "", 0, 0, "train"
        self._facts: dict[str, str] = {}
        self._phase, self._part = "starting", (0, 0)
        self._last: dict[str, float] = {}
        self._curves: dict[str, deque[float]] = {}
        self._before: Mapping[str, float] | None = None
        self._evaluation = ""
        self._sample: Sample | None = None
        self._warnings = 0
        self._warning = ""
        self._alarms = 0
        self._alarm = ""

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
        with self._lock:
            self._title, self._total, self._done = one_line(title, 60), total_steps, first_step
            self._facts = {name: one_line(str(fact), 200) for name, fact in facts.items()}
            self._before = before
            for metrics in history:
                self._remember(metrics)
            self._pace.start()
        if self._live is None:
            self._live = Live(
                _Panel(self),
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
                auto_refresh=self._auto_refresh,
            )
            self._live.start()

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase, self._part = one_line(name, PHASE_WIDTH), (0, 0)

    def progress(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            self._phase, self._part = one_line(phase, PHASE_WIDTH), (done, total)

    def step(self, view: StepView) -> None:
        with self._lock:
            if view.kind != self._kind:
                # The loss of the warm-up and that of the training have nothing to do with each other.
                self._curves.clear()
                self._last.clear()
            self._kind, self._done, self._total = view.kind, view.step, view.total_steps
            self._part = (0, 0)
            self._sample = view.sample or self._sample
            self._pace.tick(view.kind)
            self._remember(view.metrics)

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        with self._lock:
            if self._kind == "warmup" or not self._last:
                self._pace.mark()
            self._evaluation = scores_line(step, self._before, scores)
            self._before = self._before or dict(scores)
        self._print(f"evaluation at {self._evaluation}")

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info":
            with self._lock:
                if level == "alarm":
                    self._alarms += 1
                    self._alarm = one_line(text, 200)
                else:
                    self._warnings += 1
                    self._warning = one_line(text, 200)
            text = f"{level}: {text}"
        self._print(text, style=STYLES.get(level))

    def finish(self, summary: Summary) -> None:
        with self._lock:
            self._phase, self._part = summary.status, (0, 0)
        self.close()
        print_summary(self._console, summary)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _remember(self, metrics: Mapping[str, float]) -> None:
        self._last = dict(metrics)
        for name, value in metrics.items():
            if name in METRICS or _is_verifier(name):
                self._curves.setdefault(name, deque(maxlen=HISTORY)).append(float(value))

    def _print(self, text: str, *, style: str | None = None) -> None:
        self._console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def render(self, width: int, height: int) -> RenderableType:
        """The panel for a terminal of `width` columns and `height` lines."""
        with self._lock:
            inner = max(20, width - 4)
            foot = list(self._foot(inner))
            columns = max(1, min(3, inner // CELL_WIDTH))
            # Borders, bar, phase and a blank line; rich cuts off what does not fit, and that would be the foot.
            room = max(1, height - 6 - len(foot))
            parts: list[RenderableType] = [self._bar(inner), self._activity()]
            if self._last:
                parts += [Text(), self._metrics(inner, columns, room)]
            else:
                parts += [_fact_line(name, fact) for name, fact in list(self._facts.items())[:room]]
            title = Text(f" {self._title} ", style="bold")
            return Panel(Group(*parts, *foot), title=title, title_align="left", width=width, border_style="blue")

    def _bar(self, width: int) -> RenderableType:
        left = self._pace.remaining(self._total - self._done)
        text = f" {'warm-up' if self._kind == 'warmup' else 'step'} {self._done}/{self._total}"
        text += f"  {show_duration(self._pace.elapsed())}"
        text += f"  {show_duration(left)} left" if left is not None else ""
        row = Table.grid(expand=False)
        row.add_row(ProgressBar(total=max(1, self._total), completed=self._done, width=max(8, width - len(text))), text)
        return row

    def _activity(self) -> RenderableType:
        done, total = self._part
        text = f"{self._phase} {done}/{total} ({100 * done / total:.0f} %)" if total else self._phase
        if self._live is None:
            return Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        self._spinner.update(text=Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _metrics(self, width: int, columns: int, room: int) -> RenderableType:
        verifiers = sorted(name for name in self._last if _is_verifier(name))
        # One verifier alone is the reward itself.
        names = [name for name in METRICS if name in self._last]
        names[1:1] = verifiers if len(verifiers) > 1 else []
        names = names[: room * columns]
        cell = width // columns
        table = Table.grid()
        for _ in range(columns):
            table.add_column(width=cell, no_wrap=True)
        cells = [self._cell(name, cell) for name in names]
        cells += [Text()] * (-len(cells) % columns)
        rows = len(cells) // columns
        for row in range(rows):
            table.add_row(*(cells[row + column * rows] for column in range(columns)))
        return table

    def _cell(self, name: str, width: int) -> Text:
        label = METRICS.get(name, name.removeprefix("reward/"))
        text = Text().append(f"{one_line(label, NAME_WIDTH):<{NAME_WIDTH}}", style="dim")
        style = "bold green" if name in HIGHER_IS_BETTER else "bold"
        text.append(f"{show_metric(name, self._last[name]):>{VALUE_WIDTH}}", style=style)
        curve = sparkline(
            list(self._curves.get(name, ())),
            width - NAME_WIDTH - VALUE_WIDTH - 3,
            ascii_only=not _speaks_unicode(self._console),
        )
        text.append(f" {curve}", style="green" if name in HIGHER_IS_BETTER else "blue")
        return text

    def _foot(self, width: int) -> Iterator[RenderableType]:
        if self._evaluation:
            yield _fact_line("evaluation", self._evaluation, width=width)
        if self._sample is not None:
            yield _fact_line("sample", sample_line(self._sample, width - NAME_WIDTH), width=width)
        errors = self._last.get("errors/share", 0.0)
        if errors > 0:
            share = show_metric("errors/share", errors)
            yield _fact_line("errors", f"{share} of the episodes could not be verified", width=width, style="bold red")
        if self._alarms:
            yield _fact_line("alarms", f"{self._alarms}, the last: {self._alarm}", width=width, style="bold red")
        if self._warnings:
            text = f"{self._warnings}, the last: {self._warning}"
            yield _fact_line("warnings", text, width=width, style="yellow")


class _Panel:
    """What rich draws: asks the display for the panel at the size that the terminal has now."""

    def __init__(self, display: LiveDisplay) -> None:
        self._display = display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._display.render(options.max_width, options.height or console.size.height)


def _fact_line(name: str, text: str, *, width: int = 200, style: str = "default") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{one_line(name, NAME_WIDTH - 1):<{NAME_WIDTH}}", style="dim")
    return line.append(one_line(text, width - NAME_WIDTH), style=style)


def _is_verifier(name: str) -> bool:
    return name.startswith("reward/") and name not in ("reward/mean", "reward/std", "reward/min", "reward/max")


def _speaks_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
