"""The pool of worker processes: the invariants at the top of `rewards/pool.py`, with processes that really fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from strop.config.rewards import PythonVerifier, RewardSettings
from strop.errors import RunFailure
from strop.rewards.build import build_scorer
from strop.rewards.isolated import Isolated
from strop.rewards.pool import Check, WorkerPool
from strop.rewards.protocol import Completed, Verdict

HERE = Path(__file__).parent


@pytest.fixture
def pools() -> Iterator[Callable[..., WorkerPool]]:
    """Makes pools; none of them leaves a process behind."""
    made: list[WorkerPool] = []

    def make(workers: int = 1, memory: float = 2.0) -> WorkerPool:
        made.append(WorkerPool(workers=workers, memory=memory))
        return made[-1]

    before = set(psutil.Process().children(recursive=True))
    yield make
    for pool in made:
        pool.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def check(function: str = "obedient", timeout: float = 20.0, **arguments: Any) -> Check:
    settings = PythonVerifier(
        kind="python", function=f"unsafe_functions:{function}", isolate="process", arguments=arguments
    )
    return Check(settings, timeout)


def ask(pool: WorkerPool, of: Check, *texts: str, seconds: float = 60) -> list[Verdict]:
    """One item for each text."""
    answers = pool.submit(of, [[Completed("", text)] for text in texts]).result(seconds)
    return [verdict for (verdict,) in answers]


def gone(pid: int, within: float = 5.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def scores(verdicts: Sequence[Verdict]) -> list[float | None]:
    return [verdict.score for verdict in verdicts]


def test_items_are_answered_in_order(pools: Callable[..., WorkerPool]) -> None:
    texts = ["a" * n for n in range(50)]
    assert scores(ask(pools(2), check(), *texts)) == [float(n) for n in range(50)]
    assert pools().submit(check(), []).result(1) == []


def test_an_item_may_hold_several_completions(pools: Callable[..., WorkerPool]) -> None:
    future = pools().submit(check(), [[Completed("", "a"), Completed("", "bb")], [Completed("", "ccc")]])
    assert [scores(verdicts) for verdicts in future.result(60)] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize(
    ("order", "status", "detail"),
    [
        ("exit", "verifier_error", "exit code 3"),
        ("signal SIGSEGV", "verifier_error", "SIGSEGV"),
        ("signal SIGKILL", "verifier_error", "SIGKILL"),
        ("signal SIGALRM", "timeout", "no verdict within 1 s"),
        ("sleep 600", "timeout", "no verdict within 1 s"),
        ("compute", "timeout", "no verdict within 1 s"),
        ("raise it", "verifier_error", "ValueError: raised for it"),
        ("quit now", "verifier_error", "SystemExit: now"),
        ("fill", "verifier_error", "MemoryError"),
        ("nest 100000", "verifier_error", "RecursionError"),
        ("nan", "verifier_error", "returned nan"),
    ],
)
def test_only_the_item_that_fails_is_blamed(
    order: str, status: str, detail: str, pools: Callable[..., WorkerPool]
) -> None:
    """It stands in the middle of one batch, of which every other item gets its score."""
    before, after = ["a", "bb", "ccc"], ["dddd", "eeeee"]
    verdicts = ask(pools(), check(timeout=1.0), *before, order, *after)
    assert scores(verdicts) == [1.0, 2.0, 3.0, None, 4.0, 5.0]
    assert verdicts[3].status == status
    assert detail in verdicts[3].detail
    assert {verdict.status for index, verdict in enumerate(verdicts) if index != 3} == {"ok"}


def test_many_failures_in_one_batch(pools: Callable[..., WorkerPool]) -> None:
    texts = [{3: "exit", 7: "sleep 600", 8: "exit", 19: "signal SIGSEGV"}.get(n, "a" * n) for n in range(40)]
    verdicts = ask(pools(3), check(timeout=1.0), *texts)
    failed = {index: verdict.status for index, verdict in enumerate(verdicts) if verdict.status != "ok"}
    assert failed == {3: "verifier_error", 7: "timeout", 8: "verifier_error", 19: "verifier_error"}
    assert all(verdict.score == n for n, verdict in enumerate(verdicts) if n not in failed)


def test_waiting_for_a_worker_is_no_time_out(pools: Callable[..., WorkerPool]) -> None:
    """Eight items of 0.4 s for one worker: the last waits for longer than its time-out of 1 s."""
    started = time.monotonic()
    assert scores(ask(pools(), check(timeout=1.0), *["sleep 0.4"] * 8)) == [9.0] * 8
    assert time.monotonic() - started > 3.0


def test_a_killed_worker_takes_its_processes_with_it(tmp_path: Path, pools: Callable[..., WorkerPool]) -> None:
    assert ask(pools(), check(timeout=1.0, folder=str(tmp_path)), "family")[0].status == "timeout"
    assert gone(int((tmp_path / "child").read_text()))


def test_so_does_one_that_died(tmp_path: Path, pools: Callable[..., WorkerPool]) -> None:
    """The process that it leaves behind holds the socket open, so that no end of it is seen there."""
    started = time.monotonic()
    [verdict] = ask(pools(), check(timeout=30.0, folder=str(tmp_path)), "leave")
    assert verdict.status == "verifier_error"
    assert "exit code 3" in verdict.detail
    assert time.monotonic() - started < 20
    assert gone(int((tmp_path / "child").read_text()))


def test_each_worker_is_used_again(pools: Callable[..., WorkerPool]) -> None:
    pool, of = pools(), check("pid")
    found = {score for _ in range(5) for score in scores(ask(pool, of, "a", "b"))}
    assert found == {float(pid) for pid in pool.pids()}


def test_a_worker_is_replaced_after_so_many_items(
    pools: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.rewards.pool.OF_A_WORKER", 4)
    pool, of = pools(), check("pid")
    found = [ask(pool, of, "a", "b")[0].score for _ in range(6)]
    assert len(set(found)) == 3
    assert len(pool.pids()) == 1


def test_a_worker_that_died_in_between_is_replaced(pools: Callable[..., WorkerPool]) -> None:
    pool = pools()
    assert scores(ask(pool, check(), "a")) == [1.0]
    [pid] = pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert scores(ask(pool, check(), "bb")) == [2.0]


def test_a_worker_imports_little(pools: Callable[..., WorkerPool]) -> None:
    pool = pools()
    assert scores(ask(pool, check("path"), "a")) == [0.0]
    [pid] = pool.pids()
    assert psutil.Process(pid).memory_info().rss < 100 << 20


def test_what_a_check_prints_does_not_come_between(pools: Callable[..., WorkerPool]) -> None:
    assert scores(ask(pools(), check(), "print", "a")) == [5.0, 1.0]


def test_no_more_workers_than_allowed_and_none_without_work(pools: Callable[..., WorkerPool]) -> None:
    pool = pools(2)
    assert pool.pids() == []
    ask(pool, check(), "a")
    assert len(pool.pids()) == 1
    ask(pool, check(), *["sleep 0.05"] * 30)
    assert len(pool.pids()) == 2


def test_checks_of_different_settings_share_workers(pools: Callable[..., WorkerPool]) -> None:
    pool = pools()
    futures = [pool.submit(check(), [[Completed("", "a" * n)]]) for n in range(5)]
    assert [future.result(60)[0][0].score for future in futures] == [float(n) for n in range(5)]
    assert len(pool.pids()) == 1


def test_a_failure_of_the_run_comes_back_as_one(pools: Callable[..., WorkerPool]) -> None:
    with pytest.raises(RunFailure, match="2 numbers for 1 completions"):
        ask(pools(), check("one_short"), "a")


def test_a_check_that_cannot_be_built_says_why(pools: Callable[..., WorkerPool]) -> None:
    with pytest.raises(RunFailure, match="has no function 'missing'"):
        ask(pools(), check("missing"), "a")


def test_a_row_that_cannot_travel_is_refused(pools: Callable[..., WorkerPool]) -> None:
    with pytest.raises(RunFailure, match="isolate: thread"):
        pools().submit(check(), [[Completed("", "a", row={"lock": threading.Lock()})]])


def test_what_is_cancelled_before_its_turn_is_not_done(tmp_path: Path, pools: Callable[..., WorkerPool]) -> None:
    pool, of = pools(), check(folder=str(tmp_path))
    first = pool.submit(of, [[Completed("", "sleep 0.5")]])
    while not pool.pids():
        time.sleep(0.01)
    second = pool.submit(of, [[Completed("", "count done")]])
    assert second.cancel()
    assert scores(ask(pool, of, "a")) == [1.0]
    assert first.result(1)[0][0].score == 9.0
    assert not (tmp_path / "done").exists()


def test_close_ends_what_is_running_and_waiting(pools: Callable[..., WorkerPool]) -> None:
    pool = pools()
    future = pool.submit(check(timeout=600), [[Completed("", "sleep 600")] for _ in range(40)])
    while not pool.pids():
        time.sleep(0.01)
    time.sleep(0.2)
    pids = pool.pids()
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert {verdict.status for (verdict,) in future.result(1)} == {"verifier_error"}
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(check(), [[Completed("", "a")]])


def test_verdicts_do_not_wait_for_a_busy_event_loop(pools: Callable[..., WorkerPool]) -> None:
    """Time-outs hold, and verdicts arrive, while the loop trains, say."""

    async def work() -> list[Verdict]:
        settings = check(timeout=1.0).settings
        judge = Isolated(settings.model_copy(update={"call_with": "completion"}), pools(2), timeout=1.0)
        await judge.ask([Completed("", "warm"), Completed("", "up")])
        question = asyncio.create_task(judge.ask([Completed("", "a"), Completed("", "sleep 600")]))
        await asyncio.sleep(0.1)
        time.sleep(3)
        started = time.monotonic()
        verdicts = await question
        assert time.monotonic() - started < 0.5
        return verdicts

    assert [verdict.status for verdict in asyncio.run(work())] == ["ok", "timeout"]


PROGRAM = """
import os, sys, time
from strop.config.rewards import PythonVerifier
from strop.rewards.pool import Check, WorkerPool
from strop.rewards.protocol import Completed

