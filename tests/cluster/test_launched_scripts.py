"""The scripts that `strop launch` writes are run: real Ray, with programs in place of strop, ssh, srun and scontrol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from strop.cli import app

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RECIPE = "model: {path: m}\ndata: {train: {path: d.jsonl}}\nrewards: {verifiers: [{kind: exact}]}\n"
STROP = """\
import json, os, signal, sys, time
import ray
ray.init(address="auto", log_to_driver=False)
nodes = [node for node in ray.nodes() if node["Alive"]]
said = {"argv": sys.argv[1:], "nodes": len(nodes), "cpus": ray.cluster_resources()["CPU"], "cwd": os.getcwd()}
ray.shutdown()
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
print(json.dumps(said | {"address": os.environ["RAY_ADDRESS"]}), flush=True)
while os.environ["UNTIL_SIGNAL"] and not heard:
    time.sleep(0.05)
print(json.dumps(heard), flush=True)
sys.exit(int(os.environ["CODE"]))
"""
SSH = """\
while [ "$1" != -- ]; do shift; done
echo "$2" >>"$LOG"
# As over a connection: what runs there sees no more of this process than its standard input.
cat | setsid sh -c "$3"
"""
SRUN = """\
echo "srun $*" >>"$LOG"
while [ "$1" != ray ]; do shift; done
exec "$@"
"""
SCONTROL = """\
if [ "$1" = show ]; then echo first; echo second; else echo "scontrol $*" >>"$LOG"; fi
"""


class Script:
    """A script of `strop launch` that runs."""

    def __init__(self, folder: Path, kind: str, *arguments: str, code: int = 0, until_signal: bool = False) -> None:
        self.log = folder / "log"
        bin = folder / "bin"
        bin.mkdir()
        (bin / "strop").write_text(f"#!{sys.executable}\n{STROP}")
        for name, body in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
            (bin / name).write_text(f"#!/usr/bin/env bash\n{body}")
        for path in bin.iterdir():
            path.chmod(0o755)
        (folder / "it's.yaml").write_text(RECIPE)
        options = ["--gpus-per-node", "0", "--cpus-per-node", "1", "--output", "job.sh", "run.steps=3"]
        result = CliRunner().invoke(app, ["launch", kind, "it's.yaml", *arguments, *options])
        assert result.exit_code == 0, result.output
        environment = {
            **os.environ,
            "PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            "LOG": str(self.log),
            "CODE": str(code),
            # Ray's sockets lie there, whose paths must be short.
            "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray", dir="/tmp"),
            "UNTIL_SIGNAL": "yes" if until_signal else "",
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "first",
        }
        environment.pop("RAY_ADDRESS", None)
        self.temporary = environment["RAY_TMPDIR"]
        self.errors = (folder / "errors").open("w+")
        # As a terminal would start it: where the tests run in the background, SIGINT is ignored, and would stay so.
        command = (
            "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp('bash', ['bash', 'job.sh'])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
        )

    def line(self) -> Any:
        """The next thing that the program in place of strop says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            pytest.fail(self.errors.read()[-4000:])
        return json.loads(line)

    def of_cluster(self, address: str) -> list[str]:
        """The processes on this machine that belong to the cluster."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if address in command or f"--port={address.rpartition(':')[2]} " in f"{command} ":
                found.append(command[:200])
        return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    started: list[Script] = []
    yield started
    for script in started:
        if script.process.poll() is None:
            script.process.terminate()
            script.process.wait(timeout=120)
        shutil.rmtree(script.temporary, ignore_errors=True)


def gone(script: Script, address: str) -> None:
    deadline = time.monotonic() + 60
    while left := script.of_cluster(address):
        if time.monotonic() > deadline:
            pytest.fail("\n".join(left))
        time.sleep(0.2)


def test_two_nodes_join_and_ray_is_stopped_though_strop_fails(folder: Path, scripts: list[Script]) -> None:
    script = Script(folder, "ray", "--hosts", "gpu2", code=3)
    scripts.append(script)
    said = script.line()
    assert said["argv"] == ["train", f"{folder}/it's.yaml", "run.steps=3", "cluster.kind=ray", "cluster.address=auto"]
    assert (said["nodes"], said["cpus"], said["cwd"]) == (2, 2, str(folder))
    assert script.log.read_text() == "gpu2\n"
    assert script.process.wait(timeout=120) == 3
    gone(script, said["address"])


def test_a_stop_is_for_strop_first_and_ray_is_stopped_behind_it(folder: Path, scripts: list[Script]) -> None:
    script = Script(folder, "ray", code=130, until_signal=True)
    scripts.append(script)
    said = script.line()
    assert (said["nodes"], said["cpus"]) == (1, 1)
    assert script.of_cluster(said["address"])
    script.process.send_signal(signal.SIGINT)
    assert script.line() == ["SIGTERM"]
    assert script.process.wait(timeout=120) == 130
    gone(script, said["address"])


def test_a_slurm_job_saves_and_goes_back_into_the_queue(folder: Path, scripts: list[Script]) -> None:
    script = Script(folder, "slurm", "--nodes", "2", until_signal=True)
    scripts.append(script)
    said = script.line()
    assert said["nodes"] == 2
    script.process.send_signal(signal.SIGUSR1)
    assert script.line() == ["SIGUSR1"]
    assert script.process.wait(timeout=120) == 0
    head, workers, requeue = script.log.read_text().splitlines()
    assert "--nodelist=first ray start --head --block" in head
    assert f"--exclude=first ray start --block --address={said['address']}" in workers
    assert requeue == "scontrol requeue 42"
    gone(script, said["address"])


def test_a_slurm_job_that_fails_does_not_go_back(folder: Path, scripts: list[Script]) -> None:
    script = Script(folder, "slurm", "--nodes", "1", code=1, until_signal=True)
    scripts.append(script)
    said = script.line()
    script.process.send_signal(signal.SIGUSR1)
    assert script.line() == ["SIGUSR1"]
    assert script.process.wait(timeout=120) == 1
    assert "requeue" not in script.log.read_text()
    gone(script, said["address"])
