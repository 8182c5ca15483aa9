"""Sandboxes as an ordinary user has them: in a user namespace. (Other tests use what the user who runs them has.)"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import settles_at
from sandboxes import TIGHT

from strop.sandbox.bubblewrap import Bubblewrap
from strop.sandbox.interpreter import find_interpreter
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, RunResult


@pytest.fixture(scope="module")
def user_pool(pool: Pool) -> Iterator[Pool]:
    """`pool` comes first, because it is what says that bubblewrap cannot be had."""
    maker = Bubblewrap(find_interpreter(None), TIGHT, packages=True, as_root=False)
    made = Pool("bubblewrap", maker.command, workers=2, warm=1)
    made.start()
    yield made
    made.close()


def run(pool: Pool, source: str, given: str = "") -> RunResult:
    [found] = pool.submit(Job("script", textwrap.dedent(source), inputs=(given,), limits=TIGHT)).result(60).runs
    return found


def test_it_runs_programs(user_pool: Pool) -> None:
    assert run(user_pool, "print(int(input()) * 2)", "4").stdout == "8\n"


def test_the_program_is_nobody_and_process_1_is_not_its_own(user_pool: Pool) -> None:
    found = run(
        user_pool,
        """
        import os
        lines = [line.split() for line in open("/proc/self/status")]
        caps = {line[1] for line in lines if line and line[0] in ("CapEff:", "CapPrm:", "CapBnd:")}
        print(os.getuid(), os.getppid(), caps, open("/proc/self/uid_map").read().split()[0])
        for path in ("/proc/1/mem", "/proc/1/environ", "/etc/shadow"):
            try: print("ESCAPED", open(path, "rb").read(10))
            except OSError: pass
        for folder in ("/home", "/root"):
            try: print(sorted(os.listdir(folder)))
            except OSError: pass
        """,
    )
    lines = found.stdout.splitlines()
    assert lines[0] == "1000 1 {'0000000000000000'} 1000", found
    assert "ESCAPED" not in found.stdout
    # Folders above the interpreter are there, and nothing else is in them.
    above = {part for path in (sys.executable, sys.prefix, sys.base_prefix) for part in Path(path).parts}
    assert all(set(ast.literal_eval(line)) <= above for line in lines[1:]), lines


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("import time\ntime.sleep(100)", "timeout"),
        ("import os\nos.kill(1, 9); os.kill(1, 15); os.kill(1, 2); os.kill(-1, 9)", "ok error"),
        (
            "import os, time\nfor _ in range(6):\n    os.fork() or time.sleep(0)\ntime.sleep(100)",
            "timeout killed error",
        ),
        ("blocks = []\nwhile True: blocks.append(bytes(1 << 20))", "memory error"),
        ("import os\nif os.fork() == 0: os.setsid(); import time; time.sleep(100)", "ok"),
    ],
)
def test_its_limits_hold_and_nothing_is_left(user_pool: Pool, pool: Pool, source: str, ended: str) -> None:
    assert run(user_pool, source).ended in ended.split()
    assert settles_at(pool.warm + user_pool.warm)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_it_works_for_a_user_who_may_do_nothing() -> None:
    python = "/usr/bin/python3"
    if shutil.which("setpriv") is None or shutil.which(python) is None:
        pytest.skip("setpriv, or a Python that every user can read, is not installed")
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    if version.stdout.strip() != "True":
        pytest.skip(f"{python} is older than 3.11")
    # Only the command is made here: an ordinary user could perhaps not read what this test runs from.
    maker = Bubblewrap(find_interpreter(python), TIGHT, packages=False, as_root=False)
    argv = maker.command().argv
    options = list(argv[1 : argv.index("--")])
    for name in ("--info-fd", "--seccomp"):
        if name in options:
            del options[options.index(name) : options.index(name) + 2]
    inside = options.index("/.strop-runner")
    del options[inside - 2 : inside + 1]
    code = "import os; print(os.getpid(), os.getuid(), os.path.exists('/etc/shadow'))"
    demoted = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run(
        [*demoted, argv[0], *options, "--", python, "-c", code], capture_output=True, text=True, cwd="/"
    )
    assert done.stdout == "1 1000 False\n", done.stderr
    assert sys.platform == "linux"
