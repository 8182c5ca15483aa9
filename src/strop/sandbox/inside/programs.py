"""What the process of one run does: it is forked from the runner, and from here on it is the program's.

Each function here takes the place of a fresh interpreter: it runs the program to its end and ends the process.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

import plain

MODULE = "solution"
"""The name under which a program is a module, where it is called and not run."""


def run_script(source: str, path: str) -> NoReturn:
    """Run a program as `python main.py` does."""
    module = _new_module("__main__", path)
    sys.argv = [path]
    to_the_end(lambda: exec(compile(source, path, "exec", dont_inherit=True), module.__dict__), path)


def run_command(argv: list[str]) -> NoReturn:
    """Become another program."""
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def call_function(source: str, path: str, request: str, result: int) -> NoReturn:
    """Load a program, call one of its functions, and write what it returns to the file descriptor `result`."""

    def call() -> None:
        module = load(source, path)
        asked = json.loads(request)
        function = find_function(module, asked["entry"])
        arguments = plain.loads(asked["arguments"])
        keywords = plain.loads(asked["keywords"])
        returned = function(*arguments, **keywords)
        write_all(result, plain.dumps(returned).encode())

    to_the_end(call, path)


def load(source: str, path: str) -> types.ModuleType:
    """A program as a module: what stands below `if __name__ == "__main__":` is not run."""
    module = _new_module(MODULE, path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def find_function(module: types.ModuleType, entry: str) -> Callable[..., Any]:
    """A function by its name; `Class.method` is called on `Class()`, as is a method of a class `Solution`."""
    owner, _, name = entry.rpartition(".")
    if not owner and not hasattr(module, name) and hasattr(getattr(module, "Solution", None), name):
        owner = "Solution"
    found: Any = module
    for part in owner.split(".") if owner else []:
        found = getattr(found, part)
    if isinstance(found, type):
        found = found()
    function: Callable[..., Any] = getattr(found, name)
    return function


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _new_module(name: str, path: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    return module


def to_the_end(act: Callable[[], None], path: str) -> NoReturn:
    """Do it and end the process as an interpreter would: wait for threads, call what is to be called at exit."""
    code = 0
    try:
        act()
    except SystemExit as request:
        code = _exit_code(request.code)
    except BaseException as error:
        code = 1
        _show(error, path)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for channel in (sys.stdout, sys.stderr):
            if channel is not None and not channel.closed:
                channel.flush()
    except BaseException as error:
        code = code or 1
        _show(error, path)
    os._exit(code)


def _exit_code(given: Any) -> int:
    if given is None or isinstance(given, int):
        return int(given or 0) & 0xFF
    print(given, file=sys.stderr)
    return 1


def _show(error: BaseException, path: str) -> None:
    """The traceback of a program, without the frames of this file."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    try:
        sys.stdout.flush()
        traceback.print_exception(type(error), error, trace)
        sys.stderr.flush()
    except BaseException:  # The program may have closed its channels, or replaced what prints.
        return
