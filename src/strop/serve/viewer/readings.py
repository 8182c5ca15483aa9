"""What a run's manifest, recipe and metrics say now."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from strop.errors import StropError
from strop.serve.viewer.catalog import NotFound, inside
from strop.tracking.load import LoadTail
from strop.tracking.metrics_tail import MetricsTail
from strop.tracking.run_directory import Manifest, read_manifest, status_of

HEADLINES = ("reward/mean", "accuracy", "eval/accuracy", "loss/nll", "loss")
"""What a run is shown by in the list of runs: the first of these that it has."""
SPARKS = 48
A_MOMENT = 0.5
"""Seconds for reading metrics of runs that were not read yet, in one answer."""
MOST_WHOLE = 32
"""Runs all of whose metrics are kept in memory; the one looked at longest ago is forgotten first."""
MOST_LOADS = 4
"""Runs whose load is kept in memory: many machines with many cards each are many numbers."""
MOST_RUNS = 2048
"""Runs of which what a list of them shows is kept, and recipes."""


class Readings:
    """The metrics of runs, each file followed from where it was read up to. May be used from several threads."""

    def __init__(self) -> None:
        self._tails: OrderedDict[Path, MetricsTail] = OrderedDict()
        self._glanced: OrderedDict[Path, MetricsTail] = OrderedDict()
        self._loads: OrderedDict[Path, MetricsTail] = OrderedDict()
        self._lock = threading.Lock()

    def tail(self, run: Path) -> MetricsTail:
        """The metrics of a run."""
        path = inside(run, "metrics.jsonl")
        with self._lock:
            return _kept(self._tails, path, MOST_WHOLE) or _added(self._tails, path, MetricsTail(path))

    def load(self, run: Path) -> MetricsTail:
        """The load of a run's machines."""
        path = inside(run, "load.jsonl")
        with self._lock:
            return _kept(self._loads, path, MOST_LOADS) or _added(self._loads, path, LoadTail(path))

    def _headlines(self, run: Path) -> MetricsTail:
        """Those of a run's metrics that a list of runs shows, so that there may be very many runs."""
        path = inside(run, "metrics.jsonl")
        with self._lock:
            if path in self._tails:
                return self._tails[path]
            kept = _kept(self._glanced, path, MOST_RUNS)
            return kept or _added(self._glanced, path, MetricsTail(path, only=HEADLINES))

    def glance(self, name: str, run: Path, *, until: float = math.inf) -> dict[str, Any]:
        """A run at a glance; one whose manifest cannot be read says why instead.

        Args:
            until: by `time.monotonic()`, when to begin no more files; a run whose metrics were not read yet is then
                `pending` and has no numbers.
        """
        try:
            manifest = manifest_of(run)
            tail = self._headlines(run)
        except StropError as error:
            return {"run": name, "status": "unreadable", "problem": error.what}
        pending = tail.untouched and time.monotonic() > until
        if not pending:
            tail.poll()
        recipe = Recipe.of(run)
        status = status_of(run, manifest)
        step, changed = tail.last("train")
        found: dict[str, Any] = {
            "run": name,
            "status": status,
            "problem": _first_line(manifest.error or manifest.stopped),
            "step": step,
            "steps": manifest.steps if isinstance(manifest.steps, int) else 0,
            "recipe": recipe_name(manifest),
            "method": recipe.method,
            "created": manifest.created,
            "updated": changed,
            "seconds": worked(manifest, status, tail.times()),
            "alarms": len(manifest.alarms),
            "pending": pending,
        }
        warmup, _ = tail.last("warmup")
        if not step and warmup:
            found["warmup"] = warmup
        return found | _headline(tail)

    def glances(self, runs: Mapping[str, Path]) -> list[dict[str, Any]]:
        """All runs at a glance, newest first. Metrics that were not read yet are read for a moment only, those of the
        runs that changed last first; the others are `pending`."""
        until = time.monotonic() + A_MOMENT
        order = sorted(runs.items(), key=lambda item: _changed(item[1]), reverse=True)
        found = [self.glance(name, path, until=until) for name, path in order]
        return sorted(found, key=lambda one: str(one.get("created", "")), reverse=True)

    def whole(self, name: str, run: Path) -> dict[str, Any]:
        """Everything of a run but its numbers: manifest, how it stands, and the names of its metrics."""
        manifest = manifest_of(run)
        tail = self.tail(run)
        glance = self.glance(name, run)
        return glance | {
            "manifest": dataclasses.asdict(manifest),
            "alarms": [alarm for alarm in manifest.alarms if isinstance(alarm, dict)],
            "names": tail.names(),
            "supervised": Recipe.of(run).supervised,
        }


