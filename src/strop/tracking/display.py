"""What a person sees while a run goes on: the protocol, what is shown, and the choice of a display."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from strop.config.run import TrackingSettings

if TYPE_CHECKING:
    from rich.console import Console

Level = Literal["info", "warning", "error", "alarm"]


@dataclass(frozen=True)
class Sample:
    """A completion to look at."""

    prompt: str
    completion: str
    reward: float | None = None
    correct: bool | None = None
    answer: str | None = None


@dataclass(frozen=True)
class StepView:
    """A step that is done.

    step: 1 for the first. total_steps: of its kind. metrics: by the names of `metrics.jsonl`; a display shows those it
    knows. sample: one completion of the step, at every step if it costs nothing; displays choose when to show it.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    sample: Sample | None = None
    kind: Literal["train", "warmup"] = "train"


@dataclass(frozen=True)
class Summary:
    """What is said at the end.

    before, after: scores of the first and the last evaluation, such as `accuracy` and `reward`. seconds: wall clock of
    this process. next_commands: what to try next; made up from the paths when not given. problem: why the run did not
    finish. best: which checkpoint is the best one, with its score and path. stopped: why the run ended before its last
    step. alarms: signs of reward hacking, a sentence each.
    """

    run: Path
    steps: int
    total_steps: int
    seconds: float
    status: Literal["finished", "interrupted", "failed"] = "finished"
    before: Mapping[str, float] | None = None
    after: Mapping[str, float] | None = None
    tokens_sampled: int = 0
    tokens_trained: int = 0
    model: Path | None = None
    events: Path | None = None
    next_commands: Sequence[str] = ()
    problem: str = ""
    best: str = ""
    stopped: str = ""
    alarms: Sequence[str] = ()


class Display(Protocol):
    """A view of a run. Calls are cheap (a display never slows the loop by more than some milliseconds) and none fails
    because of what a metric or a completion holds."""

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
        """Begin. facts: what the run is (model, data, device), shown as they are. For a run that goes on: first_step,
        the steps that are done; before, the scores of its first evaluation; history, the metrics of its steps."""
        ...

    def phase(self, name: str) -> None:
        """What is being done now: "loading the model", "sampling", …"""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far a phase is, to be seen inside a long step: `progress("sampling", 120, 512)`."""
        ...

    def step(self, view: StepView) -> None: ...

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Scores on held-out prompts after a step; the first call is what others are compared with."""
        ...

    def message(self, text: str, level: Level = "info") -> None: ...

    def finish(self, summary: Summary) -> None:
        """Close the display and say how it ended."""
        ...

    def close(self) -> None:
        """Give the terminal back without a summary (an error is about to be printed); a second call does nothing."""
        ...


class SilentDisplay:
    """Shows nothing."""

    def start(
        self,
        title: str,
        total_steps: int,
        facts: Mapping[str, Any],
        *,
        first_step: int = 0,
        before: Mapping[str, float] | None = None,
        history: Sequence[Mapping[str, float]] = (),
    ) -> None: ...

    def phase(self, name: str) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...

    def step(self, view: StepView) -> None: ...

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None: ...

    def message(self, text: str, level: Level = "info") -> None: ...

    def finish(self, summary: Summary) -> None: ...

    def close(self) -> None: ...


def make_display(settings: TrackingSettings, *, console: Console | None = None) -> Display:
    """The display that `tracking.display` asks for; `auto` is live on a terminal that a person looks at, else plain."""
    if settings.display == "off":
        return SilentDisplay()
    from rich.console import Console

    from strop.tracking.display_live import LiveDisplay
    from strop.tracking.display_plain import PlainDisplay

    console = console or Console()
    if isinstance(console.file, TextIOWrapper):
        # A terminal in another encoding shows "?" for what it does not have; a run does not end for that.
        console.file.reconfigure(errors="replace")
    live = settings.display == "live" or (settings.display == "auto" and _is_watched(console))
    return LiveDisplay(console) if live else PlainDisplay(console)


def _is_watched(console: Console) -> bool:
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return console.is_terminal and not console.is_dumb_terminal and os.environ.get("TERM", "") != "dumb"


@dataclass
class Pace:
    """Time per step over the last 20 steps, and what it says of the rest."""

    clock: Callable[[], float] = time.monotonic
    times: deque[float] = field(default_factory=lambda: deque(maxlen=21))
    begun: float = 0.0
    kind: str = ""

    def start(self) -> None:
        """The run begins now."""
        self.begun = self.clock()
        self.mark()

    def mark(self) -> None:
        """The next step begins now; what came before says nothing of it."""
        self.times.clear()
        self.times.append(self.clock())

    def tick(self, kind: str) -> None:
        """A step is done. Warm-up steps say nothing of how long training steps take."""
        if kind != self.kind and self.times:
            last = self.times[-1]
            self.times.clear()
            self.times.append(last)
        self.kind = kind
        self.times.append(self.clock())

    def elapsed(self) -> float:
        """Seconds since `start`."""
        return self.clock() - self.begun

    def remaining(self, steps: int) -> float | None:
        """Seconds that so many steps will take; None before the first is done."""
        if len(self.times) < 2:
            return None
        return steps * (self.times[-1] - self.times[0]) / (len(self.times) - 1)
