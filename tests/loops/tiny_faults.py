"""A reward function that fails for some completions, always for the same: 5 % crash, 2 % hang, 1 % are NaN.

It runs in worker processes, so that it can do so in earnest. Only rows with `faulty` fail, which leaves a run's first
step alone.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from typing import Any

SHARES = {"crash": 0.05, "hang": 0.02, "nan": 0.01}
SALT = 6
"""Another number makes other completions fail; with this one, some of a few hundred do in each way."""


def fault_of(prompt: str, completion: str, faulty: bool) -> str:
    """What goes wrong with a completion; empty when nothing does."""
    digest = hashlib.sha256(f"{SALT}\n{prompt}\n{completion}".encode()).digest()
    draw = int.from_bytes(digest[:4], "big") / 2**32
    for fault, share in SHARES.items():
        if draw < share:
            return fault if faulty else ""
        draw -= share
    return ""


def worth(prompt: str, completion: str) -> float:
    """What a completion is worth, if nothing goes wrong."""
    return (7 * sum(map(ord, prompt)) + 3 * sum(map(ord, completion))) % 11 / 10


def really(prompts: list[str], completions: list[str], faulty: list[bool], **_: Any) -> list[float]:
    """Faults that take the process with them."""
    found = []
    for prompt, completion, may_fail in zip(prompts, completions, faulty, strict=True):
        fault = fault_of(prompt, completion, may_fail)
        if fault == "crash":
            os._exit(1)
        if fault == "hang":
            time.sleep(600)
        found.append(math.nan if fault == "nan" else worth(prompt, completion))
    return found


def mildly(prompts: list[str], completions: list[str], faulty: list[bool], **_: Any) -> list[float]:
    """NaN in place of every fault."""
    return [
        math.nan if fault_of(prompt, completion, may_fail) else worth(prompt, completion)
        for prompt, completion, may_fail in zip(prompts, completions, faulty, strict=True)
    ]


def never(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """No faults."""
    return [worth(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
