"""Control groups: where they can be made, which files are written, and that they hold what is in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandboxes import TIGHT

from strop.sandbox.cgroups import SLACK_MIB, Cgroups, find_cgroups

BYTES = (TIGHT.memory_mib + SLACK_MIB) << 20


def kernel(folder: Path, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which every new folder gets the files that the kernel would make."""
    make = Path.mkdir

    def mkdir(self: Path, *arguments: int, **keywords: bool) -> None:
        make(self, *arguments, **keywords)
        if self.name.startswith("strop-"):
            for name in files:
                (self / name).touch()

    def rmdir(self: Path) -> None:
        for name in files:
            (self / name).unlink()
        os.rmdir(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)
    make(folder, parents=True)
    return folder


UNIFIED = ("cgroup.procs", "memory.max", "memory.swap.max", "memory.events", "pids.max")


def test_version_2_is_used_where_it_has_the_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel(tmp_path / "user.slice" / "run.scope", UNIFIED, monkeypatch)
    found = find_cgroups(tmp_path, "0::/user.slice/run.scope\n")
    assert found is not None
    assert (found.version, found.parents) == (2, {"memory": own, "pids": own})
    group = found.cage(TIGHT)
    group.hold(4711)
    [folder] = own.iterdir()
    written = {name: (folder / name).read_text() for name in UNIFIED}
    assert written == {
        "cgroup.procs": "4711",
        "memory.max": str(BYTES),
        "memory.swap.max": "0",
        "memory.events": "",
        "pids.max": str(TIGHT.processes + 2),
    }
    assert not group.out_of_memory()
    (folder / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 0\n")
    assert not group.out_of_memory()
    (folder / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 1\n")
    assert group.out_of_memory()
    group.remove()
    assert list(own.iterdir()) == []


def test_no_group_is_used_that_lacks_a_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel(tmp_path / "a" / "b", ("cgroup.procs", "pids.max"), monkeypatch)
    assert find_cgroups(tmp_path, "0::/a/b\n") is None
    assert list(own.iterdir()) == []
    assert find_cgroups(tmp_path, "0::/../../etc\n") is None


def test_version_1_needs_both_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("cgroup.procs", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", "pids.max")
    memory = kernel(tmp_path / "memory" / "docker", files, monkeypatch)
    own = "4:memory:/docker\n3:cpu,cpuacct:/docker\n0::/docker\n"
    assert find_cgroups(tmp_path, own) is None
    (tmp_path / "pids" / "docker").mkdir(parents=True)
    found = find_cgroups(tmp_path, "8:pids:/docker\n" + own)
    assert found is not None
    assert (found.version, found.parents) == (1, {"memory": memory, "pids": tmp_path / "pids" / "docker"})


def test_groups_that_dead_processes_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel(tmp_path / "a", UNIFIED, monkeypatch)
    for pid in (os.getpid(), 2**22 + 1):
        (own / f"strop-sandbox-{pid}-0").mkdir()
    find_cgroups(tmp_path, "0::/a\n")
    assert [folder.name for folder in own.iterdir()] == [f"strop-sandbox-{os.getpid()}-0"]


@pytest.fixture
def real() -> Cgroups:
    found = find_cgroups()
    if found is None:
        pytest.skip("no control group can be made here: the kernel's part of this is not tested")
    return found


def test_a_group_ends_what_takes_more_memory(real: Cgroups) -> None:
    group = real.cage(TIGHT)
    code = f"input(); block = bytearray(b'x') * {BYTES * 2}; print('done')"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        group.hold(process.pid)
        output, _ = process.communicate(b"\n", timeout=60)
    assert (output, process.returncode) == (b"", -9)
    assert group.out_of_memory()
    folders = [folder for folder in group.folders.values() if folder.exists()]
    assert folders
    group.remove()
    assert not any(folder.exists() for folder in folders)


def test_a_group_holds_as_many_processes_as_it_may(real: Cgroups) -> None:
    group = real.cage(TIGHT)
    code = """
import os, time
input()
made = 0
try:
    for _ in range(200):
        if os.fork() == 0: time.sleep(60)
        made += 1
except BlockingIOError: pass
print(made, flush=True)
os.killpg(0, 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        group.hold(process.pid)
        output, _ = process.communicate(b"\n", timeout=60)
    # The limit and two to spare, and the process itself is one.
    assert int(output) == TIGHT.processes + 1
    group.remove()
