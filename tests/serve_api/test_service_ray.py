"""Jobs of the service in a real Ray cluster of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import ROOT, SMALL, AtHand

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster's dashboard. All its ports are its own: who takes its jobs listens at one, and where
    another cluster of this machine has that nobody ever takes any."""
    with ExitStack() as free:
        sockets = [free.enter_context(socket.socket()) for _ in range(4)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    named = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=true", f"--temp-dir={folder}"]
        command += [f"--{name}={port}" for name, port in zip(named, ports, strict=True)]
        log = Path(folder) / "log.txt"
        with log.open("w") as output:
            cluster = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        give_up = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert cluster.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{ports[1]}"
        cluster.terminate()
        cluster.wait(60)


def log_of(there: AtHand, job: str) -> str:
    log = there.service.jobs.log_path(job)
    return log.read_text()[-2000:] if log.exists() else "nothing was printed"


def until(there: AtHand, job: str, condition: Callable[[Any], bool]) -> Any:
    give_up = time.monotonic() + 180
    while not condition(found := there.service.jobs.of(job)):
        assert time.monotonic() < give_up, f"{found}: {log_of(there, job)}"
        # As the service's own thread does: a cluster that has just begun may have nobody yet who takes a job.
        with suppress(RuntimeError):
            there.service.jobs.look()
        time.sleep(0.5)
    return found


def test_a_job_runs_pauses_and_goes_on_in_a_cluster(
    at_hand: Callable[..., AtHand], dashboard: str, quickstart: str
) -> None:
    there = at_hand(ray=dashboard)
    long = [*SMALL, "run.steps=400", "evaluation.every=0", "checkpoint.every=1000"]
    body = {"recipe": quickstart, "overrides": long, "name": "far", "backend": "ray"}
    job = there.operator("POST", "/api/v1/jobs", json=body).json()["id"]
    run = there.root / "far"
    until(there, job, lambda _: (run / "checkpoints" / "latest").is_file())
    # The same attempt again: nothing comes of it.
    backend = there.service.jobs.backends["ray"]
    backend.start(there.service.jobs.of(job))
    there.operator("POST", f"/api/v1/jobs/{job}/pause")
    assert until(there, job, lambda found: found.state != "running").state == "paused"
    assert (run / "checkpoints" / "latest").read_text().strip() != "step-000000"
    there.operator("POST", f"/api/v1/jobs/{job}/resume")
    until(there, job, lambda found: found.attempt == 2 and (run / "run.json").read_text().count('"resumed": []') == 0)
    there.operator("POST", f"/api/v1/jobs/{job}/stop")
    assert until(there, job, lambda found: found.state != "running").state == "stopped"
