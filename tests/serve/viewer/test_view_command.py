"""`strop view`: what it listens on, what it says, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner
from viewer_runs import make_run

import strop
from strop.cli import app
from strop.errors import UserError
from strop.serve.viewer import server


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["view", *map(str, arguments)])


def test_it_serves_until_it_is_stopped(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "one")
    command = [sys.executable, "-m", "strop", "view", "runs", "--port", "0", "--no-open"]
    environment = os.environ | {"PYTHONPATH": str(Path(strop.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", told)
        assert address, told
        with urllib.request.urlopen(f"{address[0]}api/runs", timeout=20) as answer:
            assert b'"run":"one"' in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) in (0, 130, -signal.SIGINT)


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_only_this_machine_can_reach_a_loopback(host: str, alone: bool) -> None:
    assert server.is_loopback(host) is alone


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run(tmp_path / "absent", "--no-open")
    assert answer.exit_code == 2
    assert "there is no such folder" in answer.output
    assert str(tmp_path / "absent") in answer.output
    monkeypatch.chdir(tmp_path)
    assert server._checked(Path("runs")) == Path("runs")  # It comes with the first run.


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = run(tmp_path, "--port", taken.getsockname()[1], "--no-open")
    assert answer.exit_code == 2
    assert "mend:  choose another port" in answer.output


def test_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    answer = run(tmp_path, "--no-open")
    assert answer.exit_code == 2
    assert "pip install 'strop[serve]'" in answer.output
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "strop.serve.viewer.app", raising=False)
    answer = run(tmp_path, "--no-open")
    assert answer.exit_code == 2
    assert "pip install 'strop[serve]'" in answer.output


def test_a_browser_is_opened_unless_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    opened: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    monkeypatch.setattr(server, "has_screen", lambda: True)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    for wanted in (False, True):
        server.serve([tmp_path], host="127.0.0.1", port=0, open_browser=wanted, say=told.append)
    for thread in server.threading.enumerate():
        if thread.name == "browser":
            thread.join()
    assert len(opened) == 1
    assert opened[0] in told[2]
    assert not any("anyone" in line for line in told)
    server.serve([tmp_path], host="0.0.0.0", port=0, open_browser=False, say=told.append)
    assert any("anyone who can reach" in line for line in told)


def test_without_a_screen_no_browser_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not server.has_screen()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert server.has_screen()


def test_the_pages_are_in_the_wheel(tmp_path: Path) -> None:
    root = Path(strop.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("this is no checkout of strop")
    [wheel] = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
    static = root / "src" / "strop" / "serve" / "viewer" / "static"
    assert {f"strop/serve/viewer/static/{path.name}" for path in static.iterdir()} <= there


def test_an_address_that_no_machine_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be listened on"):
        server.serve([tmp_path], host="203.0.113.7", port=0, open_browser=False)
