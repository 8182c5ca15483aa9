"""The registry: versions of models in a folder, each with its files, a signed list of them, and what is known of it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.serve.api.confined import NotServed, folder_below, parts_of
from strop.serve.api.database import Database
from strop.serve.registry.card import card
from strop.serve.registry.lineage import lineage_of, scores_at
from strop.serve.registry.signing import NotAsSigned, SigningKey, canonical, check, check_changes, manifest_of
from strop.tracking.atomic import sync_file, sync_folder
from strop.tracking.run_directory import now, read_manifest

FOLDER = "registry"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    name TEXT NOT NULL, version INTEGER NOT NULL, stage TEXT NOT NULL, registered TEXT NOT NULL, by TEXT NOT NULL,
    run TEXT NOT NULL, checkpoint TEXT NOT NULL, scores TEXT NOT NULL, before TEXT NOT NULL, lineage TEXT NOT NULL,
    manifest BLOB NOT NULL, signature TEXT NOT NULL, public_key TEXT NOT NULL, changes TEXT NOT NULL,
    PRIMARY KEY (name, version)
)
"""


class Stage(StrEnum):
    """How far a version has come. Only a candidate is approved; what is retired stays so."""

    candidate = "candidate"
    approved = "approved"
    retired = "retired"


MAY_BECOME = {
    Stage.candidate: (Stage.approved, Stage.retired),
    Stage.approved: (Stage.retired,),
    Stage.retired: (),
}


@dataclass(frozen=True)
class Version:
    """One version of a model. scores: measured with these weights. before: those before training. changes: who moved
    it to which stage, and when, each signed behind the one before and the first behind the manifest."""

    name: str
    version: int
    stage: Stage
    registered: str
    by: str
    run: str
    checkpoint: str
    scores: dict[str, float]
    before: dict[str, float]
    lineage: dict[str, Any]
    manifest_sha256: str
    signature: str
    public_key: str
    changes: list[dict[str, str]]

    def plain(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self) | {"stage": self.stage.value}


