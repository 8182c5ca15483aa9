"""`kill -9` of the service: the queue and what runs are found again, and nothing is started twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import ROOT, SMALL

from strop.serve.api.access import Role, Tokens
from strop.serve.api.audit import AuditLog
from strop.serve.api.processes import Process
from strop.serve.api.runner import NOT_BEGUN
from strop.serve.api.settings import made_state

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are told apart by /proc, as the service does"
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def until(condition: Callable[[], Any], *, seconds: float = 90) -> Any:
    """What a condition gives as soon as it is true."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.1)
    return found


class Served:
    """A service in a process of its own, which can be killed and started again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        tokens = Tokens(made_state(root))
        self.token = tokens.add("alice", Role.operator)
        tokens.close()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "strop", "serve", "--root", str(self.root), "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, cwd=self.root.parent)
        until(self.answers)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None
        try:
            return self.ask("GET", "/health") == {"status": "ok"}
        except (urllib.error.URLError, ConnectionError):
            # A connection that was taken and never answered is reset.
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def job(self, job: str) -> Any:
        return self.ask("GET", f"/api/v1/jobs/{job}")

    def processes(self, job: str, attempt: int = 1) -> dict[str, Any]:
        path = self.root / ".service" / "jobs" / job / f"process-{attempt}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        for file in self.root.glob(".service/jobs/*/process-*.json"):
            process = Process.read(json.loads(file.read_text()).get("runner"))
            if process is not None:
                process.end_group()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    there = Served(tmp_path / "runs")
    yield there
    there.close()


@pytest.mark.slow
def test_queue_and_runs_survive_and_nothing_is_started_twice(served: Served, quickstart: str) -> None:
    served.start()
    long = [*SMALL, "run.steps=30", "evaluation.every=0", "checkpoint.every=5"]
    ids = [
        served.ask("POST", "/api/v1/jobs", {"recipe": quickstart, "overrides": long, "name": name})["id"]
        for name in ("one", "two")
    ]
    # Killed as soon as it has begun, when nobody may know yet that the first job was started.
    served.kill()
    served.start()
    run = Process.read(until(lambda: served.processes(ids[0]).get("run")))
    assert run is not None
    until(lambda: (served.root / "one" / "metrics.jsonl").is_file())
    served.kill()
    assert run.alive, "the run outlives the service"
    served.start()
    assert served.job(ids[0])["state"] in ("running", "finished")
    # And killed again between the two.
    until(lambda: served.job(ids[0])["state"] == "finished")
    served.kill()
    served.start()
    until(lambda: served.job(ids[1])["state"] == "finished")
    for job, name in zip(ids, ("one", "two"), strict=True):
        assert served.job(job)["attempt"] == 1
        manifest = json.loads((served.root / name / "run.json").read_text())
        assert (manifest["status"], manifest["resumed"]) == ("finished", [])
        lines = [json.loads(line) for line in (served.root / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 31))
    assert sorted(path.name for path in served.root.iterdir()) == [".service", "one", "two"]
    log = AuditLog(served.root / ".service")
    log.verify()
    assert [line["target"] for line in log.read() if line["action"] == "job.end"] == ids


@pytest.mark.slow
def test_pause_saves_resume_goes_on_and_a_lost_run_is_started_again(served: Served, quickstart: str) -> None:
    served.start()
    long = [*SMALL, "run.steps=300", "evaluation.every=0", "checkpoint.every=1000"]
    job = served.ask("POST", "/api/v1/jobs", {"recipe": quickstart, "overrides": long, "name": "long"})["id"]

    def steps() -> list[int]:
        try:
            text = (served.root / "long" / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line["step"] for line in lines if line["kind"] == "train"]

    until(lambda: len(steps()) >= 3)
    # Asked to pause by a service that is then gone: the next one sees to it.
    served.ask("POST", f"/api/v1/jobs/{job}/pause")
    served.kill()
    served.start()
    until(lambda: served.job(job)["state"] == "paused")
    paused_at = steps()[-1]
    assert (served.root / "long" / "checkpoints" / "latest").read_text().strip() == f"step-{paused_at:06d}"
    served.ask("POST", f"/api/v1/jobs/{job}/resume")
    until(lambda: len(steps()) > paused_at + 2)
    assert steps() == list(range(1, len(steps()) + 1)), "no step is done twice"
    assert served.job(job)["attempt"] == 2
    # What is killed from outside, runner and run, is started again from its checkpoint.
    runner = Process.read(served.processes(job, 2)["runner"])
    assert runner is not None
    runner.end_group()
    until(lambda: served.job(job)["attempt"] == 3)
    until(lambda: served.processes(job, 3).get("run"))
    assert served.ask("POST", f"/api/v1/jobs/{job}/stop")["wish"] in ("stop", "")
    until(lambda: served.job(job)["state"] == "stopped")
    run = Process.read(served.processes(job, 3)["run"])
    assert run is not None
    assert not run.alive


def test_runners_of_one_attempt_start_one_run(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "strop.serve.api.runner", str(tmp_path), "1", "--"]
    command += ["sh", "-c", f"echo begun >> {tmp_path}/count; sleep 1; exit 7"]
    runners = [subprocess.Popen(command, env=ENVIRONMENT) for _ in range(4)]
    codes = sorted(runner.wait() for runner in runners)
    assert codes == [NOT_BEGUN] * 3 + [7]
    assert subprocess.run(command, env=ENVIRONMENT, check=False).returncode == NOT_BEGUN
    assert (tmp_path / "count").read_text() == "begun\n"
    assert json.loads((tmp_path / "exit-1.json").read_text())["code"] == 7


def test_a_run_does_not_outlive_its_runner(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "strop.serve.api.runner", str(tmp_path), "1", "--", "sleep", "60"]
    runner = subprocess.Popen(command, env=ENVIRONMENT)
    file = tmp_path / "process-1.json"
    run = until(lambda: file.is_file() and Process.read(json.loads(file.read_text() or "{}").get("run")))
    runner.kill()
    runner.wait()
    until(lambda: not run.alive, seconds=10)
    assert not (tmp_path / "exit-1.json").exists()


def test_a_signal_does_not_reach_another_process_of_the_same_number() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    process = Process.of(sleeper.pid)
    assert process is not None
    assert not Process(process.pid, process.start - 1, process.boot).send(signal.SIGKILL)
    assert not Process(process.pid, process.start, "another boot").send(signal.SIGKILL)
    assert sleeper.poll() is None
    assert process.alive
    assert process.send(signal.SIGKILL)
    sleeper.wait()
    assert not process.alive


def test_two_services_do_not_share_a_folder(served: Served) -> None:
    served.start()
    command = [sys.executable, "-m", "strop", "serve", "--root", str(served.root), "--port", str(served.port + 1)]
    second = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert "another service has this folder" in second.stderr
