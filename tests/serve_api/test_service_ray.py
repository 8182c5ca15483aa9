"""Jobs of the service in a real Ray cluster of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import ROOT, SMALL, AtHand

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster's dashboard."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment["RAY_AUTH_MODE"] = "disabled"
    script = "import ray, sys, time; ray.init(address='local', num_cpus=2, include_dashboard=True, "
    script += f"dashboard_port={ports[1]}); print('up', flush=True); sys.stdin.read()"
    cluster = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdout is not None
    assert cluster.stdin is not None
    while (line := cluster.stdout.readline()).strip() != "up":
        assert line, "the cluster does not start"
    yield f"http://127.0.0.1:{ports[1]}"
    cluster.stdin.close()
    cluster.wait(30)


def until(there: AtHand, job: str, condition: Callable[[Any], bool]) -> Any:
    give_up = time.monotonic() + 180
    while not condition(found := there.service.jobs.of(job)):
        assert time.monotonic() < give_up, f"{found}: {there.service.jobs.log_path(job).read_text()[-2000:]}"
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
