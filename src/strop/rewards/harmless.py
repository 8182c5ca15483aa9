"""Keeping a package that evaluates answers from executing them.

Several scorers of others call `eval` or sympy's `parse_expr` on what the policy wrote. While one works, an audit hook
of the interpreter looks at every text that is about to be compiled: only numbers, texts, lists and arithmetic get
through, with the names that sympy's parser makes of them. Calls of anything else, attributes, and numbers of astronomic
size end in an exception, which the scorer takes for an answer that it cannot read. Should something get through all the
same, processes, connections and written files are refused too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CALLABLE = frozenset(
    (
        *("Integer", "Float", "Rational", "Symbol", "Function", "Add", "Mul", "Pow", "Eq", "Tuple"),
        *("sqrt", "cbrt", "exp", "log", "ln", "Abs", "sign", "floor", "ceiling"),
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    )
)
"""What an answer may call: what sympy's parser makes of numbers and letters, and functions of numbers."""
MAKERS = frozenset(("collections", "dataclasses", "typing", "enum", "functools", "inspect", "namedtuple"))
"""Modules of Python that make classes and functions of texts of their own."""
EXPONENT = 200
"""Largest exponent that is a number."""
LONGEST = 4000
"""Characters of an answer that is evaluated."""
_NODES = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Call,
    ast.keyword,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
_EVENTS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.", "urllib.", "ftplib.", "smtplib.")
_guarded = _installed = _reading = False


class Harmful(ValueError):
    """What an answer would do, were it evaluated."""


@contextmanager
def harmless() -> Iterator[None]:
    """Nothing that is evaluated inside does more than arithmetic. For a process of its own, and one thread of it."""
    global _guarded, _installed
    if not _installed:
        sys.addaudithook(_look)
        _installed = True
    # A module that is imported on the way would be written to its cache.
    cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _guarded = True
    try:
        yield
    finally:
        _guarded = False
        sys.dont_write_bytecode = cached


def check(source: str) -> None:
    """See that a text is arithmetic.

    Raises:
        Harmful: it is more than that, or of a size that is not computed.
    """
    global _reading
    if len(source) > LONGEST:
        raise Harmful(f"an answer of {len(source)} characters is not evaluated")
    _reading = True
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # The compiler will say so too.
    finally:
        _reading = False
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise Harmful(f"{type(node).__name__} is not arithmetic")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise Harmful(f"{node.id} is not arithmetic")
        if isinstance(node, ast.Call) and not _is_callable(node.func):
            raise Harmful(f"a call of {ast.unparse(node.func)[:50]} is not arithmetic")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            _check_power(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.RShift):
            _check_power(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            _check_repetition(node)


def _is_callable(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):  # Function('f')(x)
        return isinstance(node.func, ast.Name) and node.func.id == "Function"
    return isinstance(node, ast.Name) and node.id in CALLABLE


def _check_power(exponent: ast.expr) -> None:
    """An exponent is a small number, or has a letter in it, which is not computed."""
    inside = list(ast.walk(exponent))
    if any(isinstance(node, ast.Name) and node.id not in CALLABLE for node in inside):
        return
    if any(isinstance(node, ast.Call) and ast.unparse(node.func) in ("Symbol", "Function") for node in inside):
        return
    if any(isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Div | ast.Sub | ast.Add) for node in inside):
        raise Harmful("an exponent that is computed is not evaluated")
    for node in inside:
        if isinstance(node, ast.Constant) and not _is_small(node.value):
            raise Harmful(f"an exponent of more than {EXPONENT} is not evaluated")


def _check_repetition(node: ast.BinOp) -> None:
    """Texts and lists are not multiplied."""
    for side in (node.left, node.right):
        if isinstance(side, ast.List | ast.Tuple) or (isinstance(side, ast.Constant) and isinstance(side.value, str)):
            raise Harmful("a product of texts or lists is not arithmetic")


def _is_small(value: Any) -> bool:
    try:
        return abs(float(value)) <= EXPONENT
    except (TypeError, ValueError, OverflowError):
        return False


def _caller() -> str:
    """Name of the module that asked for whatever the hook is told of."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if not _guarded or _reading:
        return
    if event == "compile":
        source, name = arguments[0], arguments[1]
        # Modules that are imported on the way have the names of their files, and make classes of texts of their own.
        if isinstance(name, str | bytes) and str(name).strip("b'").startswith("<") and _caller() not in MAKERS:
            if isinstance(source, bytes):
                source = source.decode("utf-8", "replace")
            if isinstance(source, str):
                check(source)
    elif event == "open":
        path, mode, flags = arguments
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        if writes or (mode is None and isinstance(flags, int) and flags & 3):
            raise Harmful(f"{str(path)[:50]} is not written to")
    elif event.startswith(_EVENTS) and event not in ("os.listdir", "os.scandir"):
        raise Harmful(f"{event} is not arithmetic")
