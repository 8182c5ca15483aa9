"""The tests of a row, in the forms that datasets have them, as jobs for the sandbox and as what to expect of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strop.sandbox.calls import call_input, check_input
from strop.sandbox.inside.plain import NotPlain

Style = Literal["stdin", "function", "assert"]


@dataclass(frozen=True)
class Suite:
    """style: what is compared. inputs: one for each test, for the sandbox. expected: for each test the answers that
    are right (for `assert` there are none). source: for `assert`, code that comes before each test."""

    style: Style
    inputs: tuple[str, ...]
    expected: tuple[tuple[Any, ...], ...] = ()
    source: str = ""

    def first(self, count: int | None) -> Suite:
        """The first `count` of them."""
        return Suite(self.style, self.inputs[:count], self.expected[:count], self.source)


def read_tests(given: Any, style: Literal["auto", "stdin", "function", "assert"], entry: str, setup: str) -> Suite:
    """The tests of a column.

    Args:
        given: its value, or that as JSON.
        style: what they are; `auto` finds out.
        entry: name of the function that is tested, if the row has one.
        setup: code to run before tests that are code.

    Raises:
        ValueError: they are in no form that is known, or there are none.
    """
    if isinstance(given, str) and style != "assert" and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            if style != "auto":
                raise ValueError("the tests are a text that is neither JSON nor, for this style, code") from None
    if isinstance(given, Mapping) and ("inputs" in given or "input_output" in given):
        given, entry = _from_columns(given, entry)
    cases = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not cases:
        raise ValueError("the row has no tests")
    if style == "assert" or (style == "auto" and all(isinstance(case, str) for case in cases)):
        return _code([_text(case, "a test") for case in cases], entry, setup)
    mappings = [_case(case) for case in cases]
    if style == "function" or (style == "auto" and _calls(mappings[0], entry)):
        return _of_calls(mappings, entry)
    return Suite(
        "stdin",
        tuple(_text(_joined(case.get("input", case.get("stdin", ""))), "the input of a test") for case in mappings),
        tuple((_text(_joined(_first(case, _OUTPUT)), "the output of a test"),) for case in mappings),
    )


_OUTPUT = ("output", "expected", "expected_output", "stdout")


def _case(case: Any) -> dict[str, Any]:
    if not isinstance(case, Mapping):
        raise ValueError(f"a test is a {type(case).__name__}; a mapping with `input` and `output` is needed")
    # A table fills up with None what a row lacks.
    return {key: value for key, value in case.items() if value is not None or key in _OUTPUT}


def _first(case: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    found = [case[name] for name in names if name in case]
    if not found:
        raise ValueError(f"a test has no `{names[0]}`; it has {', '.join(case) or 'nothing'}")
    return next((value for value in found if value is not None), None)


def _text(value: Any, what: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{what} is a {type(value).__name__}; a text is needed")
    return value


def _joined(value: Any) -> Any:
    """A list of lines as a text."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else value


def _from_columns(given: Mapping[str, Any], entry: str) -> tuple[list[dict[str, Any]], str]:
    """Suite as `{inputs: [...], outputs: [...], fn_name: ...}`, as in APPS and TACO."""
    if "input_output" in given:
        given = json.loads(given["input_output"])
    inputs, outputs = given["inputs"], given.get("outputs")
    if outputs is None or len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs or ())} outputs")
    name = given.get("fn_name") or ""
    if not name:
        return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)], entry
    # Some rows have the value itself, others a list that holds it.
    cases = [
        {"args": one, "expected": other, "or": other[0] if isinstance(other, list) and len(other) == 1 else other}
        for one, other in zip(inputs, outputs, strict=True)
    ]
    return cases, entry or name


# --- calls ---


def _calls(case: Mapping[str, Any], entry: str) -> bool:
    if "testtype" in case:
        return case["testtype"] == "functional"
    if "args" in case or "arguments" in case or "kwargs" in case:
        return True
    return bool(entry) and not isinstance(case.get("input", case.get("stdin")), str)


def _of_calls(cases: list[dict[str, Any]], entry: str) -> Suite:
    inputs, expected = [], []
    for case in cases:
        name = str(case.get("entry_point") or entry)
        if not name:
            raise ValueError("nothing says which function is tested; name its column with `entry_point`")
        arguments, answer = _arguments(case), _first(case, ("expected", "output", "expected_output"))
        if case.get("testtype") == "functional" and isinstance(answer, str):
            answer = json.loads(answer)
        try:
            inputs.append(call_input(name, arguments, case.get("kwargs")))
        except NotPlain as error:
            raise ValueError(f"the arguments of a test cannot be handed over: {error}") from None
        expected.append((answer, case["or"]) if "or" in case else (answer,))
    return Suite("function", tuple(inputs), tuple(expected))


def _arguments(case: Mapping[str, Any]) -> list[Any]:
    if "kwargs" in case and not any(name in case for name in ("args", "arguments", "input")):
        return []
    given = _first(case, ("args", "arguments", "input"))
    if isinstance(given, str):
        # One value a line, as in LiveCodeBench.
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list | tuple):
        raise ValueError(f"the arguments of a test are a {type(given).__name__}; a list is needed")
    return list(given)


# --- code ---


def _code(texts: list[str], entry: str, setup: str) -> Suite:
    if len(texts) > 1:
        return Suite("assert", tuple(check_input(text, entry) for text in texts), source=setup)
    try:
        module = ast.parse(texts[0])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are no Python: {error}") from None
    source, tests = _split(texts[0], module, entry)
    return Suite("assert", tuple(check_input(test, entry) for test in tests), source=f"{setup}\n{source}".lstrip("\n"))


def _split(text: str, module: ast.Module, entry: str) -> tuple[str, list[str]]:
    """What comes before each test, and the tests: functions, methods, asserts at the end, or all of it as one."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    tests = [node for node in functions if node.name.startswith("test")]
    for node in tests:
        needed = len(node.args.args) + len(node.args.posonlyargs) - len(node.args.defaults)
        if needed:
            raise ValueError(f"the test {node.name} has parameters; fixtures and parametrised tests are not supported")
    methods = [
        f"{case.name}.setUpClass(); {case.name}({method.name!r}).debug()"
        for case in module.body
        if isinstance(case, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in case.bases)
        for method in case.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
    ]
    if tests or methods:
        return text, [*(f"{node.name}()" for node in tests), *methods]
    if any(node.name == "check" for node in functions) and not _is_called(module, "check"):
        if not entry:
            raise ValueError("the tests define check(candidate), and nothing says which function is tested")
        return text, ["check(candidate)"]
    first = next((n for n, node in enumerate(module.body) if isinstance(node, ast.Assert)), None)
    if first is not None and all(isinstance(node, ast.Assert) for node in module.body[first:]):
        lines = text.split("\n")
        head = "\n".join(lines[: module.body[first].lineno - 1]) if first else ""
        return head, [ast.unparse(node) for node in module.body[first:]]
    return "", [text]


def _is_called(module: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == name
        for node in module.body
    )
