"""`strop train` in a process of its own, whose workers are killed, and what two runs must have in common."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from strop.cluster.session import worker_environment

LONGEST = 600.0
"""Seconds after which a run that should have come further is a failure."""
COMPARED = ("loss", "grad_norm", "reward/mean", "tokens/sampled", "tokens/trained", "policy/entropy")


@dataclass
class Attached:
    """A Ray cluster that runs attach to, which takes each some seconds less than to start its own.

    variables: of the environment, with which it lets a driver in.
    """

    address: str
    variables: dict[str, str]


@contextmanager
def cluster_to_attach_to(cpus: int) -> Iterator[Attached]:
    # From Ray 2.60 on a cluster that is started by itself asks for a token, and an address alone brings none.
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cluster_to_attach_to.py")), str(cpus)],
        env={**os.environ, **worker_environment(os.environ), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdout is not None
    yield Attached(cluster.stdout.readline().strip(), variables)
    cluster.communicate(timeout=60)


class Driver:
    """`strop train recipe.yaml` in a process of its own.

    Args:
        recipe: with the name `killed`. modules: of Python, by their names, which may read `STROP_TEST_SECONDS`.
        attached: of a run on Ray that starts no cluster.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Mapping[str, Any],
        cluster: Mapping[str, Any],
        modules: Mapping[str, str],
        *,
        seconds: float = 0.0,
        attached: Attached | None = None,
    ) -> None:
        self.folder = folder
        self.run = folder / "runs" / "killed"
        if attached is not None:
            cluster = {**cluster, "address": attached.address}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "cluster": dict(cluster)}))
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        found = {**os.environ, **worker_environment(os.environ)}
        found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(folder)])
        found |= {"OMP_NUM_THREADS": "1", "STROP_TEST_SECONDS": str(seconds)}
        found |= {} if attached is None else attached.variables
        with (folder / "output.txt").open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "strop", "train", "recipe.yaml"],
                cwd=folder,
                env=found,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def until(self, true: Callable[[], Any]) -> Any:
        """Wait while the driver runs; what became true."""
        give_up = time.monotonic() + LONGEST
        while not (found := true()):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up, self.output
            time.sleep(0.02)
        return found

    def steps_done(self) -> int:
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait(self) -> int:
        return self.process.wait(timeout=LONGEST)

    def workers(self) -> dict[str, int]:
        """Process ids by role and rank: each has a child that copies what it says to its log."""
        found = {}
        for process in psutil.process_iter():
            try:
                *_, log, name = process.cmdline() or ["", ""]
                parent = process.parent()
                if log.startswith(str(self.folder)) and parent is not None and parent.name().startswith("ray::"):
                    found[name.replace(" ", "-")] = parent.pid
            except (psutil.Error, ValueError):
                continue
        return found

    def stop(self) -> None:
        for pid in [self.process.pid, *self.workers().values()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def assert_same(run: Path, expected: Path, *, steps: int, metrics: Sequence[str] = COMPARED) -> None:
    """Losses, rewards and tokens of all steps, and the parameters after the last one."""
    lines, wanted = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (run, expected)
    )
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    for line, other in zip(lines, wanted, strict=True):
        for name in metrics:
            assert line["metrics"][name] == pytest.approx(other["metrics"][name], rel=1e-3, abs=1e-5), name
    ours, theirs = (
        load_file(path / "checkpoints" / f"step-{steps:06d}" / "model" / "model.safetensors")
        for path in (run, expected)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=1e-3)
