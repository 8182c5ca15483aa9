"""What callers read of runs, cheaply: files are read on from where they were read to, once for all callers."""

from __future__ import annotations

import json
import math
import os
import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from strop.errors import UserError
from strop.serve.api.confined import NotServed, folder_below, open_below, parts_of
from strop.tracking.pipeline_directory import MANIFEST as PIPELINE
from strop.tracking.run_directory import Manifest, read_manifest, status_of

AT_ONCE = 256 * 1024
"""Bytes of metrics in one answer, about."""
_OWN: dict[str, tuple[str, type]] = {"metrics.jsonl": ("metrics", dict), "load.jsonl": ("node", str)}
"""What every line of a file has, and of which kind it is."""
_CURSOR = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,18})")


@dataclass
class _Progress:
    """Where a run's metrics were read to, and the last step there."""

    inode: int = 0
    offset: int = 0
    step: int = 0
    last: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Metrics:
    """Lines of `metrics.jsonl`, or of `load.jsonl`, as JSON. behind: where to go on behind each. next: where to go on
    behind all. restarted: what was asked for is not there any more, since the run went on from a checkpoint; these
    lines are from the beginning."""

    lines: tuple[bytes, ...]
    behind: tuple[str, ...]
    next: str
    restarted: bool

    def json(self) -> bytes:
        """All of it as JSON."""
        restarted = b"true" if self.restarted else b"false"
        return b'{"records":[%b],"next":"%b","restarted":%b}' % (b",".join(self.lines), self.next.encode(), restarted)


