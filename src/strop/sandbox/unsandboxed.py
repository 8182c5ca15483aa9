"""No sandbox: programs run as the user who started strop. For machines where nothing can isolate them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from strop.sandbox.interpreter import INSIDE, Interpreter, environment, runner_arguments
from strop.sandbox.started import Command


class Unsandboxed:
    """Makes the commands that start runners without isolation.

    What remains are the limits that one process has (processor time, memory, size of a file), the time limits, an empty
    folder and an empty environment. A program can read and delete what the user can, use the network, and leave
    processes behind if it tries.
    """

    def __init__(self, interpreter: Interpreter, *, packages: bool) -> None:
        self.interpreter = interpreter
        self.packages = packages

    def command(self) -> Command:
        """How to start the next runner, in a folder of its own."""
        folder = Path(tempfile.mkdtemp(prefix="strop-unsandboxed-"))
        setup = {
            "contained": False,
            "user": None,
            "folder": str(folder),
            "scratch": [str(folder)],
            "packages": self.interpreter.packages if self.packages else (),
            "limit_processes": False,  # It would count all of the user's processes.
        }
        return Command(runner_arguments(self.interpreter, str(INSIDE)), setup, environment(str(folder)), folder=folder)
