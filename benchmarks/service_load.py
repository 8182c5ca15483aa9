"""How much slower a run trains while 50 clients read from the service that started it.

One run of the quickstart, one service, one process of clients. Clients are there and gone in turn, some seconds each,
while the run goes on; the steps that lie wholly within such a time are counted from the times in `metrics.jsonl`. Each
client keeps an event stream open and asks every two seconds for the run, its newest metrics and the list of jobs. The
clients share the processor with the run and the service, which they would not do elsewhere; they are at the lowest
priority, and their processor time is told beside that of the service.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

EVERY = 2.0
"""Seconds between a client's questions."""
SETTLE = 1.0
"""Seconds at the beginning of each time that are not counted: clients come and go."""


async def client(port: int, token: str, job: str, run: str, number: int, counts: dict[str, int]) -> None:
    """One reader, until it is cancelled: a stream, and questions over one connection that stays open."""

    def head(path: str, connection: str) -> bytes:
        lines = (
            f"GET {path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {token}",
            f"Connection: {connection}",
        )
        return "\r\n".join([*lines, "", ""]).encode()

    async def follow() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(f"/api/v1/jobs/{job}/events", "close"))
        try:
            while data := await reader.read(65536):
                counts["events"] += data.count(b"event: ")
        finally:
            writer.close()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        after = ""
        try:
            await asyncio.sleep(EVERY * number / 50)
            while True:
                for path in (f"/runs/{run}", f"/runs/{run}/metrics?after={after}", "/jobs"):
                    writer.write(head(f"/api/v1{path}", "keep-alive"))
                    status, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
                    body = await reader.readexactly(length)
                    counts["answers" if b" 200 " in status else "refused"] += 1
                    if "metrics" in path:
                        after = json.loads(body)["next"]
                await asyncio.sleep(EVERY)
        finally:
            writer.close()

    await asyncio.gather(follow(), ask())


async def clients(port: int, token: str, job: str, run: str, number: int) -> None:
    """What the process of the clients does: `on` and `off` come in, counts go out."""
    os.nice(19)
    counts = {"events": 0, "answers": 0, "refused": 0}
    there: list[asyncio.Task[None]] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "on":
            there = [asyncio.create_task(client(port, token, job, run, n, counts)) for n in range(number)]
        else:
            failed = [task for task in there if task.done()]
            for task in there:
                task.cancel()
            await asyncio.gather(*there, return_exceptions=True)
            print(json.dumps({**counts, "failed": len(failed)}), flush=True)
    await asyncio.sleep(0)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=13)
    parser.add_argument("--clients", type=int, default=50, help="clients that read")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long clients are there, and gone, each time")
    parser.add_argument("--as-clients", nargs=4, metavar=("PORT", "TOKEN", "JOB", "RUN"), help="for this script itself")
    options = parser.parse_args(argv)
    if options.as_clients:
        port, token, job, run = options.as_clients
        asyncio.run(clients(int(port), token, job, run, options.clients))
        return {}
    if options.smoke:
        options.repeats, options.clients, options.seconds = 1, 5, 3.0
    with tempfile.TemporaryDirectory(dir=Path.cwd(), ignore_cleanup_errors=True) as name:
        numbers = measured(Path(name) / "runs", options)
    measure.write("service_load", numbers, options)
    return numbers