settings = PythonVerifier(kind="python", function="unsafe_functions:obedient", isolate="process")
pool = WorkerPool(workers=2)
pool.submit(Check(settings, 600.0), [[Completed("", "ab")]]).result(60)
pool.submit(Check(settings, 600.0), [[Completed("", order)] for order in sys.argv[1:]])
while len(pool.pids()) < 2:
    time.sleep(0.01)
time.sleep(0.5)
print(*pool.pids(), flush=True)
"""


@pytest.mark.parametrize("end", ["kill", "terminate", "exit", "exception"])
def test_no_worker_outlives_the_process(end: str, tmp_path: Path) -> None:
    """One worker computes in C and one is idle, or about to be, when this process ends in one way or another."""
    source = Path(sys.modules["strop.rewards.pool"].__file__ or "").parents[2]
    endings = {"exit": "", "exception": "raise RuntimeError", "kill": "time.sleep(600)", "terminate": "time.sleep(600)"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + endings[end])
    running = subprocess.Popen(
        [sys.executable, str(program), "compute", "sleep 0.1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(HERE), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert running.stdout is not None
    pids = [int(word) for word in running.stdout.readline().split()]
    assert len(pids) == 2
    if end == "kill":
        running.kill()
    if end == "terminate":
        running.terminate()
    running.wait(30)
    assert all(gone(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the alarm is the second defence on Linux, which this takes away")
def test_a_worker_that_nobody_kills_ends_itself(tmp_path: Path) -> None:
    """Where the kernel does not tell it of the run's end, as on macOS, an alarm ends even a computation in C."""
    program = tmp_path / "orphan.py"
    program.write_text(
        textwrap.dedent("""
            import json, os, pickle, signal, socket, subprocess, sys
            import strop.rewards.worker as worker
            from strop.config.rewards import PythonVerifier
            from strop.rewards.frames import Frames
            from strop.rewards.protocol import Completed

            here, there = socket.socketpair()
            if os.fork() == 0:
                here.close()
                worker._end_with = lambda run: None
                worker.GRACE = 0.2
                worker.main(there.fileno(), 0, 2.0)
            frames = Frames(here)
            print(json.loads(frames.receive())["ready"], flush=True)
            settings = PythonVerifier(kind="python", function="unsafe_functions:obedient", isolate="process")
            items = (pickle.dumps([Completed("", "compute")]),)
            frames.send(pickle.dumps((1, settings, 0.5, items)))
            frames.receive()
            os._exit(0)
        """)
    )
    source = Path(sys.modules["strop.rewards.pool"].__file__ or "").parents[2]
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert gone(int(done.stdout), within=10)


