"""A program in the sandbox behaves as it does in a fresh interpreter, and ends as its limits say."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from sandboxes import TIGHT

from strop.sandbox.calls import call_input, value_of
from strop.sandbox.inside.plain import NotPlain
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, RunResult

Run = Callable[..., RunResult]


def test_it_reads_its_input_and_prints(run: Run) -> None:
    found = run("import sys\nname = input()\nprint('hello', name, len(sys.stdin.read()))", "Zoë ✓\n" + "x" * 500_000)
    assert (found.ended, found.code, found.signal, found.stdout, found.stderr) == (
        "ok",
        0,
        None,
        "hello Zoë ✓ 500000\n",
        "",
    )
    assert 0 < found.seconds < 3


@pytest.mark.parametrize(
    ("source", "code", "errors"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("exit()", 0, ""),
        ("quit(2)", 2, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import os; os._exit(4)", 4, ""),
        ("1/0", 1, "ZeroDivisionError"),
        ("def f(:", 1, "SyntaxError"),
        ("import sys; sys.stdout.close()", 0, ""),
    ],
)
def test_its_exit_code_is_what_an_interpreter_gives(run: Run, source: str, code: int, errors: str) -> None:
    found = run(source)
    assert (found.code, found.ended) == (code, "error" if code else "ok")
    assert errors in found.stderr


def test_a_traceback_begins_in_the_program(run: Run) -> None:
    found = run("def f():\n    return [][1]\n\nf()\n")
    lines = found.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "/sandbox/main.py", line 4, in <module>'
    assert lines[-1] == "IndexError: list index out of range"
    assert ".strop-runner" not in found.stderr


def test_it_is_the_main_program(run: Run) -> None:
    source = """
import __main__, pickle, sys
class A: pass
x: "no such name" = 1
print(__name__, sys.argv, __file__, __main__.A is A, pickle.loads(pickle.dumps(A)) is A, sys.path[0])
try: import runner
except ImportError: print("no runner")
"""
    assert run(source).stdout == "__main__ ['/sandbox/main.py'] /sandbox/main.py True True /sandbox\nno runner\n"


def test_annotations_are_evaluated_as_usual(run: Run) -> None:
    # The runner's own `from __future__ import annotations` must not be the program's.
    assert run("def f(a: int): pass\nprint(f.__annotations__)").stdout == "{'a': <class 'int'>}\n"


def test_threads_processes_and_exit_handlers_do_their_work(run: Run) -> None:
    source = """
import atexit, multiprocessing, subprocess, sys, threading
def work(n): return n * n
atexit.register(lambda: print("at exit"))
done = threading.Event()
def late():
    done.wait()
    print("thread")
threading.Thread(target=late).start()
with multiprocessing.Pool(2) as workers: print(workers.map(work, [1, 2, 3]))
print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip(), flush=True)
done.set()
"""
    assert run(source).stdout == "[1, 4, 9]\n7\nthread\nat exit\n"


def test_the_order_of_a_set_is_the_same_every_time(run: Run) -> None:
    source = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({run(source).stdout for _ in range(4)}) == 1


def test_it_can_open_its_channels_by_path(run: Run) -> None:
    assert (
        run("print(open('/dev/stdin').read() + open(0).read())\nopen('/dev/stdout', 'w').write('x')", "in").ended
        == "ok"
    )


def test_it_imports_packages_where_that_is_allowed(run: Run) -> None:
    # numpy is one that strop itself needs.
    assert run("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"


def test_it_has_the_files_of_its_job(pool: Pool) -> None:
    files = {"data/table.csv": b"1,2\n\xff", "module.py": b"answer = 42"}
    source = "import module\nprint(module.answer, open('data/table.csv', 'rb').read())"
    [found] = pool.submit(Job("script", source, files=files)).result().runs
    assert found.stdout == "42 b'1,2\\n\\xff'\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_a_file_outside_of_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="inside of the working folder"):
        Job("script", "", files={name: b""})


def test_commands_run(pool: Pool) -> None:
    job = Job("command", argv=("sh", "-c", "read name; echo hi $name; pwd; exit 5"), inputs=("you\n",))
    [found] = pool.submit(job).result().runs
    assert (found.stdout, found.code, found.ended) == ("hi you\n/sandbox\n", 5, "error")
    [missing] = pool.submit(Job("command", argv=("no-such-command",))).result().runs
    assert (missing.code, missing.ended) == (127, "error")
    assert "no-such-command" in missing.stderr


def test_functions_are_called_with_plain_data(pool: Pool) -> None:
    source = """
import collections
print("loading")
def both(a, *, b=0): return {"sum": a + b, "pair": (a, b), "set": {a, b}}
class Solution:
    def count(self, words): return collections.Counter(words)
