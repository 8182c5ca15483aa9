"""When a step did what: the spans that a run recorded, or for older runs the phases in the order of the loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from strop.tracking.timeline import Span, StepTimeline, joined

LOOP: tuple[tuple[str, str, str], ...] = (
    ("sampling", "engine", "sampling"),
    ("verifying", "verifiers", "verifying"),
    ("sleep", "engine", "engine to sleep"),
    ("preparing", "trainer", "preparing"),
    ("scoring", "trainer", "scoring"),
    ("reload", "trainer", "loading the optimizer"),
    ("training", "trainer", "training"),
    ("offload", "trainer", "offloading"),
    ("wake", "engine", "waking the engine"),
    ("publishing", "trainer and engine", "publishing"),
    ("alarms", "driver", "alarms"),
)
"""Each `time/NAME` in the order in which the loop does it: who works, and what it is called."""
LANES = ("engine", "verifiers", "trainer", "driver")
_SHOWN = {name: shown for name, _, shown in LOOP}
_WAITS = {"sampling": "waiting for completions", "verifying": "waiting for verifiers"}
"""What the driver does in these phases."""
_ENGINE = re.compile(r"engine( \d+)?")
MOST_LANES = 64


def timeline(metrics: dict[str, float], recipe: dict[str, Any], recorded: StepTimeline | None = None) -> dict[str, Any]:
    """Lanes with spans, in seconds from the start of the step; what began before it has a start below 0.

    Whatever a lane does not work in is waiting. Of a run that recorded no spans only the durations of its phases are
    known; these are laid one after another, and what the step took beside them is the driver's.

    Returns:
        `recorded`: whether these are spans that the run recorded. `seconds` of the step, `begin` and `end` of all that
        is shown, `started` in Unix seconds (None if not recorded), `lanes` (each with `name`, `device`, `busy` and
        `spans` of `phase`, `name`, `start`, `seconds`, `waits`) and `other`: timings of what is not in the step, where
        no span tells when it was.
    """
    if recorded is None:
        return _laid_out(metrics, recipe)
    spans = list(recorded.spans)
    engines = list(dict.fromkeys(span.lane for span in spans if _ENGINE.fullmatch(span.lane))) or ["engine"]
    # Engines take the weights that the trainer gives.
    publishing = [span for span in spans if span.phase == "publishing"]
    sampled = any(span.phase == "sampling" for span in spans)
    spans += [Span(one.phase, lane, one.start, one.seconds) for one in publishing for lane in engines if sampled]
    known = {span.phase for span in spans}
    lanes = []
    for name in sorted({span.lane for span in spans}, key=_order)[:MOST_LANES]:
        own = sorted((span for span in spans if span.lane == name), key=lambda span: (span.start, -span.seconds))
        shown = [
            _told(span.phase, span.start, span.seconds, waits=name == "driver" and span.phase in _WAITS) for span in own
        ]
        lanes.append(_lane(name, shown, recipe))
    ends = [span.start + span.seconds for span in spans]
    return {
        "recorded": True,
        "seconds": recorded.seconds,
        "started": recorded.time,
        "begin": min([0.0, *(span.start for span in spans)]),
        "end": max([recorded.seconds, *ends]),
        "lanes": lanes,
        "other": {name: value for name, value in _times(metrics).items() if name not in known and name != "step"},
    }


def _laid_out(metrics: dict[str, float], recipe: dict[str, Any]) -> dict[str, Any]:
    """The phases of a step by their durations. Completions are verified while others are sampled; `time/verifying` is
    what was left of it after the last completion."""
    times = _times(metrics)
    spans: dict[str, list[dict[str, Any]]] = {lane: [] for lane in LANES}
    at = 0.0
    for name, who, _ in LOOP:
        seconds = times.get(name, 0.0)
        if not 0 < seconds < float("inf"):
            continue
        for lane in who.split(" and "):
            spans[lane].append(_told(name, at, seconds))
        at += seconds
    whole = times.get("step", at)
    total = max(at, whole if 0 < whole < float("inf") else at)
    if total - at > 1e-9:
        spans["driver"].append(_told("rest", at, total - at))
    return {
        "recorded": False,
        "seconds": total,
        "started": None,
        "begin": 0.0,
        "end": total,
        "lanes": [_lane(lane, spans[lane], recipe) for lane in LANES if spans[lane]],
        "other": {name: value for name, value in times.items() if name not in _SHOWN and name != "step"},
    }


def _times(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}


def _told(phase: str, start: float, seconds: float, *, waits: bool = False) -> dict[str, Any]:
    """A span as the page gets it. waits: whoever is in this lane waits for others meanwhile."""
    name = _WAITS[phase] if waits else "everything else" if phase == "rest" else _SHOWN.get(phase, phase)
    return {"phase": phase, "name": name, "start": start, "seconds": seconds, "waits": waits}


def _lane(name: str, spans: Sequence[dict[str, Any]], recipe: dict[str, Any]) -> dict[str, Any]:
    worked = joined([(span["start"], span["start"] + span["seconds"]) for span in spans if not span["waits"]])
    device = _devices(recipe, one=name != "engine").get("engine" if _ENGINE.fullmatch(name) else name, "")
    return {"name": name, "device": device, "busy": sum(end - start for start, end in worked), "spans": list(spans)}


def _order(lane: str) -> tuple[int, int, str]:
    """Engines by their numbers, verifiers, trainer, driver, and whatever else there is."""
    kind, _, number = lane.partition(" ")
    first = LANES.index(kind) if kind in LANES else len(LANES)
    return first, int(number) if number.isdecimal() and len(number) < 9 else 0, lane


def _devices(recipe: dict[str, Any], *, one: bool) -> dict[str, str]:
    """Where each lane works, as far as the recipe says. one: of one engine."""
    hardware, cluster, rollout = (_section(recipe, name) for name in ("hardware", "cluster", "rollout"))
    device = str(hardware.get("device") or "auto")
    engine = _section(rollout, "engine")
    ranks, engines = _section(cluster, "trainer").get("ranks"), _section(cluster, "engines").get("count")

    def told(*parts: str) -> str:
        # What the run chose for `auto` is not in its recipe.
        return ", ".join(part for part in parts if part not in ("", "auto"))

    return {
        "engine": told(str(engine.get("kind") or ""), "" if one else _several(engines, "engines"), device),
        "verifiers": "",
        "trainer": told(_several(ranks, "ranks"), device),
        "driver": "",
    }


def _several(count: Any, what: str) -> str:
    return f"{count} {what}" if isinstance(count, int) and count > 1 else ""


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}