async def test_a_python_function_in_processes(tmp_path: Path) -> None:
    """`call_with` decides who suffers when one completion crashes the function."""

    def settings(call_with: str) -> RewardSettings:
        verifier = {"kind": "python", "function": "unsafe_functions:obedient", "isolate": "process"}
        return RewardSettings.model_validate({"verifiers": [{**verifier, "call_with": call_with}], "workers": 2})

    group = [Completed("", text) for text in ("a", "exit", "ccc")]
    together, alone = build_scorer(settings("group")), build_scorer(settings("completion"))
    try:
        assert [reward.status for reward in await together.score(group)] == ["verifier_error"] * 3
        assert [reward.status for reward in await alone.score(group)] == ["ok", "verifier_error", "ok"]
        assert [reward.total for reward in await together.score(group[::2])] == [1.0, 3.0]
    finally:
        await together.close()
        await alone.close()


async def test_what_failed_is_asked_again_so_many_times(tmp_path: Path) -> None:
    verifier = {
        "kind": "python",
        "function": "unsafe_functions:obedient",
        "isolate": "process",
        "call_with": "completion",
        "arguments": {"folder": str(tmp_path)},
    }
    judge = build_scorer(RewardSettings.model_validate({"verifiers": [verifier], "retries": 2, "workers": 1}))
    try:
        rewards = await judge.score([Completed("", "count well"), Completed("", "die tries")])
        assert [reward.status for reward in rewards] == ["ok", "verifier_error"]
        assert (tmp_path / "well").read_text() == "x"
        assert (tmp_path / "tries").read_text() == "xxx"
    finally:
        await judge.close()
