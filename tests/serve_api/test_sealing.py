"""Encryption at rest: what is sealed cannot be read, changed, cut or moved, and comes back as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from serve_at_hand import put_run
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import UserError
from strop.serve.sealing import CHUNK, SUFFIX, NotUnsealed, make_key, seal_run, unseal_run
from strop.tracking.run_lock import RunLock

pytest.importorskip("nacl")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = put_run(tmp_path)
    model = path / "checkpoints" / "step-000003" / "model"
    for name, size in (("empty", 0), ("one", 1), ("chunk", CHUNK), ("more", CHUNK + 1), ("big", 3 * CHUNK)):
        (model / name).write_bytes(os.urandom(size))
    return path


def files(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_what_is_sealed_comes_back_as_it_was(run: Path, tmp_path: Path) -> None:
    before = files(run)
    public = make_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert seal_run(run, public) == 8
    sealed = files(run)
    below = {name for name in before if name.startswith(("checkpoints/step", "episodes"))}
    assert set(sealed) == {f"{name}{SUFFIX}" if name in below else name for name in before}
    weights = before["checkpoints/step-000003/model/model.safetensors"]
    assert not any(weights[:64] in data for data in sealed.values())
    assert seal_run(run, public) == 0, "what is sealed is not sealed again"
    assert unseal_run(run, tmp_path / "key") == 8
    assert files(run) == before


@pytest.mark.parametrize("what", ["a bit", "the end", "a chunk", "two chunks", "another file", "another key", "more"])
def test_what_was_done_to_it_is_found(run: Path, tmp_path: Path, what: str) -> None:
    seal_run(run, make_key(tmp_path / "key"))
    model = run / "checkpoints" / "step-000003" / "model"
    file = model / f"big{SUFFIX}"
    data, whole = file.read_bytes(), CHUNK + 17
    head = len(data) - 3 * whole
    key = tmp_path / "key"
    if what == "a bit":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif what == "the end":
        file.write_bytes(data[:-whole])
    elif what == "a chunk":
        file.write_bytes(data[:head] + data[head + whole :])
    elif what == "two chunks":
        second = data[head + whole : head + 2 * whole]
        file.write_bytes(data[:head] + second + data[head : head + whole] + data[head + 2 * whole :])
    elif what == "more":
        file.write_bytes(data + data[-whole:])
    elif what == "another file":
        (model / f"chunk{SUFFIX}").write_bytes(data)
    else:
        make_key(tmp_path / "other")
        key = tmp_path / "other"
    with pytest.raises(NotUnsealed):
        unseal_run(run, key)
    assert not list(run.rglob(".*.tmp"))


def test_a_run_that_is_trained_is_not_sealed(run: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "key")
    lock = RunLock(run)
    with pytest.raises(UserError, match="is being trained"):
        seal_run(run, public)
    lock.release()
    with pytest.raises(UserError, match="not a public key"):
        seal_run(run, "abc")
    with pytest.raises(UserError, match="not a private key"):
        unseal_run(run, tmp_path / "no")
    with pytest.raises(UserError, match="cannot be written"):
        make_key(tmp_path / "key")


def test_the_commands(run: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    public = CliRunner().invoke(app, ["seal", "key", str(key)]).stdout.strip()
    assert CliRunner().invoke(app, ["seal", "run", str(run), "--key", public]).stdout == "8 files sealed\n"
    assert CliRunner().invoke(app, ["seal", "open", str(run), "--key", str(key)]).stdout == "8 files opened\n"
    assert CliRunner().invoke(app, ["seal", "run", str(tmp_path / "no"), "--key", public]).exit_code == 2
