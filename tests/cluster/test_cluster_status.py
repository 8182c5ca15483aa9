"""`strop cluster status`, from a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from cluster_waiting import Start


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strop", "cluster", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def test_nodes_and_processes_are_listed(start: Start, tmp_path: Path) -> None:
    import ray

    group = await start(2, timeout=600.0)
    os.kill(group.workers[1].pid, signal.SIGSTOP)
    found = await asyncio.to_thread(status, "--address", ray.get_runtime_context().gcs_address)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    node = next(line for line in lines if line.startswith(group.workers[0].node[:8]))
    assert node.split()[1:5] == [group.workers[0].host, ray.util.get_node_ip_address(), "4", "0"]
    assert "free: 2 CPUs, 0 GPUs" in lines
    first, second = (line for line in lines if line.startswith(tmp_path.name))
    worker = group.workers[0]
    assert first.split()[1:6] == ["trainer", "0", worker.host, worker.node[:8], str(worker.pid)]
    assert first.endswith("s ago")
    assert float(first.split()[-3]) < 30
    assert second.split()[1:] == ["trainer", "1", "no", "answer"]


def test_no_cluster_is_the_users_to_mend() -> None:
    found = status("--address", "127.0.0.1:9")
    assert found.returncode == 2
    assert "there is no Ray cluster at '127.0.0.1:9'" in found.stderr
    assert "where: --address" in found.stderr
    assert "ray start --head" in found.stderr
