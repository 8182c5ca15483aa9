"""What a run pays for its timeline and for the load of its machine, in processor time.

A step: 256 episodes are sampled and 64 groups scored, all at once or one after another, eight phases are noted, and the
line is written. A look: the machine, the tree of processes of this one, which has four others, and the cards if there
are any. `least` is nearest to what it costs on a machine that others use too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import measure

PHASES = ("sampling", "verifying", "scoring", "training", "publishing", "alarms", "recording", "checkpoint")
EPISODES, GROUPS = 256, 64
BESIDE = "import time\nbytearray(10 * 2**20)\ntime.sleep(600)"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=201)
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats = 3
    measure.use_threads(options.threads)
    with tempfile.TemporaryDirectory() as name, ExitStack() as others:
        for _ in range(4):
            other = subprocess.Popen([sys.executable, "-c", BESIDE])
            others.callback(other.wait)
            others.callback(other.kill)
        path = Path(name) / "timeline.jsonl"
        sides: dict[str, Callable[[], Callable[[], Any]]] = {
            "step, all at once": lambda: step(path, together=True),
            "step, one after another": lambda: step(path, together=False),
            "look at the machine": look,
        }
        times = {side: spent(make(), options.repeats) for side, make in sides.items()}
        last = path.read_text().splitlines()[-1]
    import psutil

    numbers = {
        "milliseconds": {
            side: {"median": round(measure.median(each), 4), "least": round(min(each), 4)}
            for side, each in times.items()
        },
        "spans": last.count("["),
        "bytes": len(last),
        "processes": len(psutil.pids()),
        "cores": os.cpu_count(),
    }
    measure.write("tracking_cost", numbers, options)
    return numbers


def step(path: Path, *, together: bool) -> Callable[[], None]:
    """What is done for the timeline in a step."""
    from strop.loops.spans import StepSpans
    from strop.rollout.busy import Busy
    from strop.tracking.timeline import TimelineWriter

    spans, engine, verifiers = StepSpans(TimelineWriter(path)), Busy(), Busy()

    def go_through(busy: Busy, count: int) -> None:
        with busy if together else nullcontext():
            for _ in range(count):
                with busy:
                    pass

    def once() -> None:
        now = time.perf_counter()
        spans.begin(now)
        go_through(engine, EPISODES)
        go_through(verifiers, GROUPS)
        for phase in PHASES:
            spans.note(phase, now, now + 1)
        spans.sampled([engine.take()], verifiers.take())
        spans.write(1, 1.0)

    return once


def look() -> Callable[[], Any]:
    """What is done for a line of `load.jsonl`, but for writing it."""
    from strop.tracking.load_probe import LoadProbe

    probe = LoadProbe()
    return probe.take


def spent(work: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of processor time of each call."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        found.append(1000 * (time.process_time() - started))
    return found


if __name__ == "__main__":
    main()
