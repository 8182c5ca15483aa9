"""The registry: versions, stages, lineage, cards, and proof of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import AtHand, put_run
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import UserError
from strop.serve.registry.signing import NotAsSigned, SigningKey, check
from strop.serve.registry.store import Registry, Stage, checkpoint_named
from strop.tracking.metrics import MetricsWriter
from strop.tracking.run_directory import RunDirectory, read_manifest

EVIL = "`|x\n# Approved\n<script>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a run that went on from the checkpoint of another, which is there too."""
    first = put_run(tmp_path, "first")
    second = put_run(tmp_path, "second", steps=4)
    made = {"path": "first", "folder": str(first), "fingerprint": "f00", "run": read_manifest(first).id}
    with RunDirectory.open(first) as directory:
        directory.update(data={"train": "sums.jsonl", "fingerprint": "da7a"})
    with RunDirectory.open(second) as directory:
        directory.update(inputs={"model.path": made | {"checkpoint": "step-000003"}}, model={"name": EVIL})
    writer = MetricsWriter(second / "metrics.jsonl")
    writer.log(2, {"eval/accuracy": 0.4}, kind="eval")
    writer.log(4, {"eval/accuracy": 0.75, "eval/reward": float("nan")}, kind="eval")
    writer.close()
    return tmp_path


@pytest.fixture
def registry(root: Path) -> Registry:
    (root / ".service").mkdir(mode=0o700)
    return Registry(root, root / ".service")


def test_a_version_knows_what_it_was_made_of_and_how_it_scored(registry: Registry, root: Path) -> None:
    found = registry.add(root / "second", "sums", checkpoint="step-000004", by="alice")
    assert (found.name, found.version, found.stage, found.by) == ("sums", 1, Stage.candidate, "alice")
    assert (found.scores, found.before) == ({"accuracy": 0.75}, {"accuracy": 0.1})
    assert found.lineage["run"] == read_manifest(root / "second").id
    assert found.lineage["config_hash"] == "c0ffee"
    [before] = found.lineage["inputs"]
    assert (before["key"], before["fingerprint"]) == ("model.path", "f00")
    assert before["made_of"]["name"] == "first"
    assert before["made_of"]["checkpoint"] == "step-000003"
    assert before["made_of"]["data"]["fingerprint"] == "da7a"
    card = registry.card("sums", 1)
    for said in ("| `accuracy` | 75.0 % | 10.0 % |", "`first`", "`da7a`", "`c0ffee`", found.public_key):
        assert said in card
    # What a run says of itself is not what the card says.
    assert "\n# Approved" not in card
    assert card.count("\n# ") == 1
    again = registry.add(root / "first", "sums", checkpoint="step-000003", by="bob")
    assert (again.version, again.scores) == (2, {})
    assert "Nothing was measured" in registry.card("sums", 2)
    # The files are the registry's own: the run may go.
    (root / "second" / "checkpoints" / "step-000004" / "model" / "model.safetensors").unlink()
    assert registry.verify("sums", 1)


def test_stages_go_one_way(registry: Registry, root: Path) -> None:
    for _ in range(3):
        registry.add(root / "second", "sums", checkpoint="step-000004", by="alice")
    with pytest.raises(UserError, match="no version of sums is approved"):
        registry.get("sums")
    registry.move("sums", 1, Stage.approved, by="carol")
    assert registry.move("sums", 2, Stage.approved, by="carol").changes[0]["by"] == "carol"
    assert registry.get("sums").version == 2
    registry.move("sums", 2, Stage.retired, by="carol")
    assert registry.get("sums").version == 1
    for version, stage in ((1, Stage.approved), (1, Stage.candidate), (2, Stage.approved), (2, Stage.candidate)):
        with pytest.raises(UserError, match="cannot become"):
            registry.move("sums", version, stage, by="carol")
    registry.move("sums", 3, Stage.retired, by="carol")
    with pytest.raises(UserError):
        registry.move("sums", 9, Stage.retired, by="carol")


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("changed", "not the file that was signed"),
        ("longer", "not the file that was signed"),
        ("removed", "is missing"),
        ("added", "was not signed"),
        ("a link", "not a plain file"),
        ("a score", "not what was signed"),
        ("the lineage", "not what was signed"),
        ("the manifest", "not signed by this key"),
        ("the signature", "not signed by this key"),
        ("another's signature", "not signed by this key"),
    ],
)
def test_what_was_changed_is_found_and_not_approved(registry: Registry, root: Path, what: str, problem: str) -> None:
    registry.add(root / "second", "sums", checkpoint="step-000004", by="alice")
    registry.add(root / "first", "sums", checkpoint="step-000003", by="alice")
    file = registry.files("sums", 1) / "model.safetensors"
    changes = {
        "a score": "scores = '{\"accuracy\": 1.0}'",
        "the lineage": "lineage = '{}'",
        "the manifest": "manifest = CAST(replace(manifest, '0', '1') AS BLOB)",
        "the signature": "signature = '00' || substr(signature, 3)",
        "another's signature": "signature = (SELECT signature FROM versions WHERE version = 2)",
    }
    if what == "changed":
        file.write_bytes(bytes([1]) + file.read_bytes()[1:])
    elif what == "longer":
        file.write_bytes(file.read_bytes() + b"\0")
    elif what == "removed":
        file.unlink()
    elif what == "added":
        (file.parent / "modeling_evil.py").write_text("print()")
    elif what == "a link":
        (file.parent / "link").symlink_to(root)
    else:
        with registry._database.writing() as connection:
            connection.execute(f"UPDATE versions SET {changes[what]} WHERE version = 1")
    with pytest.raises(NotAsSigned, match=problem):
        registry.move("sums", 1, Stage.approved, by="carol")
    assert registry.get("sums", 1).stage is Stage.candidate
    with pytest.raises(NotAsSigned, match=problem):
        registry.export("sums", 1, root / "out")
    assert registry.move("sums", 2, Stage.approved, by="carol")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("stage = 'approved'", "it is approved, and was signed as retired"),
        (
            "stage = 'approved', changes = replace(changes, 'retired', 'approved')",
            "change to approved is not as signed",
        ),
        ("changes = replace(changes, 'carol', 'alice')", "change to approved is not as signed"),
        ("changes = json_remove(changes, '$[0]')", "change to retired is not as signed"),
        ("changes = json_remove(changes, '$[0].signature')", "change to approved is not as signed"),
        ("stage = 'candidate', changes = '[]'", ""),
        (
            "stage = 'approved', changes = (SELECT changes FROM versions WHERE version = 2)",
            "change to approved is not as signed",
        ),
    ],
)
def test_a_stage_that_nobody_signed_is_not_believed(registry: Registry, root: Path, change: str, problem: str) -> None:
    for _ in range(2):
        registry.add(root / "second", "sums", checkpoint="step-000004", by="alice")
        registry.move("sums", len(registry.list("sums")), Stage.approved, by="carol")
    registry.move("sums", 1, Stage.retired, by="carol")
    registry.verify("sums", 1)
    with registry._database.writing() as connection:
        connection.execute(f"UPDATE versions SET {change} WHERE version = 1")
    if not problem:
        # Nothing says that there was more; the audit log does.
        assert registry.get("sums", 1).stage is Stage.candidate
        return
    for ask in (registry.get, registry.verify, registry.card):
        with pytest.raises(NotAsSigned, match=problem):
            ask("sums", 1)
    with pytest.raises(NotAsSigned, match=problem):
        registry.export("sums", 1, root / "out")
    assert registry.get("sums").version == 2


