"""Pools of sandboxes: nothing passes from one job to the next, and what fails is told from what a program does."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from host import processes_inside, settles_at
from sandboxes import TIGHT

from strop.config.sandbox import SandboxSettings
from strop.sandbox.build import make_sandbox
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, RunResult, SandboxError


@contextmanager
def opened(**settings: object) -> Iterator[Pool]:
    made = make_sandbox(SandboxSettings.model_validate({"backend": "bubblewrap", "limits": TIGHT, **settings}))
    assert isinstance(made, Pool)
    try:
        yield made
    finally:
        made.close()


LEAVE = """
import builtins, os, sys
for folder in (".", "/tmp", "/dev/shm"):
    # An interpreter that lies below /tmp makes it read-only.
    if os.access(folder, os.W_OK): open(os.path.join(folder, "left.txt"), "w").write("left")
builtins.left = sys.left = True
os.environ["LEFT"] = "1"
os.umask(0o777)
"""
LOOK = """
import builtins, os, sys
print(sorted(os.listdir("/sandbox")), os.listdir("/dev/shm"), hasattr(builtins, "left"), hasattr(sys, "left"),
      "LEFT" in os.environ, oct(os.umask(0)))
"""
NOTHING_LEFT = "['main.py'] [] False False False 0o22\n"


def test_a_job_sees_nothing_of_the_job_before(run: Callable[..., RunResult]) -> None:
    for _ in range(3):
        left, seen = run(LEAVE), run(LOOK)
        assert left.ended == "ok", left
        assert seen.stdout == NOTHING_LEFT, seen


def test_a_run_sees_nothing_of_the_run_before_in_its_job(pool: Pool) -> None:
    both = f"if input() == 'leave':\n    exec({LEAVE!r})\nelse:\n    exec({LOOK!r})"
    runs = pool.submit(Job("script", both, inputs=("leave", "look", "leave", "look"))).result().runs
    assert [one.stdout for one in runs] == ["", NOTHING_LEFT, "", NOTHING_LEFT]


def test_a_process_that_a_run_leaves_is_gone_in_the_next(pool: Pool) -> None:
    source = """
import os, time
if input() == "leave":
    if os.fork() == 0:
        os.setsid()
        time.sleep(100)
else:
    print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
"""
    runs = pool.submit(Job("script", source, inputs=("leave", "look"))).result().runs
    assert [one.stdout for one in runs] == ["", "True\n"]


def test_what_a_run_makes_unremovable_ends_the_job_and_not_the_sandbox(pool: Pool) -> None:
    source = """
