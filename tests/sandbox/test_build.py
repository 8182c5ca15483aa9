"""From settings to a sandbox that works, or to the reason why none does, before anything else happens."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from sandboxes import TIGHT

from strop.config.sandbox import LimitSettings, SandboxSettings
from strop.errors import UserError
from strop.sandbox.bubblewrap import why_not
from strop.sandbox.build import make_sandbox
from strop.sandbox.interpreter import find_interpreter
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, RunResult


def settings(**given: object) -> SandboxSettings:
    return SandboxSettings.model_validate({"limits": TIGHT, **given})


def once(sandbox: Pool, source: str, given: str = "") -> RunResult:
    return sandbox.submit(Job("script", source, inputs=(given,), limits=TIGHT)).result(60).runs[0]


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_bubblewrap")
def test_without_bubblewrap_nothing_runs() -> None:
    with pytest.raises(UserError, match="bubblewrap is not installed") as caught:
        make_sandbox(settings())
    assert "apt-get install bubblewrap" in caught.value.mend
    assert caught.value.exit_code == 2


@pytest.mark.usefixtures("without_bubblewrap")
def test_being_asked_for_bubblewrap_means_it_even_where_none_is_allowed() -> None:
    with pytest.raises(UserError, match="bubblewrap is not installed"):
        make_sandbox(settings(backend="bubblewrap", allow_unsandboxed=True))


@pytest.mark.parametrize("backend", ["none"])
def test_no_sandbox_needs_to_be_allowed(backend: str) -> None:
    with pytest.raises(UserError, match="does not isolate") as caught:
        make_sandbox(settings(backend=backend))
    assert "allow_unsandboxed" in caught.value.mend


def broken(folder: Path, text: str) -> None:
    command = folder / "bwrap"
    command.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    command.chmod(0o755)


def test_what_bubblewrap_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(tmp_path, "bwrap: setting up uid map: Permission denied")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="cannot isolate here") as caught:
        make_sandbox(settings())
    assert "setting up uid map: Permission denied" in caught.value.what or "sysctl" in caught.value.mend
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ],
)
def test_the_setting_of_the_kernel_is_named(tmp_path: Path, name: str, value: str, mend: str) -> None:
    path = tmp_path / "proc" / "sys" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{value}\n")
    why, how = why_not("bwrap: No permissions to create new namespace", tmp_path)
    assert name.replace("/", ".") in why
    assert mend in how
    path.write_text(f"{int(value) ^ 1}\n")
    assert why_not("bwrap: no", tmp_path)[0] == "bwrap: no"


def test_a_container_is_told_how_to_be_started(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    assert "--security-opt seccomp=unconfined" in why_not("bwrap: no", tmp_path)[1]


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "/bin/true"])
def test_an_interpreter_that_is_none_is_told(python: str) -> None:
    with pytest.raises(UserError) as caught:
        find_interpreter(python)
    assert caught.value.where == "sandbox.python"


def test_an_old_interpreter_is_told(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho '{\"version\": [3, 8]}'\n")
    old.chmod(0o755)
    with pytest.raises(UserError, match=r"is Python 3\.8"):
        find_interpreter(str(old))


def test_packages_can_be_left_out(pool: Pool) -> None:
    made = make_sandbox(settings(backend="bubblewrap", packages=False, workers=1, warm=0))
    assert isinstance(made, Pool)
    try:
        found = once(made, "import json\ntry:\n    import numpy\nexcept ImportError:\n    print('none')")
    finally:
        made.close()
    assert found.stdout == "none\n"
    assert once(pool, "import numpy").ended == "ok"


def test_workers_are_as_many_as_cores_unless_said() -> None:
    with pytest.warns(UserWarning, match="without a sandbox"):
        made = make_sandbox(settings(backend="none", allow_unsandboxed=True, warm=0))
    made.close()
    assert made.workers == len(os.sched_getaffinity(0)) if sys.platform == "linux" else made.workers > 0


@pytest.mark.parametrize("limits", [{"disk_mib": 100, "memory_mib": 50}, {"cpu_seconds": 0}, {"wall_seconds": 0}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        LimitSettings.model_validate(limits)


# --- without a sandbox ---


@pytest.fixture(scope="module")
def bare() -> Pool:
    with pytest.warns(UserWarning, match="they can read, change and send whatever you can"):
        made = make_sandbox(settings(backend="none", allow_unsandboxed=True, workers=2))
    assert isinstance(made, Pool)
    yield made
    made.close()


@pytest.mark.usefixtures("without_bubblewrap")
def test_auto_does_without_where_it_may_and_must() -> None:
    with pytest.warns(UserWarning, match="without a sandbox"):
        made = make_sandbox(settings(allow_unsandboxed=True, workers=1))
    assert made.name == "none"
    made.close()


def test_programs_run_without_a_sandbox(bare: Pool) -> None:
    found = once(
        bare, "import os, sys\nprint(input(), os.getcwd() == os.path.dirname(__file__), sys.argv[0] == __file__)", "a"
    )
    assert (found.ended, found.stdout) == ("ok", "a True True\n")


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(100)", "timeout"),
        ("print('x' * (1 << 20))", "output_limit"),
        ("block = bytearray(1 << 30)", "memory"),
        ("open('f', 'wb').write(bytes(32 << 20))", "error"),
        ("import sys; sys.exit(3)", "error"),
        ("import os; os.kill(os.getpid(), 9)", "killed"),
        ("import os; os.kill(os.getppid(), 9)", "killed"),
    ],
)
def test_a_process_has_its_limits_without_a_sandbox(bare: Pool, source: str, ended: str) -> None:
    if sys.platform != "linux" and ended == "memory":
        pytest.skip("this system does not limit memory")
    assert once(bare, source).ended == ended
    assert once(bare, "print(1)").stdout == "1\n"


def test_folders_and_children_are_removed_without_a_sandbox(bare: Pool) -> None:
    source = """
import os, time
print(os.getcwd(), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(100)
    os._exit(0)
time.sleep(0.3)
"""
    folder, pid = once(bare, source).stdout.split()
    end = time.monotonic() + 10
    while time.monotonic() < end and (Path(folder).exists() or Path("/proc", pid).exists()):
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert not Path("/proc", pid).exists()
