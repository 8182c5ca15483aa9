"""The run directory: where a run keeps everything, and its manifest `run.json`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from strop.errors import RunFailure, StropError, UserError
from strop.tracking.atomic import write_text_atomically
from strop.tracking.run_lock import RunLock, is_locked
from strop.tracking.series import cannot_be_made, folder_name, folders_of, place
from strop.tracking.system import git_state, platform_facts, versions

RunStatus = Literal["running", "finished", "failed", "interrupted"]
ASKED_TO_LEAVE = "it was asked to leave"
"""What `Manifest.stopped` says of a run that saved and ended on SIGUSR1; the same command goes on with it."""


@dataclass(frozen=True)
class Manifest:
    """What `run.json` holds. Times are ISO 8601 in UTC; `steps` is how many were planned.

    id: random and permanent, the identity of the run for other trackers. series, number: runs of one name count up;
    the folder is `series` or `series-number`. parent: the run that this one started from. data, model: what the caller
    knows of them (paths, fingerprints). inputs: the models that the run began with or asks, by the key that names
    them: path, folder, fingerprint, and of a model that strop trained the run's id and the checkpoint. trackers: ids
    that other trackers gave to this run. scores: "before" and "after" evaluations. best: metric, step and score of the
    best checkpoint. alarms: signs of reward hacking, in order, each with name, step, value, limit, what was seen, and
    the group and sample of a completion that shows it. stopped: why it ended before its last step. error: why it
    failed.
    """

    id: str
    series: str
    number: int
    created: str
    status: RunStatus = "running"
    ended: str | None = None
    resumed: list[str] = field(default_factory=list)
    steps: int = 0
    config_hash: str = ""
    seeds: dict[str, int] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    platform: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    command: list[str] = field(default_factory=list)
    parent: str | None = None
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    trackers: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""
    error: str = ""

    @property
    def name(self) -> str:
        """Name of the folder that the run was created as."""
        return folder_name(self.series, self.number)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, default=str) + "\n"


def read_manifest(run: Path) -> Manifest:
    """Read a run's `run.json`; keys of later versions are ignored.

    Raises:
        UserError: the folder holds no run, or its manifest cannot be read.
    """
    path = run / "run.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in dataclasses.fields(Manifest)}
        return Manifest(**{key: value for key, value in values.items() if key in known})
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            "there is no run in this folder (it has no run.json)",
            where=str(run),
            mend="`strop runs list` shows the runs there are",
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"the run's manifest cannot be read: {error}", where=str(path)) from error


def status_of(run: Path, manifest: Manifest) -> RunStatus:
    """The status as it is now: a run that says "running" while nobody holds its lock was interrupted."""
    if manifest.status == "running" and not is_locked(run):
        return "interrupted"
    return manifest.status


class RunDirectory:
    """A run's folder, held by this process (its lock is taken) until `close`.

    As a context manager it closes the run: "finished" after the block, "interrupted" on Ctrl-C, "failed" on an error.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: RunLock | None) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @classmethod
    def create(
        cls,
        folder: str | Path,
        name: str,
        *,
        config_yaml: str,
        config_hash: str = "",
        steps: int = 0,
        seeds: Mapping[str, int] | None = None,
        data: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        parent: str | None = None,
        inputs: Mapping[str, dict[str, str]] | None = None,
    ) -> RunDirectory:
        """Start a new run: `folder/name`, or `folder/name-2`, `-3`, … if runs of that name exist.

        The folder appears under its name in one step, with lock, manifest and configuration in it.

        Raises:
            UserError: the folder cannot be made.
        """
        root = Path(folder)
        try:
            root.mkdir(parents=True, exist_ok=True)
            temporary = root / f".{name}.new-{uuid.uuid4().hex[:12]}"
            temporary.mkdir()
        except OSError as error:
            raise cannot_be_made(root, error) from error
        lock: RunLock | None = None
        try:
            lock = RunLock(temporary)
            write_text_atomically(temporary / "config.yaml", config_yaml)
            manifest = Manifest(
                id=uuid.uuid4().hex[:12],
                series=name,
                number=0,
                created=now(),
                steps=steps,
                config_hash=config_hash,
                seeds=dict(seeds or {}),
                data=dict(data or {}),
                model=dict(model or {}),
                versions=versions(),
                platform=platform_facts(),
                git=git_state(Path.cwd()),
                command=list(sys.argv if command is None else command),
                parent=parent,
                inputs=dict(inputs or {}),
            )
            path, number = place(
                temporary, root, name, "run.json", lambda n: dataclasses.replace(manifest, number=n).to_json()
            )
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if lock is not None:
                lock.release()
            if isinstance(error, OSError):
                raise cannot_be_made(root, error) from error
            raise
        lock.path = path / lock.path.name
        return cls(path, dataclasses.replace(manifest, number=number), lock)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Go on with an existing run: takes its lock, marks it as running and notes the time in `resumed`.

        Raises:
            UserError: there is no run, or another process trains it.
        """
        where = Path(path)
        read_manifest(where)
        lock = RunLock(where)
        try:
            # Read again under the lock: the process that just let go of it may have changed the manifest.
            run = cls(where, read_manifest(where), lock)
            run.update(status="running", ended=None, error="", stopped="", resumed=[*run.manifest.resumed, now()])
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def read(cls, path: str | Path) -> RunDirectory:
        """Look at a run without holding it; nothing may be written through what this returns.

        Raises:
            UserError: there is no run.
        """
        return cls(Path(path), read_manifest(Path(path)), None)

    @staticmethod
    def latest(folder: str | Path, name: str) -> Path | None:
        """The newest run of a name (`name`, `name-2`, …), or None."""
        return max(folders_of(Path(folder), name, "run.json"), default=(0, None))[1]

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.jsonl"

    @property
    def load_path(self) -> Path:
        return self.path / "load.jsonl"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def episodes_folder(self) -> Path:
        return self.path / "episodes"

    @property
    def checkpoints_folder(self) -> Path:
        return self.path / "checkpoints"

    @property
    def events_folder(self) -> Path:
        return self.path / "events"

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest and write it.

        Raises:
            RunFailure: it cannot be written.
        """
        manifest = dataclasses.replace(self.manifest, **changes)
        _write(self.path / "run.json", manifest.to_json())
        self.manifest = manifest

    def write_config(
        self, config_yaml: str, *, config_hash: str, steps: int, inputs: Mapping[str, dict[str, str]]
    ) -> None:
        """Replace the configuration of a run that goes on with another one (more steps, for instance)."""
        _write(self.config_path, config_yaml)
        self.update(config_hash=config_hash, steps=steps, inputs=dict(inputs))

    def close(self, status: RunStatus = "finished", *, error: str = "") -> None:
        """Note how the run ended and let go of the lock; a second call does nothing."""
        if self._lock is None:
            return
        try:
            self.update(status=status, ended=now(), error=error)
        finally:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, KeyboardInterrupt):
            self._close_after(error, "interrupted", "")
        else:
            reason = error.what if isinstance(error, StropError) else f"{type(error).__name__}: {error}"
            self._close_after(error, "failed", reason)

    def _close_after(self, error: BaseException, status: RunStatus, reason: str) -> None:
        try:
            self.close(status, error=reason)
        except StropError as second:
            # A full disk is often why the run failed; the first error is the one to report.
            error.add_note(second.block())


def latest_checkpoint(run: Path) -> Path | None:
    """Folder of a run's newest complete checkpoint, by the pointer file `checkpoints/latest`; None without one."""
    try:
        name = (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = run / "checkpoints" / name
    return folder if name and folder.is_dir() else None


def now() -> str:
    """The time as manifests write it: ISO 8601, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _write(path: Path, text: str) -> None:
    try:
        write_text_atomically(path, text)
    except OSError as error:
        raise RunFailure(f"{path.name} cannot be written: {error.strerror}", where=str(path)) from error
