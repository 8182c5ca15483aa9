"""From `sandbox:` in a recipe to a sandbox that works, or the reason why none does."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import Self

from strop.config.sandbox import SandboxSettings
from strop.errors import UserError
from strop.sandbox.bubblewrap import Bubblewrap, why_not
from strop.sandbox.interpreter import find_interpreter
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, Sandbox, SandboxError
from strop.sandbox.unsandboxed import Unsandboxed

ALLOW = "sandbox.allow_unsandboxed: true runs programs of the model as you, with your files and your network"


class SharedSandbox:
    """The sandbox that the verifiers and tools of one run share: started when the first of them asks for it.

    Whoever makes this closes it; it is a context manager.
    """

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._made: Sandbox | None = None

    def get(self) -> Sandbox:
        """The sandbox; it has run something before it is returned for the first time.

        Raises:
            UserError: as `make_sandbox`.
        """
        if self._made is None:
            self._made = make_sandbox(self.settings)
        return self._made

    def close(self) -> None:
        """Stop what was started; may be called more than once."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_sandbox(settings: SandboxSettings) -> Sandbox:
    """The sandbox of a run; it has run something before it is returned.

    Raises:
        UserError: there is no isolation here and running without is not allowed, or the service does not answer.
    """
    workers = _cores() if settings.workers == "auto" else settings.workers
    backend = settings.backend
    if backend == "auto":
        backend = "remote" if settings.url is not None else "bubblewrap"
    if backend == "remote":
        if settings.url is None:
            raise UserError("`sandbox.backend` is remote, and no address is given", where="sandbox.url", mend="set it")
        from strop.sandbox.remote import Remote

        remote = Remote(settings.url, token_variable=settings.token_variable, workers=workers)
        remote.start()
        return remote
    if backend == "bubblewrap":
        try:
            return _bubblewrap(settings, workers)
        except UserError:
            if settings.backend != "auto" or not settings.allow_unsandboxed:
                raise
    if not settings.allow_unsandboxed:
        raise UserError(
            "`sandbox.backend: none` does not isolate programs that the model wrote",
            where="sandbox.backend",
            mend=ALLOW,
        )
    return _unsandboxed(settings, workers)


def _bubblewrap(settings: SandboxSettings, workers: int) -> Pool:
    if sys.platform != "linux":
        raise UserError(
            "bubblewrap isolates on Linux only",
            where="sandbox.backend",
            mend=f"use a sandbox service on a Linux machine (sandbox.url); {ALLOW}",
        )
    maker = Bubblewrap(find_interpreter(settings.python), settings.limits, packages=settings.packages)
    warm = workers if settings.warm == "auto" else settings.warm
    for maker.proc in (True, False):
        # A container may forbid a new /proc, where it hides parts of its own; programs hardly need one.
        pool = Pool("bubblewrap", maker.command, workers=workers, warm=warm)
        try:
            _try_out(pool)
            return pool
        except SandboxError as error:
            pool.close()
            failure = error
            if "proc" not in str(error):
                break
    why, mend = why_not(str(failure))
    raise UserError(
        f"bubblewrap cannot isolate here: {why}",
        where=f"sandbox.backend ({shutil.which('bwrap')})",
        mend=f"{mend}; {ALLOW}",
    )


def _unsandboxed(settings: SandboxSettings, workers: int) -> Pool:
    warnings.warn(
        "programs that the model writes run without a sandbox: they can read, change and send whatever you can",
        stacklevel=3,
    )
    maker = Unsandboxed(find_interpreter(settings.python), packages=settings.packages)
    pool = Pool("none", maker.command, workers=workers, warm=workers if settings.warm == "auto" else settings.warm)
    try:
        _try_out(pool)
    except SandboxError as error:
        pool.close()
        raise UserError(f"programs cannot be run: {error}", where="sandbox.python") from None
    return pool


def _try_out(pool: Pool) -> None:
    """Run something that a sandbox must be able to run.

    Raises:
        SandboxError: it cannot.
    """
    pool.start()
    [run] = pool.submit(Job("script", source="print(sum(range(10)))")).result().runs
    if run.stdout != "45\n":
        raise SandboxError(f"a trial program ended with {run.ended} and printed {run.stdout + run.stderr!r}")


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
