"""When a step did what: the phases that a run times, laid out in the order of the loop."""

from __future__ import annotations

from typing import Any

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


def timeline(metrics: dict[str, float], recipe: dict[str, Any]) -> dict[str, Any]:
    """Lanes with spans, in seconds from the start of the step.

    A run records how long each phase took; the phases follow one another, as the loop goes. Whatever a lane does not
    work in is waiting. What the step took beside its phases is the driver's. Completions are verified while others are
    sampled; `time/verifying` is what was left of it after the last completion.

    Returns:
        `seconds` of the step, `lanes` (each with `name`, `device`, `busy` and `spans` of `name`, `start`, `seconds`)
        and `other`: timings of what is not in the step, waiting for a checkpoint before it for instance.
    """
    known = {name for name, _, _ in LOOP}
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    spans: dict[str, list[dict[str, Any]]] = {lane: [] for lane in LANES}
    at = 0.0
    for name, who, shown in LOOP:
        seconds = times.get(name, 0.0)
        if not 0 < seconds < float("inf"):
            continue
        for lane in who.split(" and "):
            spans[lane].append({"phase": name, "name": shown, "start": at, "seconds": seconds})
        at += seconds
    whole = times.get("step", at)
    total = max(at, whole if 0 < whole < float("inf") else at)
    if total - at > 1e-9:
        spans["driver"].append({"phase": "rest", "name": "everything else", "start": at, "seconds": total - at})
    devices = _devices(recipe)
    lanes = []
    for lane in LANES:
        busy = sum(span["seconds"] for span in spans[lane])
        if spans[lane]:
            lanes.append({"name": lane, "device": devices.get(lane, ""), "busy": busy, "spans": spans[lane]})
    other = {name: value for name, value in times.items() if name not in known and name != "step"}
    return {"seconds": total, "lanes": lanes, "other": other}


def _devices(recipe: dict[str, Any]) -> dict[str, str]:
    """Where each lane works, as far as the recipe says."""
    hardware, cluster, rollout = (_section(recipe, name) for name in ("hardware", "cluster", "rollout"))
    device = str(hardware.get("device") or "auto")
    engine = _section(rollout, "engine")
    ranks, engines = _section(cluster, "trainer").get("ranks"), _section(cluster, "engines").get("count")

    def told(*parts: str) -> str:
        # What the run chose for `auto` is not in its recipe.
        return ", ".join(part for part in parts if part not in ("", "auto"))

    return {
        "engine": told(str(engine.get("kind") or ""), _several(engines, "engines"), device),
        "verifiers": "",
        "trainer": told(_several(ranks, "ranks"), device),
        "driver": "",
    }


def _several(count: Any, what: str) -> str:
    return f"{count} {what}" if isinstance(count, int) and count > 1 else ""


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}