import os
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
"""
    runs = pool.submit(Job("script", source, inputs=("", ""))).result().runs
    # Either the folder could be emptied, or the second run is refused; the sandbox has not failed.
    assert runs[0].ended in ("ok", "error")
    assert runs[1].ended in ("ok", "error", "not_run")


def test_runs_after_a_failure_are_left_out_if_that_is_asked_for(pool: Pool) -> None:
    source = "import sys; sys.exit(int(input()))"
    job = Job("script", source, inputs=("0", "3", "0"))
    assert [one.ended for one in pool.submit(job).result().runs] == ["ok", "error", "ok"]
    early = Job("script", source, inputs=("0", "3", "0"), stop_at_failure=True)
    assert [one.ended for one in pool.submit(early).result().runs] == ["ok", "error", "not_run"]


def test_the_runs_of_a_job_share_its_time(pool: Pool) -> None:
    limits = TIGHT.model_copy(update={"total_seconds": 1.0})
    began = time.monotonic()
    job = Job("script", "import time; time.sleep(float(input()))", inputs=("0.1", "60", "0.1"), limits=limits)
    runs = pool.submit(job).result().runs
    assert [one.ended for one in runs] == ["ok", "timeout", "not_run"]
    assert time.monotonic() - began < 5


def test_as_many_jobs_run_at_a_time_as_there_are_workers() -> None:
    job = Job("script", "import time; print(time.time()); time.sleep(0.5); print(time.time())")
    with opened(workers=2) as pool:
        spans = []
        for future in [pool.submit(job) for _ in range(4)]:
            [one] = future.result().runs
            spans.append(tuple(map(float, one.stdout.split())))
    # Every sandbox reads the same clock.
    together = [sum(start <= at < end for start, end in spans) for at, _ in spans]
    assert max(together) == 2


@pytest.fixture
def others(pool: Pool) -> set[int]:
    """Processes of the pool that all tests share, which is at rest: one that is used up counts until it is replaced."""
    for _ in range(20):
        assert settles_at(pool.warm)
        seen = set(processes_inside())
        time.sleep(0.3)
        if set(processes_inside()) == seen:
            return seen
    raise AssertionError("the pool does not come to rest")


def test_sandboxes_can_be_started_when_they_are_needed(others: set[int]) -> None:
    with opened(workers=2, warm=0) as pool:
        assert settles_at(0, beside=others)
        assert pool.submit(Job("script", "print(1)")).result().runs[0].stdout == "1\n"
        assert settles_at(0, beside=others)


def test_a_sandbox_that_dies_while_it_waits_is_replaced(others: set[int]) -> None:
    with opened(workers=1, warm=2) as pool:
        assert settles_at(2, beside=others)
        for pid in set(processes_inside()) - others:
            os.kill(pid, signal.SIGKILL)
        assert pool.submit(Job("script", "print(1)")).result().runs[0].stdout == "1\n"


def test_a_sandbox_that_dies_at_work_is_an_error_of_the_sandbox(others: set[int]) -> None:
    with opened(workers=1, warm=1) as pool:
        assert settles_at(1, beside=others)
        [runner] = set(processes_inside()) - others
        future = pool.submit(Job("script", "import time; time.sleep(60)"))
        time.sleep(0.5)
        os.kill(runner, signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended unexpectedly"):
            future.result(20)
        assert pool.submit(Job("script", "print(1)")).result(20).runs[0].stdout == "1\n"


def test_closing_ends_what_runs_and_what_waits(others: set[int]) -> None:
    with opened(workers=2) as pool:
        future = pool.submit(Job("script", "import time; time.sleep(60)"))
        time.sleep(0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert isinstance(future.exception(5), SandboxError)
    assert set(processes_inside()) == others
    with pytest.raises(SandboxError, match="closed"):
        pool.submit(Job("script", "print(1)"))
    pool.close()  # Once more does no harm.


def test_threads_end_with_their_pool() -> None:
    before = set(threading.enumerate())
    with opened(workers=3) as pool:
        assert pool.submit(Job("script", "print(1)")).result(20).runs[0].stdout == "1\n"
        assert len(set(threading.enumerate()) - before) == 5
    end = time.monotonic() + 5
    while time.monotonic() < end and set(threading.enumerate()) - before:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before


def test_many_open_files_are_no_hindrance() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with opened(workers=1) as pool:
            # Nothing is handed down to a program, whatever number it has here.
            source = "import os\nprint([name for name in os.listdir('/proc/self/fd') if int(name) > 5])"
            assert pool.submit(Job("script", source)).result(20).runs[0].stdout == "[]\n"
    finally:
        for descriptor in files:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


OWNER = """
import signal, sys, time
# Where the tests run in the background of a shell, this one is ignored, and that is handed down.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [{tests!r}]
from host import processes_inside
from strop.config.sandbox import SandboxSettings
from strop.sandbox.build import make_sandbox
from strop.sandbox.protocol import Job
pool = make_sandbox(SandboxSettings(backend="bubblewrap", workers=2))
pool.submit(Job("script", "import os, time\\nfor _ in range(3): os.fork()\\ntime.sleep(300)"))
while len(processes_inside()) < 10: time.sleep(0.05)
print(*processes_inside(), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_process_that_owns_the_pool(number: signal.Signals) -> None:
    code = OWNER.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        assert owner.stdout is not None
        inside = [int(word) for word in owner.stdout.readline().split()]
        assert len(inside) >= 10
        owner.send_signal(number)
        owner.wait(20)
    end = time.monotonic() + 10
    while time.monotonic() < end and any(_alive(pid) for pid in inside):
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in inside)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_fork_does_not_use_the_pool_of_its_parent(pool: Pool) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            pool.submit(Job("script", "print(1)"))
        except SandboxError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


async def test_jobs_can_be_awaited(pool: Pool) -> None:
    result = await pool.run(Job("script", "print(input())", inputs=("a", "b")))
    assert [one.stdout for one in result.runs] == ["a\n", "b\n"]
