"""The folder of a pipeline: the runs of its stages, and its manifest `pipeline.json`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from strop.errors import RunFailure, StropError, UserError
from strop.tracking.atomic import write_text_atomically
from strop.tracking.run_directory import RunStatus, now, read_manifest, status_of
from strop.tracking.run_lock import RunLock, is_locked
from strop.tracking.series import cannot_be_made, folders_of, place

MANIFEST = "pipeline.json"
StageStatus = RunStatus | Literal["waiting"]


@dataclass(frozen=True)
class StageEntry:
    """One stage. run: name of its run's folder in the pipeline's; None until it begins. config_hash: of the recipe that
    its run was last given. replaced: earlier runs of the stage, which nothing uses any more."""

    name: str
    status: StageStatus = "waiting"
    run: str | None = None
    config_hash: str = ""
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True)
class PipelineManifest:
    """What `pipeline.json` holds. Times are ISO 8601 in UTC.

    id: random and permanent. series, number: as of runs. stages: in the order in which they are trained. command: the
    last one. error: why it failed.
    """

    id: str
    series: str
    number: int
    created: str
    status: RunStatus = "running"
    ended: str | None = None
    resumed: list[str] = field(default_factory=list)
    stages: tuple[StageEntry, ...] = ()
    command: list[str] = field(default_factory=list)
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def stage(self, name: str) -> StageEntry | None:
        """The entry of a stage; None if there is none of that name."""
        return next((entry for entry in self.stages if entry.name == name), None)


def read_pipeline(folder: Path) -> PipelineManifest:
    """Read a pipeline's `pipeline.json`; keys of later versions are ignored.

    Raises:
        UserError: the folder holds no pipeline, or its manifest cannot be read.
    """
    path = folder / MANIFEST
    try:
        values: dict[str, Any] = _known(PipelineManifest, json.loads(path.read_text(encoding="utf-8")))
        stages = [_known(StageEntry, entry) for entry in values["stages"]]
        values["stages"] = tuple(StageEntry(**entry | {"replaced": tuple(entry["replaced"])}) for entry in stages)
        return PipelineManifest(**values)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no pipeline in this folder (it has no {MANIFEST})",
            where=str(folder),
            mend="`strop runs list` shows the runs there are",
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"the pipeline's manifest cannot be read: {error}", where=str(path)) from error


def pipeline_status(folder: Path, manifest: PipelineManifest) -> RunStatus:
    """The status as it is now: one that says "running" while nobody holds its lock was interrupted."""
    if manifest.status == "running" and not is_locked(folder):
        return "interrupted"
    return manifest.status


def stage_status(folder: Path, entry: StageEntry) -> StageStatus:
    """The status of a stage as it is now, which its run knows best."""
    if entry.run is None or not (folder / entry.run / "run.json").is_file():
        return "waiting"
    run = folder / entry.run
    return status_of(run, read_manifest(run))


class PipelineDirectory:
    """A pipeline's folder, held by this process (its lock is taken) until `close`.

    As a context manager it closes the pipeline: "finished" after the block, "interrupted" on Ctrl-C, "failed" on an
    error.
    """

    def __init__(self, path: Path, manifest: PipelineManifest, lock: RunLock) -> None:
        self.path = path
        self.manifest = manifest
        self._lock: RunLock | None = lock

    @classmethod
    def create(cls, folder: str | Path, name: str, stages: Sequence[str]) -> PipelineDirectory:
        """Start a new pipeline: `folder/name`, or `folder/name-2`, `-3`, ... if there is something of that name.

        Raises:
            UserError: the folder cannot be made.
        """
        root = Path(folder)
        temporary = root / f".{name}.new-{uuid.uuid4().hex[:12]}"
        lock: RunLock | None = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            lock = RunLock(temporary)
            manifest = PipelineManifest(
                id=uuid.uuid4().hex[:12],
                series=name,
                number=0,
                created=now(),
                stages=tuple(StageEntry(stage) for stage in stages),
                command=list(sys.argv),
            )
            path, number = place(
                temporary, root, name, MANIFEST, lambda n: dataclasses.replace(manifest, number=n).to_json()
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
    def open(cls, path: str | Path) -> PipelineDirectory:
        """Go on with a pipeline: takes its lock, marks it as running and notes the time in `resumed`.

        Raises:
            UserError: there is none, or another process trains it.
        """
        where = Path(path)
        read_pipeline(where)
        lock = RunLock(where)
        try:
            pipeline = cls(where, read_pipeline(where), lock)
            resumed = [*pipeline.manifest.resumed, now()]
            pipeline.update(status="running", ended=None, error="", resumed=resumed, command=list(sys.argv))
        except BaseException:
            lock.release()
            raise
        return pipeline

    @staticmethod
    def latest(folder: str | Path, name: str) -> Path | None:
        """The newest pipeline of a name, or None."""
        return max(folders_of(Path(folder), name, MANIFEST), default=(0, None))[1]

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest and write it.

        Raises:
            RunFailure: it cannot be written.
        """
        manifest = dataclasses.replace(self.manifest, **changes)
        try:
            write_text_atomically(self.path / MANIFEST, manifest.to_json())
        except OSError as error:
            raise RunFailure(f"{MANIFEST} cannot be written: {error.strerror}", where=str(self.path)) from error
        self.manifest = manifest

    def update_stage(self, name: str, **changes: Any) -> None:
        """Change fields of a stage's entry."""
        stages = (dataclasses.replace(e, **changes) if e.name == name else e for e in self.manifest.stages)
        self.update(stages=tuple(stages))

    def close(self, status: RunStatus = "finished", *, error: str = "") -> None:
        """Note how the pipeline ended and let go of the lock; a second call does nothing."""
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
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = error.what if isinstance(error, StropError) else f"{type(error).__name__}: {error}"
        try:
            self.close("interrupted" if interrupted else "failed", error="" if interrupted else reason)
        except StropError as second:
            # A full disk is often why it failed; the first error is the one to report.
            error.add_note(second.block())


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}
