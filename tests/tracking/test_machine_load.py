"""`load.jsonl`: what the machine did, by a thread that costs a run nothing but its time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from strop.tracking.load import LoadSampler, LoadTail
from strop.tracking.load_probe import Cards, LoadProbe

SPIN = "import time\nend = time.monotonic() + 60\nprint(1, flush=True)\nwhile time.monotonic() < end: pass"
HOLD = "block = bytearray(300 * 2**20)\nprint(1, flush=True)\nimport time; time.sleep(60)"


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """`child(program)`: a process that runs it, from when it has printed something; ended in the end."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(there: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + 60
    while not (found := there()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return found


# --- the probe ------------------------------------------------------------------------------------------------------


def test_what_a_child_computes_and_holds_is_the_runs(child: Callable[[str], Any]) -> None:
    probe = LoadProbe()
    before = probe.take()
    spinning, _ = child(SPIN), child(HOLD)
    used = psutil.Process(spinning.pid)
    start = used.cpu_times().user
    until(lambda: used.cpu_times().user > start + 0.5)
    after = probe.take()
    # At least what the child has computed, of all processors of the machine, since the look before.
    assert 0 < after["run_cpu_percent"] <= after["cpu_percent"] + 1 <= 101
    assert after["run_cpu_percent"] > before["run_cpu_percent"] or before["run_cpu_percent"] > 20
    assert after["run_memory_gib"] >= before["run_memory_gib"] + 0.28
    assert after["run_memory_gib"] < after["memory_gib"] < psutil.virtual_memory().total / 2**30


ALONE = """
import json, os, psutil
from strop.tracking.load_probe import LoadProbe
probe, parent = LoadProbe(), psutil.Process().parent()
asked = [[], [parent.pid], [os.getpid()], [2**31 - 2]]
print(json.dumps([parent.memory_info().rss / 2**30, *(probe.take(one)["run_memory_gib"] for one in asked)]))
"""


def test_processes_of_others_count_where_they_are_named() -> None:
    """Its own parent, this test, is not of the tree of a process that nobody else is in."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    parent, own, both, itself, nobody = json.loads(done.stdout)
    # With its parent come all that it has started, this process among them, and each counts once.
    assert both >= own + 0.9 * parent
    assert itself == pytest.approx(own, rel=0.1)
    assert nobody == pytest.approx(own, rel=0.1)


def test_what_was_computed_before_the_first_look_does_not_count(child: Callable[[str], Any]) -> None:
    spinning = child(SPIN)
    used = psutil.Process(spinning.pid)
    until(lambda: used.cpu_times().user > 2.0)
    used.suspend()
    until(lambda: used.status() == psutil.STATUS_STOPPED)
    probe, began = LoadProbe(), time.monotonic()
    time.sleep(0.3)
    share = probe.take()["run_cpu_percent"] / 100
    assert share * (psutil.cpu_count() or 1) * (time.monotonic() - began) < 1.5
    used.resume()


NVML = """
NVML_TEMPERATURE_GPU = 0
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
class Rates:
    def __init__(self, gpu): self.gpu = gpu
class Memory:
    def __init__(self, used): self.used = used
def nvmlDeviceGetUtilizationRates(card): return Rates(90 + card)
def nvmlDeviceGetMemoryInfo(card): return Memory((card + 1) * 2**30)
def nvmlDeviceGetTemperature(card, which):
    if card: raise RuntimeError("Not Supported")
    return 61
def nvmlDeviceGetPowerUsage(card): raise RuntimeError("Not Supported")
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`nvml(program)`: a module of this text in the place of `pynvml`."""

    def place(text: str) -> None:
        (tmp_path / "nvml").mkdir()
        (tmp_path / "nvml" / "pynvml.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / "nvml"))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    yield place
    sys.modules.pop("pynvml", None)


def test_each_card_says_what_it_can(nvml: Callable[[str], None]) -> None:
    nvml(NVML)
    found = LoadProbe().take()
    assert {name: found[name] for name in found if name.startswith("gpu")} == {
        "gpu_percent": [90.0, 91.0],
        "gpu_memory_gib": [1.0, 2.0],
        "gpu_celsius": [61.0, None],
    }


@pytest.mark.parametrize(
    "broken", ["raise ImportError", "def nvmlInit(): raise OSError('no driver')", NVML.replace("return 2", "return 0")]
)
def test_without_a_driver_or_card_there_are_no_cards(nvml: Callable[[str], None], broken: str) -> None:
    nvml(broken)
    assert Cards.find() is None
    assert not any(name.startswith("gpu") for name in LoadProbe().take())


# --- the thread -----------------------------------------------------------------------------------------------------


class Others:
    """Another machine, which tells its load once."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = [("far", {"cpu_percent": 12.5})]

    def processes(self) -> Sequence[int]:
        return []

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        told, self.told = self.told, []
        return told


def test_lines_come_until_it_is_closed(tmp_path: Path) -> None:
    path, step = tmp_path / "load.jsonl", [1]
    sampler = LoadSampler(path, 0.1)
    assert path.read_bytes() == b""
    before = time.time()
    sampler.start(lambda: step[0], Others())
    until(lambda: len(lines(path)) >= 2)
    step[0] = 7
    sampler.close()
    found = lines(path)
    assert found[-1]["step"] == 7
    assert found[0]["step"] == 1
    assert [line["cpu_percent"] for line in found if line["node"] == "far"] == [12.5]
    assert before < found[0]["time"] <= found[-1]["time"] < time.time()
    assert not [thread for thread in threading.enumerate() if thread.name == "load"]
    sampler.close()
    assert lines(path) == found


def test_a_short_run_has_one_line(tmp_path: Path) -> None:
    sampler = LoadSampler(tmp_path / "load.jsonl", 3600.0)
    sampler.start(lambda: 1)
    sampler.close()
    assert len(lines(tmp_path / "load.jsonl")) == 1


def test_at_zero_there_is_neither_file_nor_thread(tmp_path: Path) -> None:
    sampler = LoadSampler(tmp_path / "load.jsonl", 0.0)
    sampler.start(lambda: 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "load"]
    sampler.close()
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_stays_in_the_thread(tmp_path: Path) -> None:
    said: list[str] = []

    def fail() -> int:
        raise ValueError("no step")

    sampler = LoadSampler(tmp_path / "load.jsonl", 0.1, warn=said.append)
    sampler.start(fail)
    until(lambda: said)
    sampler.close()
    assert len(said) == 1
    assert "ValueError: no step" in said[0]


PROGRAM = """
import resource, signal, sys, time
from pathlib import Path
from strop.tracking.load import LoadSampler
said = []
sampler = LoadSampler(Path(sys.argv[1]), 0.1, warn=said.append)
if sys.argv[2] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
sampler.start(lambda: 1)
if sys.argv[2] == "leave":
    sys.exit(3)
while not said:
    time.sleep(0.05)
time.sleep(1.0)
# There is room again, and the lines go on.
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
while Path(sys.argv[1]).stat().st_size <= size:
    time.sleep(0.05)
sampler.close()
print(len(said), said[0])
"""


def program(path: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), what], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_full_disk_costs_one_warning(tmp_path: Path) -> None:
    """A limit on the size of files is met by a write as a full disk is."""
    done = program(tmp_path / "load.jsonl", "full")
    assert done.stdout.startswith("1 the load of the machine cannot be recorded: "), done.stderr
    assert all("cpu_percent" in line for line in lines(tmp_path / "load.jsonl"))


