"""Reward functions of the tests that do in a worker process what a completion tells them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def obedient(completions: list[str], folder: str = "", **_: Any) -> list[float]:
    """The length of each completion, unless it is an order."""
    return [_obey(completion, folder) for completion in completions]


def pid(completions: list[str], **_: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def path(completions: list[str], **_: Any) -> list[float]:
    """Whether anything heavy was imported by the worker itself."""
    return [float(any(name in sys.modules for name in ("torch", "transformers", "sympy")))] * len(completions)


def one_short(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) + 1)


def _obey(completion: str, folder: str) -> float:
    order, _, rest = completion.partition(" ")
    if order == "exit":
        os._exit(3)
    if order == "signal":
        os.kill(os.getpid(), getattr(signal, rest))
    if order == "raise":
        raise ValueError(f"raised for {rest}")
    if order == "quit":
        sys.exit(rest)
    if order == "sleep":
        time.sleep(float(rest))
    if order == "compute":  # in C, where no signal handler of Python's gets a turn
        return float(10 ** (10**10))
    if order == "fill":
        return float(len(bytearray(8 << 30)))
    if order == "nest":
        return float(_depth(int(rest)))
    if order == "print":
        print("x" * 1_000_000, flush=True)
    if order == "family":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "child").write_text(str(child.pid))
        time.sleep(600)
    if order == "leave":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "child").write_text(str(child.pid))
        os._exit(3)
    if order == "nan":
        return float("nan")
    if order in ("count", "die"):
        with Path(folder, rest).open("a") as file:
            file.write("x")
        if order == "die":
            os._exit(3)
    return float(len(completion))


def _depth(left: int) -> int:
    return 0 if left == 0 else 1 + _depth(left - 1)