def lazy(): return (n for n in range(3))
if __name__ == "__main__": print("not printed")
"""
    inputs = [call_input("both", [1], {"b": 2}), call_input("count", ["aab"]), call_input("Solution.count", ["b"])]
    inputs += [call_input("lazy", []), call_input("none", [])]
    runs = pool.submit(Job("call", source, inputs=tuple(inputs))).result().runs
    assert value_of(runs[0].value) == {"sum": 3, "pair": (1, 2), "set": {1, 2}}
    assert value_of(runs[1].value) == {"a": 2, "b": 1}
    assert value_of(runs[2].value) == {"b": 1}
    assert [one.stdout for one in runs] == ["loading\n"] * 5
    assert "generator is not plain data" in runs[3].stderr
    assert "'none'" in runs[4].stderr
    with pytest.raises(NotPlain):
        value_of(runs[4].value)


# --- limits ---


def test_processor_time_and_wall_clock_are_told_apart_from_errors(run: Run) -> None:
    busy = run("while True: pass", cpu_seconds=1)
    assert busy.ended == "timeout"
    assert 0.9 <= busy.cpu <= 2.5
    asleep = run("import time; print('before', flush=True); time.sleep(60)", wall_seconds=0.5)
    assert (asleep.ended, asleep.stdout) == ("timeout", "before\n")
    assert 0.5 <= asleep.seconds < 2.5
    assert asleep.cpu < 0.5


def test_time_for_which_others_had_the_processor_does_not_count(run: Run) -> None:
    # Four more processes on the same core: what takes a fifth of a second takes five times as long.
    source = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(4):
    if os.fork() == 0:
        while True: pass
began = time.monotonic()
while time.process_time() < 0.2: pass
print(time.monotonic() - began > 0.7)
"""
    found = run(source, wall_seconds=0.7)
    assert (found.ended, found.stdout) == ("ok", "True\n")
    # But not for ever.
    endless = run(source.replace("< 0.2", "< 1e9"), wall_seconds=0.5, cpu_seconds=60)
    assert endless.ended == "timeout"
    assert 0.5 < endless.seconds < 2.5


def test_memory(run: Run) -> None:
    source = "block = bytearray({} << 20); print(len(block) >> 20)"
    assert run(source.format(100)).stdout == "100\n"
    assert run(source.format(300)).ended == "memory"
    assert run(source.format(100), memory_mib=64).ended == "memory"


def test_disk(run: Run) -> None:
    source = "open('f', 'wb').write(bytes({} << 20)); print('ok')"
    assert run(source.format(8)).stdout == "ok\n"
    assert "No space left" in run("open('a', 'wb').write(bytes(9 << 20))\n" + source.format(9)).stderr
    assert "File too large" in run(source.format(8), disk_mib=4).stderr


def test_processes(run: Run) -> None:
    source = """
import subprocess
print(len([subprocess.Popen(["sleep", "1"]) for _ in range({})]))
"""
    assert run(source.format(8)).stdout == "8\n"
    assert run(source.format(30)).ended in ("error", "killed")
    assert run(source.format(8), processes=4).ended in ("error", "killed")


def test_output(run: Run) -> None:
    source = "print('x' * ({} << 10 ), end='')"
    assert len(run(source.format(60)).stdout) == 60 << 10
    cut = run(source.format(65))
    assert (cut.ended, cut.truncated, len(cut.stdout)) == ("output_limit", True, 64 << 10)
    assert run(source.format(65), output_kib=80).ended == "ok"


def test_a_result_has_a_limit_too(pool: Pool) -> None:
    job = Job(
        "call", "def f(n): return 'x' * n", inputs=(call_input("f", [1000]), call_input("f", [1 << 20])), limits=TIGHT
    )
    runs = pool.submit(job).result().runs
    assert [one.ended for one in runs] == ["ok", "output_limit"]


def test_jobs_survive_a_journey_as_json() -> None:
    partner = Job("serve", "def f(): pass", inputs=("", ""), files={"a": bytes(range(256))})
    job = Job("check", "x = 1", inputs=("a", "b"), limits=TIGHT, stop_at_failure=True, partner=partner)
    assert Job.from_json(job.to_json()) == job
    command = Job("command", argv=("ls",))
    assert Job.from_json(command.to_json()) == command


@pytest.mark.parametrize(
    "broken",
    [
        {"mode": "check"},
        {"mode": "script", "argv": ("x",)},
        {"mode": "command"},
        {"mode": "serve", "partner": Job("script")},
        {"mode": "check", "inputs": ("a", "b"), "partner": Job("serve")},
    ],
)
def test_jobs_that_make_no_sense_are_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Job(**broken)  # type: ignore[arg-type]


def test_the_interpreter_is_the_one_that_runs_this(run: Run) -> None:
    assert run("import sys; print(sys.version)").stdout.strip() == sys.version