class Runs:
    """The runs below a folder, as a service shows them. A run of a pipeline is named `pipeline:stage`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._progress: dict[str, _Progress] = {}
        self._manifests: dict[str, tuple[tuple[int, ...], Manifest]] = {}
        self._metrics: OrderedDict[tuple[str, int, int, int], Metrics] = OrderedDict()
        self._lock = Lock()

    def parts(self, name: str) -> list[str]:
        """The folders that a run's name means. Raises NotServed where there is no such run."""
        parts = parts_of(name.replace(":", "/", 1))
        if len(parts) > 2 or len(parts) != 1 + name.count(":"):
            raise NotServed(name)
        with folder_below(self.root, parts) as folder:
            names = set(os.listdir(folder))
        if "run.json" not in names and PIPELINE not in names:
            raise NotServed(name)
        return parts

    def names(self) -> list[str]:
        """All runs, those of pipelines too."""
        found = []
        for entry in self._folders([]):
            with folder_below(self.root, [entry]) as folder:
                names = set(os.listdir(folder))
            if "run.json" in names:
                found.append(entry)
            elif PIPELINE in names:
                found += [f"{entry}:{stage}" for stage in self.stages([entry])]
        return sorted(found)

    def stages(self, parts: list[str]) -> list[str]:
        """The folders of runs in a pipeline's folder; none in another's."""
        if len(parts) > 1:
            return []
        return [stage for stage in self._folders(parts) if self._is_run([*parts, stage])]

    def view(self, name: str) -> dict[str, Any]:
        """A run at a glance. Raises NotServed, and UserError where its manifest cannot be read."""
        parts = self.parts(name)
        path = self.root.joinpath(*parts)
        manifest = self._manifest(name, path)
        progress = self._read_on(name, parts)
        return {
            "name": name,
            "status": status_of(path, manifest),
            "step": progress.step,
            "steps": manifest.steps,
            "reward": progress.last.get("reward/mean"),
            "accuracy": progress.last.get("accuracy"),
            "created": manifest.created,
            "ended": manifest.ended,
            "id": manifest.id,
            "parent": manifest.parent,
            "config_hash": manifest.config_hash,
            "scores": _finite(manifest.scores),
            "best": _finite(manifest.best),
            "alarms": len(manifest.alarms),
            "stopped": manifest.stopped,
            "error": manifest.error,
        }

    def metrics(self, name: str, after: str = "", *, file: str = "metrics.jsonl") -> Metrics:
        """The next lines of a run's metrics, or of `load.jsonl`. after: `next` of the answer before; empty from the
        beginning.

        Raises:
            NotServed: there is no such run. UserError: `after` is not from an answer.
        """
        match = _CURSOR.fullmatch(after) if after else None
        if after and match is None:
            raise UserError("`after` is not from an answer", where="after", mend="send `next` of the answer before")
        parts = self.parts(name)
        try:
            handle = open_below(self.root, [*parts, file])
        except NotServed:
            return Metrics((), (), "", restarted=bool(after))
        try:
            stat = os.fstat(handle)
            asked = 0 if match is None else int(match[2])
            same = match is not None and int(match[1], 16) == stat.st_ino and asked <= stat.st_size
            offset = asked if same else 0
            key = ("/".join([*parts, file]), stat.st_ino, offset, stat.st_size)
            with self._lock:
                if key not in self._metrics:
                    self._metrics[key] = _lines(handle, stat.st_ino, offset, file)
                    while len(self._metrics) > 64:
                        self._metrics.popitem(last=False)
                found = self._metrics[key]
        finally:
            os.close(handle)
        return replace(found, restarted=bool(after) and not same)

    def _manifest(self, name: str, path: Path) -> Manifest:
        try:
            stat = os.stat(path / "run.json", follow_symlinks=False)
        except OSError:
            raise NotServed(name) from None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        with self._lock:
            kept = self._manifests.get(name)
        if kept is not None and kept[0] == seen:
            return kept[1]
        os.close(open_below(path, ["run.json"]))
        manifest = read_manifest(path)
        with self._lock:
            self._manifests[name] = (seen, manifest)
        return manifest

    def _read_on(self, name: str, parts: list[str]) -> _Progress:
        """Read what a run's metrics have more than last time."""
        try:
            handle = open_below(self.root, [*parts, "metrics.jsonl"])
        except NotServed:
            return _Progress()
        try:
            with self._lock:
                progress, stat = self._progress.setdefault(name, _Progress()), os.fstat(handle)
                if progress.inode != stat.st_ino or stat.st_size < progress.offset:
                    progress = self._progress[name] = _Progress(stat.st_ino)
                while progress.offset < stat.st_size:
                    lines, end = _whole_lines(handle, progress.offset)
                    if end == progress.offset:
                        break
                    progress.offset = end
                    for line, _ in lines:
                        if line.get("kind") == "train":
                            progress.step, progress.last = line["step"], line["metrics"]
                return _Progress(progress.inode, progress.offset, progress.step, dict(progress.last))
        finally:
            os.close(handle)

    def _folders(self, parts: list[str]) -> list[str]:
        """Names of the plain folders below a folder that may be seen."""
        found = []
        with folder_below(self.root, parts) as handle:
            for entry in os.scandir(handle):
                try:
                    if entry.is_dir(follow_symlinks=False) and parts_of(entry.name) and ":" not in entry.name:
                        found.append(entry.name)
                except (NotServed, OSError):
                    continue
        return found

    def _is_run(self, parts: list[str]) -> bool:
        with folder_below(self.root, parts) as handle:
            return "run.json" in os.listdir(handle)


def _lines(handle: int, inode: int, offset: int, file: str) -> Metrics:
    found, end = _whole_lines(handle, offset, file)
    lines = tuple(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() for line, _ in found)
    behind = tuple(f"{inode:x}.{at}" for _, at in found)
    return Metrics(lines, behind, f"{inode:x}.{end}", restarted=False)


def _whole_lines(handle: int, offset: int, file: str = "metrics.jsonl") -> tuple[list[tuple[dict[str, Any], int]], int]:
    """Lines from a place on that can be read, each with its end, and where the next one begins."""
    data = os.pread(handle, AT_ONCE, offset)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == AT_ONCE:
        # A line longer than this is not one of a run; it is gone over.
        return [], offset + len(data)
    key, kind = _OWN[file]
    found, at = [], offset
    for raw in data[:end].splitlines(keepends=True):
        at += len(raw)
        try:
            line = json.loads(raw)
            if isinstance(line, dict) and isinstance(line["step"], int) and isinstance(line[key], kind):
                found.append((_finite(line), at))
        except (ValueError, KeyError):
            continue
    return found, offset + end


def _finite(value: Any) -> Any:
    """A value that JSON can hold: numbers that are not finite are null."""
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