def test_an_export_can_be_checked_without_the_registry(registry: Registry, root: Path, tmp_path: Path) -> None:
    found = registry.add(root / "second", "sums", checkpoint="step-000004", by="alice")
    out = registry.export("sums", 1, root / "out")
    manifest, signature = (out / "manifest.json").read_bytes(), (out / "manifest.sig").read_text().strip()
    check(out / "model", manifest, signature, found.public_key)
    with pytest.raises(NotAsSigned):
        check(out / "model", manifest, signature, SigningKey.of(tmp_path).public)
    assert (registry.folder / "signing.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="not empty"):
        registry.export("sums", 1, out)


@pytest.mark.parametrize("run", ["../elsewhere", "nothing", "linked", ".service"])
def test_only_runs_of_the_folder_are_taken(registry: Registry, root: Path, run: str) -> None:
    (root / "linked").symlink_to(root / "first")
    with pytest.raises(UserError):
        registry.add(root / run, "sums", checkpoint="step-000003", by="alice")
    for name in ("../x", "", "a b", "x\n"):
        with pytest.raises(UserError, match="not a name"):
            registry.add(root / "first", name, checkpoint="step-000003", by="alice")
    (root / "first" / "checkpoints" / "latest").write_text("../../second/checkpoints/step-000004")
    with pytest.raises(UserError):
        registry.add(root / "first", "sums", checkpoint=checkpoint_named(root / "first", "latest"), by="alice")
    assert registry.list() == []


def test_the_commands(root: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["registry", *words, "--root", str(root)])

    assert run("add", "second", "--name", "sums").stdout == "sums 1\n"
    assert run("move", "sums", "1", "approved").stdout == "sums 1 is approved\n"
    assert "sums 1  approved   second step-000004  accuracy 0.75" in run("list").stdout
    assert run("verify", "sums", "1").exit_code == 0
    assert run("verify", "sums", "1", "--key", "00" * 32).exit_code == 1
    assert "# sums, version 1" in run("card", "sums", "1").stdout
    assert run("export", "sums", "--out", str(root / "out")).exit_code == 0
    assert json.loads((root / "out" / "manifest.json").read_text())["about"]["name"] == "sums"
    assert run("add", "second", "--name", "sums", "--checkpoint", "best").exit_code == 2
    audit = [json.loads(line)["action"] for line in (root / ".service" / "audit.jsonl").read_text().splitlines()]
    assert audit == ["registry.add", "registry.move"]


def test_over_http(there: AtHand) -> None:
    put_run(there.root)
    made = there.operator("POST", "/api/v1/models", json={"run": "done", "name": "sums", "checkpoint": "3"})
    assert made.status_code == 201
    assert made.json()["by"] == "the-operator"
    assert there.viewer("GET", "/api/v1/models/sums/1/card").text.startswith("---\nmodel_name: sums\n")
    manifest = there.viewer("GET", "/api/v1/models/sums/1/manifest").content
    check(there.service.registry().files("sums", 1), manifest, made.json()["signature"], made.json()["public_key"])
    (there.service.registry().files("sums", 1) / "config.json").write_text("{}")
    refused = there.admin("POST", "/api/v1/models/sums/1/stage", json={"stage": "approved"})
    assert (refused.status_code, there.audit()[-1]["outcome"]) == (409, "refused")
    assert there.admin("POST", "/api/v1/models/sums/1/stage", json={"stage": "retired"}).json()["stage"] == "retired"
    assert there.audit()[-1]["target"] == "sums 1"
    for path in ("/api/v1/models/sums/2", "/api/v1/models/..%2f/1/card", "/api/v1/models/none/1/manifest"):
        assert there.viewer("GET", path).status_code == 404
