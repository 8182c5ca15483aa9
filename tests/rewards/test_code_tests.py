"""The forms in which datasets have tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strop.rewards.code_tests import Suite, read_tests


def read(given: Any, style: Any = "auto", entry: str = "", setup: str = "") -> Suite:
    return read_tests(given, style, entry, setup)


def called(tests: Suite) -> list[tuple[str, Any, Any]]:
    """Entry, arguments and keywords of each call."""
    asked = [json.loads(one) for one in tests.inputs]
    return [(one["entry"], json.loads(one["arguments"]), json.loads(one["keywords"])) for one in asked]


def checks(tests: Suite) -> list[tuple[str, str]]:
    return [(json.loads(one)["test"], json.loads(one)["entry"]) for one in tests.inputs]


@pytest.mark.parametrize(
    "given",
    [
        [{"input": "1\n", "output": "2"}, {"input": "3", "output": "4"}],
        [{"stdin": "1\n", "expected_output": "2"}, {"stdin": "3", "stdout": "4"}],
        json.dumps([{"input": "1\n", "output": "2"}, {"input": "3", "output": "4"}]),
        {"inputs": ["1\n", "3"], "outputs": ["2", "4"]},
        {"input_output": json.dumps({"inputs": ["1\n", "3"], "outputs": ["2", "4"]})},
        [{"input": "1\n", "output": "2", "args": None}, {"input": 3, "output": 4, "fn_name": None}],
        [{"input": "1\n", "output": "2", "testtype": "stdin"}, {"input": "3", "output": "4", "testtype": "stdin"}],
    ],
)
def test_input_and_output(given: Any) -> None:
    assert read(given) == Suite("stdin", ("1\n", "3"), (("2",), ("4",)))


def test_lines_are_joined_and_no_input_is_no_input() -> None:
    assert read([{"input": ["1", "2"], "output": ["3", 4]}]).expected == (("3\n4",),)
    assert read([{"input": None, "output": "x"}, {"output": "y"}]).inputs == ("", "")


def test_calls() -> None:
    tests = read([{"args": [1, "a"], "expected": None}, {"args": [], "kwargs": {"b": 2}, "expected": 3}], entry="f")
    assert tests.style == "function"
    assert called(tests)[0] == ("f", [1, "a"], {"dict": []})
    assert called(tests)[1] == ("f", [], {"dict": [["b", 2]]})
    assert tests.expected == ((None,), (3,))


def test_calls_as_other_datasets_have_them() -> None:
    taco = read({"fn_name": "g", "inputs": [[[1, 2]], [[3]]], "outputs": [[3], 3]})
    assert [one[:2] for one in called(taco)] == [("g", [[1, 2]]), ("g", [[3]])]
    assert taco.expected == (([3], 3), (3, 3))
    livecode = read([{"input": "[1, 2]\n5", "output": "[3]", "testtype": "functional"}], entry="h")
    assert [one[:2] for one in called(livecode)] == [("h", [[1, 2], 5])]
    assert livecode.expected == (([3],),)
    named = read([{"entry_point": "k", "kwargs": {"a": 1}, "expected": 1}])
    assert called(named)[0][0] == "k"
    listed = read([{"input": [1], "output": 2}], entry="f")
    assert (listed.style, called(listed)[0][1]) == ("function", [1])


def test_asserts() -> None:
    tests = read(["assert f(1) == 2", "assert f(2) == 3"], entry="f", setup="import math")
    assert (tests.style, tests.source) == ("assert", "import math")
    assert checks(tests) == [("assert f(1) == 2", "f"), ("assert f(2) == 3", "f")]


def test_code_with_asserts_at_its_end_is_split() -> None:
    tests = read("import math\nx = 3\nassert f(x) == 2\nassert f(\n    4) == 3\n")
    assert tests.source.strip() == "import math\nx = 3"
    assert [test for test, _ in checks(tests)] == ["assert f(x) == 2", "assert f(4) == 3"]


def test_code_whose_order_matters_is_one_test() -> None:
    code = "s = Stack()\nassert len(s) == 0\ns.push(1)\nassert len(s) == 1"
    assert checks(read(code)) == [(code, "")]


def test_a_check_function_is_given_the_candidate() -> None:
    code = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
    tests = read(code, entry="f")
    assert (tests.source, checks(tests)) == (code, [("check(candidate)", "f")])
    with pytest.raises(ValueError, match="nothing says which function"):
        read(code)
    calls_itself = code + "check(f)\n"
    assert checks(read(calls_itself)) == [(calls_itself, "")]


def test_each_test_function_and_method_is_a_test() -> None:
    code = """
from solution import f
import unittest
def test_one(): assert f(1)
def test_two(x=1): assert f(x)
def other(): pass
class Cases(unittest.TestCase):
    def setUp(self): pass
    def test_three(self): self.assertEqual(f(1), 2)
"""
    tests = read(code)
    assert [test for test, _ in checks(tests)] == [
        "test_one()",
        "test_two()",
        "Cases.setUpClass(); Cases('test_three').debug()",
    ]


@pytest.mark.parametrize(
    ("given", "style", "says"),
    [
        ([], "auto", "no tests"),
        (None, "auto", "NoneType"),
        ([1], "auto", "a test is a int"),
        ([{"output": "1"}, {"input": "x"}], "auto", "has no `output`"),
        ([{"input": {"a": 1}, "output": "1"}], "auto", "the input of a test is a dict"),
        ([{"args": [1], "expected": 1}], "auto", "which function"),
        ([{"args": 5, "expected": 1}], "function", "which function|a list is needed"),
        ({"inputs": ["1"], "outputs": []}, "auto", "1 inputs and 0 outputs"),
        ("assert (", "auto", "no Python"),
        ("def test_a(fixture): pass", "auto", "fixtures"),
        ("[not json", "stdin", "neither JSON"),
    ],
)
def test_what_is_in_no_known_form_is_told(given: Any, style: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(given, style)


def test_only_the_first_can_be_used() -> None:
    assert read([{"input": str(n), "output": "x"} for n in range(5)]).first(2).inputs == ("0", "1")
    assert len(read([{"input": str(n), "output": "x"} for n in range(5)]).first(None).inputs) == 5
