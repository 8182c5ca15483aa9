"""Runs in processes of their own that are killed at some moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tiny_runs import command, environment

LONGEST = 120.0
"""Seconds after which a process that should have ended or come further is a failure."""


def write(folder: Path, data: dict[str, Any]) -> Path:
    folder.mkdir()
    # The order of a pipeline's stages is that of the file.
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return folder


# --- processes -----------------------------------------------------------------------------------------------------


class Process:
    """A process in a group of its own, whose output goes to a file."""

    def __init__(self, pid: int, folder: Path, wait: Callable[[], int | None]) -> None:
        self.pid = pid
        self.folder = folder
        self._poll = wait

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def poll(self) -> int | None:
        return self._poll()

    def wait(self) -> int:
        give_up = time.monotonic() + LONGEST
        while (code := self._poll()) is None:
            assert time.monotonic() < give_up, "the process hangs"
            time.sleep(0.005)
        return code


def started(folder: Path) -> Process:
    """`python -m strop train recipe.yaml`."""
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            command("train", "recipe.yaml"), cwd=folder, env=environment(), stdout=output, stderr=output
        )
    return Process(process.pid, folder, process.poll)


# Imports are most of what a short run takes. This process has them, and forks a real process for each command line.
NURSERY = """
import os, sys, traceback
import strop.cli, strop.loops.online, torch.utils.tensorboard, peft
from transformers.models.llama import modeling_llama
for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(line.strip())
            out = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.argv = ["strop", "train", "recipe.yaml"]
            strop.cli.main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def a_nursery() -> Iterator[Callable[[Path], Process]]:
    """Starts `strop train recipe.yaml` in a folder, as a process that has everything imported already."""
    mother = subprocess.Popen(
        [sys.executable, "-c", NURSERY], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert mother.stdin is not None
    assert mother.stdout is not None
    os.set_blocking(mother.stdout.fileno(), True)

    def start(folder: Path) -> Process:
        assert mother.stdin is not None
        assert mother.stdout is not None
        output = mother.stdout
        mother.stdin.write(f"{folder}\n")
        mother.stdin.flush()
        pid = int(output.readline())
        ended: list[int] = []

        def poll() -> int | None:
            if not ended and (not alive(pid)):
                ended.append(int(output.readline()))
            return ended[0] if ended else None

        return Process(pid, folder, poll)

    yield start
    mother.stdin.close()
    mother.wait(LONGEST)


def alive(pid: int) -> bool:
    """Whether a process exists and has not ended; the mother may not have collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- moments -------------------------------------------------------------------------------------------------------


def lines(run: Path, kind: str) -> list[int]:
    """Steps of a kind that have been logged so far."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    # A line that is being written is not there yet.
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [record["step"] for record in records if record["kind"] == kind]


_LEFT: dict[tuple[Path, str], int] = {}
"""The last step of a kind that was logged when a run was killed: its line is there until the next process cuts it."""


def kill_at(process: Process, run: Path, step: int, *, kind: str = "train", after: float = 0.0) -> None:
    """Kill a process some time after it has logged a step; a later one, if one that was killed had come as far."""
    give_up = time.monotonic() + LONGEST
    step = max(step, _LEFT.get((run, kind), 0) + 1)
    while step not in lines(run, kind):
        assert process.poll() is None, (process.folder / "output.txt").read_text()
        assert time.monotonic() < give_up
        time.sleep(0.002)
    time.sleep(after)
    assert process.poll() is None, "the run was over before it could be killed"
    process.kill()
    _LEFT[run, kind] = max(lines(run, kind), default=0)
