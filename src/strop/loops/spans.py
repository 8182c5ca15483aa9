"""When the phases of the steps ran, for `timeline.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from strop.rollout.busy import Interval
from strop.tracking.timeline import Span, StepTimeline, TimelineWriter

WORKS = {
    **dict.fromkeys(("preparing", "scoring", "reload", "training", "offload", "publishing"), "trainer"),
    **dict.fromkeys(("sleep", "wake"), "engine"),
}
"""Who works in a phase of the loop; in the others it is the driver, or the driver waits."""


class StepSpans:
    """Collects what was done since the line of the step before, and writes it with a step's.

    So what follows the line of a step, an evaluation or a checkpoint, is with the next step, and begins before it.

    Args:
        writer: of the run's folder; None where nothing is written.
    """

    def __init__(self, writer: TimelineWriter | None) -> None:
        self._writer = writer
        self._noted: list[tuple[str, str, float, float]] = []
        self._began = self._clock = 0.0

    def begin(self, started: float) -> None:
        """A step began at a moment by `time.perf_counter()`."""
        self._began = started
        self._clock = time.time() - (time.perf_counter() - started)

    def note(self, phase: str, started: float, ended: float) -> None:
        """A phase of the loop was run."""
        self._noted.append((phase, WORKS.get(phase, "driver"), started, ended))

    def sampled(self, engines: Sequence[Sequence[Interval]], verifiers: Sequence[Interval]) -> None:
        """When each engine and the verifiers were at work, whatever the loop did meanwhile."""
        for number, intervals in enumerate(engines):
            lane = f"engine {number}" if len(engines) > 1 else "engine"
            self._noted += [("sampling", lane, *interval) for interval in intervals]
        self._noted += [("verifying", "verifiers", *interval) for interval in verifiers]

    def write(self, step: int, seconds: float) -> None:
        """The step is done, and took so long."""
        noted, self._noted = self._noted, []
        if self._writer is not None:
            spans = tuple(Span(phase, lane, start - self._began, end - start) for phase, lane, start, end in noted)
            self._writer.log(StepTimeline(step, self._clock, seconds, spans))