def test_it_keeps_no_process_alive(tmp_path: Path) -> None:
    done = program(tmp_path / "load.jsonl", "leave")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


# --- reading --------------------------------------------------------------------------------------------------------


def test_machines_are_followed_as_columns(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    tail = LoadTail(path)
    assert tail.news("", ["cpu_percent"]).kinds == {}
    one = {"time": 5.0, "step": 1, "node": "a=b,c", "cpu_percent": 50.0, "gpu_percent": [10.0, None]}
    with path.open("a") as file:
        file.write(json.dumps(one) + "\n" + json.dumps({**one, "cpu_percent": "much"}) + "\n[]\n{}\n")
    news = tail.news("", ["cpu_percent", "gpu_percent/0", "gpu_percent/1"])
    [(kind, (steps, times, values))] = news.kinds.items()
    assert (kind, steps, times) == ("a_b_c", [1], [5.0])
    assert values["cpu_percent"] == [50.0]
    assert values["gpu_percent/0"] == [10.0]
    assert math.isnan(values["gpu_percent/1"][0])
    with path.open("a") as file:
        file.write(json.dumps({**one, "time": 6.0}) + "\n")
    assert tail.news(news.cursor, ["cpu_percent"]).kinds["a_b_c"] == ([1], [6.0], {"cpu_percent": [50.0]})