class Registry:
    """The models of a folder of runs.

    Args:
        root: the folder of the runs. state: the folder of the service's state, in which the registry is kept.
    """

    def __init__(self, root: Path, state: Path) -> None:
        self._root, self.folder = root, state / FOLDER
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._database = Database(self.folder / "registry.db", _SCHEMA)

    def add(self, run: Path, name: str, *, checkpoint: str, by: str) -> Version:
        """Keep a checkpoint's model as the next version of a name, a candidate.

        Args:
            run: the run's folder. checkpoint: the folder's name in its `checkpoints/`.

        Raises:
            UserError: the name is not a plain one, or there is no such model.
        """
        if not NAME.fullmatch(name):
            mend = "use letters, digits, _ and -, at most 64"
            raise UserError(f"{name!r} is not a name for a model", where="name", mend=mend)
        model = run / "checkpoints" / checkpoint / "model"
        self._check_model(model)
        step = int(checkpoint.rpartition("-")[2])
        made = lineage_of(run, checkpoint, root=self._root)
        scores, before = scores_at(run, step), _numbers(read_manifest(run).scores.get("before"))
        key = SigningKey.of(self.folder)
        with self._database.writing() as connection:
            found = connection.execute("SELECT max(version) FROM versions WHERE name = ?", (name,)).fetchone()
            version = (found[0] or 0) + 1
            about = {"name": name, "version": version, "lineage": made, "scores": scores}
            manifest = self._take(model, name, version, about)
            values = (name, version, Stage.candidate.value, now(), by, run.name, checkpoint)
            texts = (json.dumps(scores), json.dumps(before), json.dumps(made))
            signed = (manifest, key.sign(manifest), key.public, "[]")
            connection.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values + texts + signed
            )
        return self.get(name, version)

    def list(self, name: str | None = None) -> list[Version]:
        """All versions, or those of a name; the newest of a name first."""
        rows = self._database.rows(
            "SELECT * FROM versions WHERE ? IS NULL OR name = ? ORDER BY name, version DESC", name, name
        )
        return [_version(dict(row)) for row in rows]

    def get(self, name: str, version: int | None = None) -> Version:
        """One version; the newest approved one when None.

        Raises:
            UserError: there is none. NotAsSigned: it is in a stage that nobody signed.
        """
        for found in self.list(name):
            if found.version == version or (version is None and found.stage is Stage.approved):
                self._check_stage(found, SigningKey.of(self.folder).public)
                return found
        what = f"{name} has no version {version}" if version is not None else f"no version of {name} is approved"
        raise UserError(what, where=name, mend="`strop registry list` shows what there is")

    def move(self, name: str, version: int, stage: Stage, *, by: str) -> Version:
        """Move a version to another stage; before it is approved its files are checked.

        Raises:
            UserError: there is none, or it cannot go there. NotAsSigned: its files are not those that were signed.
        """
        if stage is Stage.approved:
            self.verify(name, version)
        key = SigningKey.of(self.folder)
        with self._database.writing() as connection:
            now_at = self.get(name, version)
            if stage not in MAY_BECOME[now_at.stage]:
                may = " or ".join(MAY_BECOME[now_at.stage]) or "nothing else"
                what = f"{name} {version} is {now_at.stage}, and cannot become {stage}"
                raise UserError(what, where=f"{name} {version}", mend=f"it can become {may}")
            behind = now_at.changes[-1]["signature"] if now_at.changes else now_at.signature
            change = {"stage": stage.value, "by": by, "time": now()}
            changes = [*now_at.changes, key.sign_change(change, behind)]
            connection.execute(
                "UPDATE versions SET stage = ?, changes = ? WHERE name = ? AND version = ?",
                (stage.value, json.dumps(changes), name, version),
            )
        return self.get(name, version)

    def verify(self, name: str, version: int, *, public: str | None = None) -> Version:
        """Check that the files of a version are those that were registered, and what is said of it and its stage too.

        Args:
            public: the key that must have signed; the registry's own when None.

        Raises:
            NotAsSigned: they are not.
        """
        found = self.get(name, version)
        manifest = self.manifest(name, version)
        public = public or SigningKey.of(self.folder).public
        check(self.files(name, version), manifest, found.signature, public)
        self._check_stage(found, public)
        about = {"name": name, "version": version, "lineage": found.lineage, "scores": found.scores}
        if canonical(json.loads(manifest)["about"]) != canonical(about):
            raise NotAsSigned("what the registry says of it is not what was signed", where=f"{name} {version}")
        return found

    def files(self, name: str, version: int) -> Path:
        """The folder with a version's files."""
        return self.folder / "models" / name / str(version)

    def manifest(self, name: str, version: int) -> bytes:
        """The list of a version's files, as it was signed."""
        row = self._database.row("SELECT manifest FROM versions WHERE name = ? AND version = ?", name, version)
        if row is None:
            raise UserError(f"{name} has no version {version}", where=name)
        return bytes(row["manifest"])

    def card(self, name: str, version: int) -> str:
        """The model card of a version."""
        return card(self.get(name, version).plain())

    def export(self, name: str, version: int, out: Path) -> Path:
        """Write a version's files to a folder, checked, with its card, its manifest and the signature.

        Raises:
            UserError: the folder is there and not empty. NotAsSigned: its files are not those that were registered.
        """
        if out.exists() and any(out.iterdir()):
            raise UserError("the folder is not empty", where=str(out), mend="name another --out")
        found = self.verify(name, version)
        shutil.copytree(self.files(name, version), out / "model", dirs_exist_ok=True)
        (out / "MODEL_CARD.md").write_text(self.card(name, version), encoding="utf-8")
        (out / "manifest.json").write_bytes(self.manifest(name, version))
        (out / "manifest.sig").write_text(f"{found.signature}\n", encoding="ascii")
        (out / "signed-by").write_text(f"{found.public_key}\n", encoding="ascii")
        return out

    def close(self) -> None:
        """Close its file."""
        self._database.close()

    def _take(self, model: Path, name: str, version: int, about: dict[str, Any]) -> bytes:
        """Copy a model's files, and list them as they were copied."""
        target = self.files(name, version)
        # Left by a process that was killed before it had registered the version.
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copytree(model, target)
        for path in target.rglob("*"):
            sync_file(path) if path.is_file() else sync_folder(path)
        sync_folder(target.parent)
        return manifest_of(target, about)

    def _check_stage(self, found: Version, public: str) -> None:
        """Raise NotAsSigned unless a version's stage is where signed changes have led."""
        where = f"{found.name} {found.version}"
        check_changes(found.changes, found.signature, public, where=where)
        led = found.changes[-1]["stage"] if found.changes else Stage.candidate.value
        if found.stage.value != led:
            mend = "look into the audit log for who moved it"
            raise NotAsSigned(f"it is {found.stage}, and was signed as {led}", where=where, mend=mend)

    def _check_model(self, model: Path) -> None:
        """Raise UserError unless a model is a folder of plain files below the root."""
        try:
            parts = parts_of(model.relative_to(self._root).as_posix())
            with folder_below(self._root, parts):
                pass
            if not re.fullmatch(r"step-\d{6,}", model.parent.name) or not (model / "config.json").is_file():
                raise NotServed(str(model))
            if any(path.is_symlink() for path in model.rglob("*")):
                raise NotServed(str(model))
        except (NotServed, ValueError):
            mend = "name a run of this folder, and a checkpoint that it has"
            raise UserError("there is no such model", where=model.parent.name, mend=mend) from None


def checkpoint_named(run: Path, which: str) -> str:
    """The folder's name of a run's checkpoint: `latest`, `best`, or the number of a step.

    Raises:
        UserError: the run has none of this name.
    """
    if which.isascii() and which.isdigit() and len(which) < 12:
        return f"step-{int(which):06d}"
    try:
        if which in ("latest", "best"):
            return (run / "checkpoints" / which).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        pass
    mend = "give latest, best, or the number of a step"
    raise UserError(f"the run has no checkpoint {which!r}", where=run.name, mend=mend)


def _version(values: dict[str, Any]) -> Version:
    manifest = bytes(values.pop("manifest"))
    for key in ("scores", "before", "lineage", "changes"):
        values[key] = json.loads(values[key])
    values["stage"] = Stage(values["stage"])
    return Version(**values, manifest_sha256=hashlib.sha256(manifest).hexdigest())


def _numbers(values: Any) -> dict[str, float]:
    return {str(k): float(v) for k, v in (values or {}).items() if isinstance(v, int | float)}
