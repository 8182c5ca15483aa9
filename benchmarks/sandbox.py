"""The sandbox: how long a test takes in one, and how many a second there is time for.

Latency is that of a trivial job in a machine with nothing else to do: from handing it over to having its result, in a
sandbox that waited for it (`warm`), in one that is started for it (`cold`), with tests that are code and run in a
second sandbox (`check`), and, to compare with, in a fresh Python interpreter without any sandbox (`interpreter`).
Throughput is that of jobs handed over all at once. `ten_ms` is a job that computes for 10 ms.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import measure

TRIVIAL = "print(int(input()) * 2)"
TEN_MS = "import time\nend = time.perf_counter() + 0.010\nwhile time.perf_counter() < end: pass\nprint(42)"
PAUSE = 0.15
"""Seconds between jobs when latency is measured, in which a used sandbox is replaced."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "", repeats=5)
    parser.add_argument("--jobs", type=int, default=40, help="jobs of each repeat whose latency is measured")
    parser.add_argument("--burst", type=int, default=200, help="jobs of each repeat that are handed over at once")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.repeats, options.jobs, options.burst = 1, 3, 8

    from strop.config.sandbox import SandboxSettings
    from strop.sandbox.build import make_sandbox
    from strop.sandbox.pool import Pool

    def pool(warm: int) -> Pool:
        made = make_sandbox(SandboxSettings(backend="bubblewrap", workers=options.threads, warm=warm))
        assert isinstance(made, Pool)
        return made

    warm, cold = pool(options.threads), pool(0)
    try:
        sides: dict[str, Callable[[], list[float]]] = {
            "warm": lambda: latencies(lambda: run(warm, TRIVIAL), options.jobs),
            "cold": lambda: latencies(lambda: run(cold, TRIVIAL), options.jobs),
            "check": lambda: latencies(lambda: check(warm), options.jobs),
            "ten_ms": lambda: latencies(lambda: run(warm, TEN_MS), options.jobs),
            "interpreter": lambda: latencies(interpreter, options.jobs),
        }
        found = measure.interleaved(sides, options.repeats)
        latency = {name: spread([value for repeat in repeats for value in repeat]) for name, repeats in found.items()}
        numbers: dict[str, Any] = {"latency_ms": latency}
        numbers["runs_ms"] = runs(warm)
        bursts = [burst(warm, options.burst) for _ in range(options.repeats)]
        numbers["throughput"] = {
            "jobs": options.burst,
            "jobs_per_second": measure.median([one["jobs_per_second"] for one in bursts]),
            "cpu_ms_per_job": measure.median([one["cpu_ms_per_job"] for one in bursts]),
            "repeats": bursts,
        }
        numbers["sizes"] = {"workers": options.threads, "warm": options.threads, "jobs": options.jobs}
    finally:
        warm.close()
        cold.close()
    measure.write("sandbox", numbers, options)


def run(pool: Any, source: str) -> None:
    """One job of one run."""
    from strop.sandbox.protocol import Job

    [result] = pool.submit(Job("script", source, inputs=("21",))).result().runs
    if result.stdout != "42\n":
        raise RuntimeError(f"a job ended with {result}")


def check(pool: Any) -> None:
    """One test that is code, apart from the program."""
    from strop.sandbox.calls import check_input, checked
    from strop.sandbox.protocol import Job

    partner = Job("serve", "def f(x): return 2 * x")
    job = Job("check", inputs=(check_input("assert f(21) == 42"),), partner=partner)
    [result] = pool.submit(job).result().runs
    if not checked(result.value).passed:
        raise RuntimeError(f"a job ended with {result}")


def interpreter() -> None:
    """The same program without a sandbox: what a fresh interpreter costs."""
    done = subprocess.run([sys.executable, "-I", "-c", TRIVIAL], input=b"21", capture_output=True, check=True)
    if done.stdout != b"42\n":
        raise RuntimeError(done.stderr.decode())


def latencies(act: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each of `count` jobs, one after another with pauses."""
    found = []
    for _ in range(count):
        time.sleep(PAUSE)
        began = time.perf_counter()
        act()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, the value that 19 of 20 stay below, least and largest."""
    ordered = sorted(values)
    return {
        "median": measure.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "least": ordered[0],
        "largest": ordered[-1],
    }


def runs(pool: Any) -> dict[str, float]:
    """Milliseconds of each further run of one job: the tests of one program after the first."""
    from strop.sandbox.protocol import Job

    seconds = {}
    for count in (1, 21):
        began = time.perf_counter()
        pool.submit(Job("script", TRIVIAL, inputs=("21",) * count)).result()
        seconds[count] = time.perf_counter() - began
        time.sleep(PAUSE)
    return {"first": 1e3 * seconds[1], "each_further": 1e3 * (seconds[21] - seconds[1]) / 20}


def burst(pool: Any, jobs: int) -> dict[str, float]:
    """Jobs a second, and processor time of each, sandboxes included."""
    from strop.sandbox.protocol import Job

    before = _cpu()
    began = time.perf_counter()
    for future in [pool.submit(Job("script", TRIVIAL, inputs=("21",))) for _ in range(jobs)]:
        future.result()
    seconds = time.perf_counter() - began
    time.sleep(1.0)  # Used sandboxes are counted when they have ended.
    return {"jobs_per_second": jobs / seconds, "cpu_ms_per_job": 1e3 * (_cpu() - before) / jobs}


def _cpu() -> float:
    """Processor seconds of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
