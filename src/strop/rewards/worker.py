"""A worker process: it checks completions that the run sends it, one after the other, and may be killed at any time.

`rewards/pool.py` starts it and speaks with it. To the worker go pickles, of settings and completions; back come JSON
texts only, because whoever has broken a worker must not be able to make the run execute anything. A worker imports
little, so that it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from typing import Any

from strop.errors import StropError
from strop.rewards.checks import build_check
from strop.rewards.failures import describe_exception
from strop.rewards.frames import Closed, Frames
from strop.rewards.protocol import Verdict, Verifier

RECURSION = 2000
"""Depth of calls in a check: nested brackets end in a RecursionError, long before the stack of C does."""
GRACE = 2.0
"""Seconds after an item's time-out at which a worker ends itself, should the run be gone and unable to end it."""
TOO_LARGE = "it needs more memory than rewards.worker_memory allows"
Reply = dict[str, Any]


def main(descriptor: int, run: int, memory: float) -> None:
    """Serve until the other end of the socket is closed.

    Args:
        descriptor: of the socket. run: process id of the run, with which this process ends. memory: GiB of address
            space.
    """
    _end_with(run)
    _limit(memory)
    # Whatever a check prints must reach neither the socket nor what the run writes.
    os.dup2(2, 1)
    frames = Frames(socket.socket(fileno=descriptor))
    checks: dict[int, Verifier] = {}
    with contextlib.suppress(Closed):
        _tell(frames, {"ready": os.getpid()})
        while True:
            key, settings, timeout, payloads = pickle.loads(frames.receive())
            if settings is not None:
                _tell(frames, _build(checks, key, settings, timeout))
            for payload in payloads:
                # The default action of the signal ends the process even while it computes outside of Python.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
                reply = _check(checks[key], payload)
                signal.setitimer(signal.ITIMER_REAL, 0)
                _tell(frames, reply)
    # Not `sys.exit`: threads that a check left behind would keep the process alive.
    os._exit(0)


def verdicts_of(reply: Reply, count: int) -> list[Verdict]:
    """The verdicts of a reply to `count` completions.

    Raises:
        ValueError: it is no such reply; a broken worker may write anything.
    """
    if "error" in reply:
        return [Verdict(None, "verifier_error", str(reply["error"]))] * count
    try:
        verdicts = [
            Verdict(None if score is None else float(score), _status(status), str(detail), dict(components))
            for score, status, detail, components in reply["verdicts"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError from error
    if len(verdicts) != count:
        raise ValueError
    return verdicts


def _status(found: Any) -> Any:
    if found not in ("ok", "verifier_error", "timeout"):
        raise ValueError
    return found


def _tell(frames: Frames, reply: Reply) -> None:
    frames.send(json.dumps(reply).encode())


def _build(checks: dict[int, Verifier], key: int, settings: Any, timeout: float) -> Reply:
    try:
        checks[key] = build_check(settings, timeout=timeout)
    except StropError as error:
        return _failure(error)
    except MemoryError:
        return {"error": TOO_LARGE}
    except BaseException as error:
        return {"error": describe_exception(error)}
    return {"built": key}


def _check(check: Verifier, payload: bytes) -> Reply:
    """The verdicts on the completions of one payload, or what went wrong with all of them."""
    try:
        verdicts = check.verify(pickle.loads(payload))
        return {"verdicts": [(v.score, v.status, v.detail, dict(v.components)) for v in verdicts]}
    except StropError as error:
        return _failure(error)
    except MemoryError:
        return {"error": TOO_LARGE}
    except BaseException as error:  # A `sys.exit()` in a check too.
        return {"error": describe_exception(error)}


def _failure(error: StropError) -> Reply:
    return {"failure": {"what": error.what, "where": error.where, "mend": error.mend}}


def _end_with(run: int) -> None:
    """Die when the run does, however it does. Where the kernel cannot see to it, the socket's end and alarms do."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != run:
        os._exit(0)


def _limit(memory: float) -> None:
    import resource

    sys.setrecursionlimit(RECURSION)
    for limit, value in ((resource.RLIMIT_AS, int(memory * 2**30)), (resource.RLIMIT_CORE, 0)):
        # macOS knows the first limit and refuses to set it.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (value, value))
