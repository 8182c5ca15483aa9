"""Tests written as code, run apart from the program that they test: each in a sandbox of its own.

The program's side serves its functions, the tests' side calls them; `peer` says what may pass between. So the tests,
and the answers in them, are never where the program is, and what the program does to its own process (ending it,
replacing `print` or `AssertionError`, reading the frames above it) is of no use to it.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
import types
from typing import Any, NoReturn

from peer import HARMLESS, OPERATIONS, FromProgram, Peer
from programs import MODULE, find_function, load, to_the_end, write_all

ALIASES = {"np": "numpy", "pd": "pandas"}
"""Names that tests use without importing what everybody knows them for."""
_JOKES = frozenset({"this", "antigravity"})


def serve_program(source: str, path: str, channel: int) -> NoReturn:  # type: ignore[misc]
    """Load a program and let the tests at the other end of the channel use it."""

    def serve() -> None:
        module = load(source, path)

        def names(wanted: list[str]) -> dict[str, Any]:
            found = {name: getattr(module, name) for name in wanted if hasattr(module, name)}
            return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}

        peer = Peer(channel, allowed=frozenset(OPERATIONS), home=MODULE)
        peer.answers = {
            "names": names,
            "all names": lambda: list(names([name for name in vars(module) if not name.startswith("_")])),
            "find": lambda entry: find_function(module, entry),
        }
        peer.serve()

    to_the_end(serve, path)


def run_test(source: str, path: str, request: str, channel: int, result: int) -> NoReturn:  # type: ignore[misc]
    """Run one test against the program at the other end of the channel.

    What is written to `result` is JSON: `passed`, and a `detail` of what failed, or a `fault` of the tests themselves.
    Where nothing is written, the test did not come to its end.
    """

    def run() -> None:
        verdict = _verdict(source, path, json.loads(request), channel)
        write_all(result, json.dumps(verdict).encode())
        if not verdict["passed"]:
            raise SystemExit(1)

    to_the_end(run, path)


def _verdict(source: str, path: str, asked: dict[str, Any], channel: int) -> dict[str, Any]:
    parts = [(path, source), ("<test>", asked["test"])]
    try:
        trees = [ast.parse(text, name) for name, text in parts]
        codes = [compile(tree, name, "exec", dont_inherit=True) for tree, (name, _) in zip(trees, parts, strict=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"passed": False, "fault": f"the tests do not compile: {error}"}
    read, bound = names_of(trees)
    peer = Peer(channel, allowed=HARMLESS, named=frozenset(read | bound))
    namespace = {"__name__": "tests"}
    try:
        _bind(namespace, peer, read - bound, asked["entry"])
        for code in codes:
            exec(code, namespace)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, ImportError) and not isinstance(error, FromProgram) and error.name != MODULE:
            return {"passed": False, "fault": f"the tests need what is not there: {told}"}
        return {"passed": False, "detail": f"{told}{_place(error, dict(parts))}"}
    return {"passed": True}


def _bind(namespace: dict[str, Any], peer: Peer, free: set[str], entry: str) -> None:
    """What the tests may use without defining it: the program's names, and modules that everybody knows.

    No name of the program stands for a builtin or a known module, unless the tests import it from `solution`.
    """
    module = types.ModuleType(MODULE)

    def attribute(name: str) -> Any:
        if name == "__all__":
            return peer.ask("all names")
        found = peer.ask("names", [name])
        if name not in found:
            raise AttributeError(f"the program has no {name!r}")
        return found[name]

    module.__dict__["__getattr__"] = attribute
    sys.modules[MODULE] = module
    known = {name for name in free if name in sys.stdlib_module_names or name in ALIASES} - _JOKES
    for name in known:
        try:
            namespace[name] = __import__(ALIASES.get(name, name))
        except ImportError:
            continue
    wanted = sorted(free - known - set(dir(builtins)))
    if wanted:
        namespace.update({name: value for name, value in peer.ask("names", wanted).items() if name in wanted})
    if entry:
        namespace[entry.rpartition(".")[2]] = namespace["candidate"] = peer.ask("find", entry)


def names_of(trees: list[ast.Module]) -> tuple[set[str], set[str]]:
    """The names that code reads, and those that it binds anywhere."""
    read: set[str] = set()
    bound: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read, bound


def _place(error: BaseException, sources: dict[str, str]) -> str:
    """The line of the tests in which an exception came up."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name in sources:
            lines = sources[name].splitlines()
            number = trace.tb_lineno
            found = lines[number - 1].strip() if number <= len(lines) else ""
        trace = trace.tb_next
    return f" in `{found[:200]}`" if found else ""
