"""The audit log: whatever is done to a line is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli import app
from strop.serve.api.audit import START, AuditError, AuditLog, Head
from strop.serve.api.settings import made_state


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    made = AuditLog(made_state(tmp_path))
    for number in range(6):
        made.append("do", actor="alice", target=f"thing {number}", outcome="done", detail={"n": number})
    return made


def lines(log: AuditLog) -> list[str]:
    return log.path.read_text().splitlines(keepends=True)


def forged(line: str) -> str:
    """A line changed by somebody who knows how lines are made, but not the key."""
    import hashlib

    entry = json.loads(line) | {"actor": "mallory"}
    plain = json.dumps({k: v for k, v in entry.items() if k != "hash"}, sort_keys=True, separators=(",", ":"))
    return json.dumps(entry | {"hash": hashlib.sha256(plain.encode()).hexdigest()}) + "\n"


TAMPERED: dict[str, Callable[[list[str]], list[str]]] = {
    "a word changed": lambda all: [*all[:2], all[2].replace("alice", "mallo"), *all[3:]],
    "a space added": lambda all: [*all[:2], all[2].replace(": ", ":  ", 1), *all[3:]],
    "a line changed and hashed anew": lambda all: [*all[:2], forged(all[2]), *all[3:]],
    "the last line changed": lambda all: [*all[:5], forged(all[5])],
    "the first line removed": lambda all: all[1:],
    "a line removed": lambda all: [*all[:3], *all[4:]],
    "the last line removed": lambda all: all[:-1],
    "the last lines removed": lambda all: all[:-3],
    "all lines removed": lambda all: [],
    "two lines swapped": lambda all: [*all[:2], all[3], all[2], *all[4:]],
    "the last two swapped": lambda all: [*all[:4], all[5], all[4]],
    "a line twice": lambda all: [*all[:3], all[2], *all[3:]],
    "the last line twice": lambda all: [*all, all[-1]],
    "an old line at the end": lambda all: [*all, all[0]],
    "an empty line": lambda all: [*all[:3], "\n", *all[3:]],
    "no line end": lambda all: [*all[:5], all[5].rstrip()],
    "no JSON": lambda all: [*all[:3], "x\n", *all[4:]],
    "a key twice": lambda all: [*all[:3], all[3].replace('{"number"', '{"actor": "m", "number"'), *all[4:]],
}


def test_a_log_that_nobody_touched_is_whole(log: AuditLog) -> None:
    assert log.verify() == Head(6, json.loads(lines(log)[-1])["hash"])
    assert json.loads(lines(log)[0])["previous"] == START
    log.close()
    again = AuditLog(log.path.parent)
    again.append("do", actor="bob", outcome="done")
    assert again.verify().number == 7
    assert [line["actor"] for line in again.read(after=5)] == ["alice", "bob"]


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_done_to_it_is_found(log: AuditLog, what: str) -> None:
    changed = TAMPERED[what](lines(log))
    assert changed != lines(log)
    log.path.write_text("".join(changed))
    with pytest.raises(AuditError):
        log.verify()
    # Neither a start of the service nor more lines hide it.
    log.close()
    again = AuditLog(log.path.parent)
    with pytest.raises(AuditError):
        again.verify()
    again.append("do", actor="bob", outcome="done")
    with pytest.raises(AuditError):
        again.verify()


def test_the_command_tells(log: AuditLog, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["serve", "audit", "verify", "--root", str(tmp_path)])
    assert found.exit_code == 0
    assert found.stdout == f"6 lines, the last one {log.verify().hash}\n"
    log.path.write_text("".join(lines(log)[:-1]))
    found = CliRunner().invoke(app, ["serve", "audit", "verify", "--root", str(tmp_path)])
    assert found.exit_code == 1
    assert "the log ends at line 5, and 6 were written" in found.stderr
    assert CliRunner().invoke(app, ["serve", "audit", "verify", "--root", str(tmp_path / "no")]).exit_code == 2


def test_a_kill_between_line_and_head_is_no_tampering(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(head: Head) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "_set_head", killed)
    with pytest.raises(KeyboardInterrupt):
        log.append("do", actor="alice", outcome="done")
    again = AuditLog(log.path.parent)
    assert again.verify().number == 7
    # A line that was never whole was never acted upon.
    with log.path.open("a") as file:
        file.write('{"number": 8, "ti')
    third = AuditLog(log.path.parent)
    assert third.verify().number == 7
    third.append("do", actor="bob", outcome="done")
    assert third.verify().number == 8


def _append_many(state: Path) -> None:
    log = AuditLog(state)
    for number in range(20):
        log.append("do", actor="one of many", outcome="done", number_of=number)


def test_processes_append_to_one_chain(tmp_path: Path) -> None:
    state = made_state(tmp_path)
    context = get_context("spawn")
    processes = [context.Process(target=_append_many, args=(state,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert AuditLog(state).verify().number == 60
