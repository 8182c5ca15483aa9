"""A calculator: one arithmetic expression, without evaluating Python."""

from __future__ import annotations

import ast
import operator
from typing import Any

from strop.environments.tools import CallError

LARGEST_POWER_BITS = 4096
_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and brackets, such as (12 + 30) * 2.
    """
    if len(expression) > 500:
        raise CallError("the expression is longer than 500 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CallError(f"{expression!r} is not an arithmetic expression") from None
    try:
        value = _value(tree.body)
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise CallError(str(error)) from None


def _bits(number: int | float) -> int:
    """Size of an integer; floats overflow by themselves."""
    return number.bit_length() if isinstance(number, int) else 0


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and _bits(left) * abs(right) > LARGEST_POWER_BITS:
            raise CallError("the power is too large")
        result: int | float = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise CallError("the result is not a real number")
        return result
    raise CallError("only numbers, + - * / // % ** and brackets can be worked out")
