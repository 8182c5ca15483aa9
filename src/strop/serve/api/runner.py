"""What stands beside a run that the service started: `python -m strop.serve.api.runner FOLDER ATTEMPT -- COMMAND...`.

It outlives the service. In the job's folder it keeps `lock` (held as long as it runs), `process-N.json` (itself and the
run, by number and start) and in the end `exit-N.json`. An attempt is begun by whoever creates `process-N.json`, under
the lock: two runners of one attempt, or of one job, cannot both start a run, whoever started them and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from strop.serve.api.processes import Process

LOCK, LOG, WISH = "lock", "log.txt", "wish"
PATIENCE = 5.0
"""Seconds to wait for the lock: a service that looks at it holds it for an instant."""
NOT_BEGUN = 3
"""Exit code where another runner has the job."""
_PR_SET_PDEATHSIG = 1


def process_file(folder: Path, attempt: int) -> Path:
    """Where a runner says which processes it and the run of an attempt are."""
    return folder / f"process-{attempt}.json"


def exit_file(folder: Path, attempt: int) -> Path:
    """Where a runner says how an attempt ended."""
    return folder / f"exit-{attempt}.json"


def main(arguments: list[str]) -> int:
    """Run the command once; returns its exit code, as a shell would have it."""
    folder, attempt, command = Path(arguments[0]), int(arguments[1]), arguments[arguments.index("--") + 1 :]
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not _locked(lock) or not _first(folder, attempt):
        return NOT_BEGUN
    with (folder / LOG).open("ab") as log:
        try:
            run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_me)
        except OSError as error:
            log.write(f"the run cannot be started: {error}\n".encode())
            _write(exit_file(folder, attempt), {"code": 127, "ended": time.time()})
            return 127
        there = {"runner": _plain(os.getpid()), "run": _plain(run.pid), "began": time.time()}
        _write(process_file(folder, attempt), there)
        # Whoever ends the group ends the run; the runner still has to say how it ended.
        signal.signal(signal.SIGTERM, lambda *_: run.send_signal(signal.SIGTERM))
        signal.signal(signal.SIGINT, lambda *_: run.send_signal(signal.SIGINT))
        code = _watched(run, folder / WISH)
    _write(exit_file(folder, attempt), {"code": code, "ended": time.time()})
    return code if code >= 0 else 128 - code


def _watched(run: subprocess.Popen[bytes], wish: Path) -> int:
    """Wait for the run. A file `wish` asks it to save and leave where no signal of the service can reach it (Ray)."""
    asked = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return run.wait(timeout=1.0)
        if not asked and wish.exists():
            run.send_signal(signal.SIGUSR1)
            asked = True


def _locked(lock: int) -> bool:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)


def _first(folder: Path, attempt: int) -> bool:
    """Whether this runner is the first of its attempt; then it has said so."""
    try:
        handle = os.open(process_file(folder, attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"runner": _plain(os.getpid()), "began": time.time()}, file)
    return True


def _plain(pid: int) -> dict[str, Any] | None:
    process = Process.of(pid)
    return None if process is None else process.plain()


def _write(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _end_with_me() -> None:
    """In the run, before it is one: a killed runner takes it along, so that no run goes on that nobody knows of."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