def measured(root: Path, options: Any) -> dict[str, Any]:
    """Rates of one run with clients and without, in turn."""
    import psutil

    from strop.serve.api.access import Role, Tokens
    from strop.serve.api.settings import made_state
    from strop.serve.client import Client

    tokens = Tokens(made_state(root))
    token = tokens.add("reader", Role.operator)
    tokens.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    environment["PYTHONPATH"] = os.pathsep.join([str(measure.ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "strop", "serve", "--root", str(root), "--port", str(port)]
    server = subprocess.Popen(command, env=environment)
    reader = Client(f"http://127.0.0.1:{port}", token)
    job: dict[str, Any] = {}
    readers: subprocess.Popen[str] | None = None
    try:
        job = _begun(reader, options)
        mine = [sys.executable, __file__, f"--clients={options.clients}", "--as-clients"]
        mine += [str(port), token, job["id"], job["run"]]
        readers = subprocess.Popen(mine, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        spent = {"service": psutil.Process(server.pid), "clients": psutil.Process(readers.pid)}
        times, seconds, said = _in_turn(readers, spent, options)
    finally:
        if job:
            reader.stop(job["id"])
            reader.wait(job["id"])
        for process in (readers, server):
            if process is not None:
                process.terminate()
                process.wait()
    lines = [json.loads(line) for line in (root / job["run"] / "metrics.jsonl").read_text().splitlines()]
    steps = [line["time"] for line in lines if line["kind"] == "train"]
    rates = {side: [_rate(steps, *span) for span in spans] for side, spans in times.items()}
    slower = [1 - on / off for off, on in zip(rates["alone"], rates["read"], strict=True)]
    return {
        "clients": options.clients,
        "answers": said["answers"],
        "events": said["events"],
        "refused": said["refused"],
        "failed": said["failed"],
        "answers_per_second": said["answers"] / (options.repeats * options.seconds),
        "processor_share": {side: one / (options.repeats * options.seconds) for side, one in seconds.items()},
        "steps_per_second": rates,
        "slower": slower,
        "slower_median": measure.median(slower),
        "slower_of_means": 1 - sum(rates["read"]) / sum(rates["alone"]),
    }


def _begun(reader: Any, options: Any) -> dict[str, Any]:
    """The job of a run that trains; its warm-up is over."""
    from strop.serve.client import ServiceError

    overrides = [
        *("run.steps=1000000", "evaluation.every=0", "checkpoint.every=1000000", "warmup.steps=5"),
        *(f"hardware.threads={options.threads}", "data.eval.arguments.count=20"),
    ]
    if options.smoke:
        overrides += ["model.create.hidden_size=32", "rollout.groups_per_step=4", "warmup.data.arguments.count=200"]
    give_up = time.monotonic() + 120
    while True:
        try:
            job: dict[str, Any] = reader.submit(measure.ROOT / "recipes" / "quickstart.yaml", *overrides, name="load")
            break
        except ServiceError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.5)
    while time.monotonic() < give_up:
        time.sleep(1.0)
        try:
            if reader.run("load")["step"] >= 5:
                return job
        except ServiceError:
            continue
    raise RuntimeError(f"the run does not train:\n{reader.log(job['id'])[-2000:]}")


def _in_turn(readers: Any, spent: Any, options: Any) -> tuple[dict[str, list[tuple[float, float]]], Any, Any]:
    """When clients were gone and there; processor seconds while they were there; what they counted."""
    times: dict[str, list[tuple[float, float]]] = {"alone": [], "read": []}
    seconds, said = dict.fromkeys(spent, 0.0), {}
    for repeat in range(options.repeats):
        # Alone and read, then read and alone: a drift of the machine meets both alike.
        for side in ("alone", "read") if repeat % 2 == 0 else ("read", "alone"):
            before = {name: sum(process.cpu_times()[:2]) for name, process in spent.items()}
            if side == "read":
                readers.stdin.write("on\n")
                readers.stdin.flush()
            began = time.time()
            time.sleep(options.seconds)
            times[side].append((began + SETTLE, time.time()))
            if side == "read":
                for name, process in spent.items():
                    seconds[name] += sum(process.cpu_times()[:2]) - before[name]
                readers.stdin.write("off\n")
                readers.stdin.flush()
                said = json.loads(readers.stdout.readline())
            print(f"{side}: {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
    return times, seconds, said


def _rate(steps: Sequence[float], begin: float, end: float) -> float:
    """Steps a second, of those that lie within a time."""
    within = [step for step in steps if begin <= step <= end]
    return (len(within) - 1) / (within[-1] - within[0])


if __name__ == "__main__":
    main()