def _kept(tails: OrderedDict[Path, MetricsTail], path: Path, most: int) -> MetricsTail | None:
    """The one of a path, as the last one used; makes room for another if there is none."""
    if path in tails:
        tails.move_to_end(path)
        return tails[path]
    while len(tails) >= most:
        tails.popitem(last=False)
    return None


def _added(tails: OrderedDict[Path, MetricsTail], path: Path, tail: MetricsTail) -> MetricsTail:
    tails[path] = tail
    return tail


def manifest_of(run: Path) -> Manifest:
    """A run's manifest.

    Raises:
        NotFound: it lies elsewhere, or is gone. UserError: it cannot be read.
    """
    if not inside(run, "run.json").is_file():
        raise NotFound("the run is gone", where=str(run), mend="its folder was deleted or moved")
    manifest = read_manifest(run)
    # Older or foreign manifests may have other kinds of values here; what follows counts on these.
    others: dict[str, Any] = {"alarms": [], "resumed": [], "command": [], "status": str(manifest.status)}
    for key in ("alarms", "resumed", "command"):
        if isinstance(value := getattr(manifest, key), list):
            others[key] = value
    return dataclasses.replace(manifest, **others)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run's config.yaml says. values: all of it, empty if it cannot be read."""

    values: dict[str, Any]

    @classmethod
    def of(cls, run: Path) -> Recipe:
        """The recipe of a run; files that did not change are read once."""
        try:
            path = inside(run, "config.yaml")
            status = path.stat()
            return _recipe(path, status.st_mtime_ns, status.st_size)
        except (OSError, NotFound):
            return cls({})

    @property
    def supervised(self) -> bool:
        return isinstance(self.values.get("supervised"), dict)

    @property
    def offline(self) -> bool:
        return self.values.get("offline") is not None

    @property
    def method(self) -> str:
        """What it trains by: `grpo`, `sft`, `dpo`, …"""
        section, key = ("supervised", "method") if self.supervised else ("algorithm", "name")
        part = self.values.get(section)
        return str(part.get(key) or "") if isinstance(part, dict) else ""


_recipes: OrderedDict[tuple[Path, int, int], Recipe] = OrderedDict()


def _recipe(path: Path, changed: int, size: int) -> Recipe:
    key = (path, changed, size)
    found = _recipes.get(key)
    if found is None:
        try:
            loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            loaded = None
        found = _recipes[key] = Recipe(loaded if isinstance(loaded, dict) else {})
        while len(_recipes) > MOST_RUNS:
            _recipes.popitem(last=False)
    return found


def recipe_name(manifest: Manifest) -> str:
    """Name of the recipe's file, by the command that started the run; "" if it was started from Python."""
    files = (str(word) for word in manifest.command if str(word).endswith((".yaml", ".yml")))
    return Path(next(files, "")).stem


def worked(manifest: Manifest, status: str, times: Sequence[float]) -> float:
    """Seconds from each start or resume to the last sign of life before the next one; NaN if the dates are no dates."""
    try:
        starts = [datetime.fromisoformat(when).timestamp() for when in (manifest.created, *manifest.resumed)]
        signs = [*times]
        if manifest.ended is not None:
            signs.append(datetime.fromisoformat(manifest.ended).timestamp())
    except (ValueError, TypeError):
        return math.nan
    if status == "running":
        signs.append(datetime.now(UTC).timestamp())
    ends = [*starts[1:], math.inf]
    return sum(
        max((sign - start for sign in signs if start <= sign < end), default=0.0)
        for start, end in zip(starts, ends, strict=True)
    )


def _headline(tail: MetricsTail) -> dict[str, Any]:
    for name in HEADLINES:
        kind = "eval" if name.startswith("eval/") else "train"
        _, values = tail.column(kind, name)
        known = [value for value in values if math.isfinite(value)]
        if known:
            return {"headline": name, "value": known[-1], "spark": thinned(values, SPARKS)}
    return {"headline": "", "value": None, "spark": []}


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many numbers: means of equal parts, those of infinite and missing ones left out."""
    count = len(values)
    parts = min(count, most)
    found = []
    for part in range(parts):
        known = [v for v in values[part * count // parts : (part + 1) * count // parts] if math.isfinite(v)]
        found.append(sum(known) / len(known) if known else math.nan)
    return found


def _changed(run: Path) -> float:
    try:
        return (run / "metrics.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _first_line(text: Any) -> str:
    return str(text or "").split("\n")[0][:300]
