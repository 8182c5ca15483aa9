"""The process of one rank or engine: hosts one object and passes calls on to it.

The class is plain and is wrapped with `ray.remote` where it is started (`handle.py`). It imports no torch at the top:
an actor class whose methods use a module's global torch cannot be pickled.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from strop.cluster.data_plane import Packed, pack, unpack
from strop.cluster.worker_logs import Notices, redirect
from strop.errors import RunFailure, StropError


@dataclass(frozen=True)
class Answer:
    """What a call came to: `value`, or what was raised.

    error: the exception of strop itself, pickled; None for others. text: in one line. trace: the traceback here.
    at: seconds since the epoch when it was raised.
    """

    value: Packed | None = None
    raised: bool = False
    error: bytes | None = None
    text: str = ""
    trace: str = ""
    at: float = 0.0


class Worker:
    """Hosts one object.

    Args:
        role, rank, run: what this process is, for names and messages. logs: folder of the logs; None leaves standard
            output as it is. driver: (id of the node, process id) of the driver, which is not to be outlived.
    """

    def __init__(self, role: str, rank: int, run: str, logs: str | None, driver: tuple[str, int]) -> None:
        self._role, self._rank, self._run = role, rank, run
        self._started = self._beat = time.time()
        self._notices = Notices(f"{role} {rank}")
        self._log = redirect(role, rank, logs, self._notices)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="calls")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._probe: Any = None
        self._object: Any = None
        _leave_with(driver)

    # Asked in the concurrency group "health", whose event loop has a thread of its own.

    async def ping(self) -> list[str]:
        """A sign of life; returns the warnings and errors since the last one."""
        self._beat = time.time()
        return self._notices.take()

    async def describe(self) -> dict[str, Any]:
        """What this process is, and when it was last asked for a sign of life."""
        import ray

        about = ray.get_runtime_context()
        return {
            "role": self._role,
            "rank": self._rank,
            "run": self._run,
            "node": about.get_node_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "log": self._log,
            "started": self._started,
            "beat": self._beat,
        }

    async def load(self, probe: str, processes: list[int]) -> Any:
        """What this machine is doing, by `take(processes)` of the probe that "module:class" names, made at the first
        call, which returns None: it has nothing to compare with. In a thread, for it may take long."""

        def look() -> Any:
            if self._probe is None:
                self._probe = load(probe)()
                return None
            return self._probe.take(processes)

        return await asyncio.get_running_loop().run_in_executor(self._beside, look)

    # Everything else runs in the default group.

    async def address(self) -> tuple[str, int]:
        """This node's address, and a port that is free on it."""
        import ray

        here: Any = ray.util
        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(here.get_node_ip_address()), int(probe.getsockname()[1])

    async def environment(
        self, rank: int, world: int, address: str, port: int, threads: int | None, device: str
    ) -> None:
        """Say where this process stands among its peers, as torch.distributed reads it.

        Args:
            threads: of torch; None leaves them as they are. device: "cuda" or "cpu". Ray shows each process its own
            GPU only, so the local rank is always 0.
        """
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

        def prepare() -> None:
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = str(threads)
            if device == "cuda" or threads is not None:
                import torch

                # Both are kept for each thread, so this runs in the two that compute.
                if threads is not None:
                    torch.set_num_threads(threads)
                if device == "cuda":
                    torch.cuda.set_device(0)

        await asyncio.get_running_loop().run_in_executor(self._thread, prepare)
        prepare()

    async def make(self, packed: Packed) -> Answer:
        """Build the hosted object: ("module:function", keyword arguments), in the thread that runs its methods."""

        async def build() -> None:
            factory, arguments = unpack(packed)
            self._object = None
            function = await self._in_thread(lambda: load(factory))
            made = await self._in_thread(lambda: function(**arguments))
            self._object = await made if asyncio.iscoroutine(made) else made

        return await self._answer(build, wanted=False)

    async def call(self, method: str, packed: Packed, wanted: bool) -> Answer:
        """Call a method of the object; with dots in the name, one of what it holds.

        Plain methods run one after the other in one thread, the same for all; coroutines run on the event loop.

        Args:
            packed: (arguments, keyword arguments). wanted: send the result back.
        """

        async def run() -> Any:
            if self._object is None:
                raise RunFailure(f"{self._role} {self._rank} was asked for {method}, and holds nothing yet")
            function = self._object
            for name in method.split("."):
                function = getattr(function, name)
            arguments, named = unpack(packed)
            if asyncio.iscoroutinefunction(function):
                return await function(*arguments, **named)
            found = await self._in_thread(lambda: function(*arguments, **named))
            return await found if asyncio.iscoroutine(found) else found

        return await self._answer(run, wanted=wanted)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _answer(self, run: Callable[[], Any], *, wanted: bool) -> Answer:
        try:
            found = await run()
            return Answer(pack(found) if wanted else None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a sys.exit of the hosted object is no reason to vanish without a word
            return _failure(error)


def load(factory: str) -> Any:
    """The function that "module:function" names.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


def _failure(error: BaseException) -> Answer:
    trace = "".join(traceback.format_exception(error))
    print(trace, file=sys.stderr, end="", flush=True)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    own = None
    if isinstance(error, StropError):
        try:
            own = pickle.dumps(error)
            pickle.loads(own)
        except Exception:
            own = None
    return Answer(raised=True, error=own, text=text, trace=trace, at=time.time())


def _leave_with(driver: tuple[str, int]) -> None:
    """End this process when the driver's has ended.

    Ray ends the actors of a lost driver too, but a process deep in a collective or a kernel may not hear of it. Only
    for a driver on the same node: of others this process can see nothing.
    """
    import threading

    import psutil
    import ray

    node, pid = driver
    if ray.get_runtime_context().get_node_id() != node:
        return
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        # `is_running` tells a process from a later one of the same number.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="driver", daemon=True).start()
