"""The `python` verifier: reward functions as TRL users write them, and everything they can do wrong."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.config.rewards import PythonVerifier
from strop.errors import RunFailure, UserError
from strop.rewards.protocol import Completed, Verdict
from strop.rewards.python import PythonFunction

SOURCE = """
import numpy as np
import torch

calls = []

def with_kwargs(prompts, completions, **kwargs):
    calls.append(dict(kwargs, prompts=prompts, completions=completions))
    return [float(len(completion)) for completion in completions]

def only_named(completions, solution):
    return [float(c == s) for c, s in zip(completions, solution)]

def with_default(completions, level=None, bonus=0.0):
    return [bonus if level is None else bonus + (0 if x is None else x) for x in level or completions]

def conversation(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]

def by_ids(completion_ids, **kwargs):
    return [sum(ids) for ids in completion_ids]

async def asynchronous(completions, **kwargs):
    import asyncio
    await asyncio.sleep(0)
    return [1.0 for _ in completions]

def numpy_array(completions, **kwargs):
    return np.ones(len(completions), dtype=np.float32)

def scalars(completions, **kwargs):
    return [np.float32(0.5), torch.tensor(0.25, dtype=torch.bfloat16), np.bool_(True), True, 2, None]

def tensor(completions, **kwargs):
    return torch.arange(len(completions))

def writes(prompts, completions, **kwargs):
    prompts[0][0]["content"] = "changed"
    return [0.0] * len(completions)

class Judge:
    def __call__(self, completions, **kwargs):
        return [3.0] * len(completions)

judge = Judge()
number = 5

def answers(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def not_finite(completions, **kwargs):
    return [1.0, float("nan"), float("inf"), 10**400][: len(completions)]

def raises(completions, **kwargs):
    inner = {}
    return [inner["missing"] for _ in completions]

def raises_in_library(completions, **kwargs):
    import json
    return [json.loads(completion) for completion in completions]

def exits(completions, **kwargs):
    raise SystemExit("done")

def whole_conversation(prompts, completions, **kwargs):
    return [len(completion) + 0.1 * (completion[-1]["role"] == "assistant") for completion in completions]

def with_state(completions, trainer_state, **kwargs):
    return [0.0 for _ in completions]

def too_few(completions, **kwargs):
    return [1.0]

def returns(completions, value, **kwargs):
    return value

def by_position(completions, /):
    return [0.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `trl_rewards.py`, as a user would start strop in; nothing of it stays imported."""
    (tmp_path / "trl_rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def function(name: str, **arguments: Any) -> PythonFunction:
    settings = PythonVerifier(kind="python", function=f"trl_rewards:{name}", arguments=arguments)
    return PythonFunction(settings, where="rewards.verifiers.0")


def rows(*completions: str, **columns: list[Any]) -> list[Completed]:
    return [
        Completed(prompt=f"p{i}", completion=text, row={name: column[i] for name, column in columns.items()})
        for i, text in enumerate(completions)
    ]


def scores(verdicts: list[Verdict]) -> list[float | None]:
    assert all(verdict.status == "ok" for verdict in verdicts)
    return [verdict.score for verdict in verdicts]


def test_every_column_is_a_list_of_its_name() -> None:
    verifier = function("with_kwargs", extra="x")
    completed = [
        Completed("p0", "a", row={"prompt": "p0", "level": 1}, completion_ids=(1, 2)),
        Completed("p1", "bb", row={"prompt": "p1", "level": 2, "source": "s"}),
    ]
    assert scores(verifier.verify(completed)) == [1.0, 2.0]
    assert sys.modules["trl_rewards"].calls[-1] == {
        "prompts": ["p0", "p1"],
        "completions": ["a", "bb"],
        "completion_ids": [[1, 2], []],
        "level": [1, 2],
        "source": [None, "s"],
        "extra": "x",
    }


def test_only_what_the_function_accepts_is_passed() -> None:
    assert scores(function("only_named").verify(rows("a", "b", solution=["a", "x"], other=[0, 0]))) == [1.0, 0.0]


def test_a_default_stands_in_for_a_column_that_no_row_has() -> None:
    assert scores(function("with_default", bonus=0.5).verify(rows("a", "b"))) == [0.5, 0.5]
    assert scores(function("with_default").verify(rows("a", "b", level=[1, None]))) == [1.0, 0.0]


def test_the_answer_is_passed_whatever_its_column_is_called() -> None:
    completed = [Completed("p", "a", answer="a", row={"solution": "a"}), Completed("p", "b", answer="a")]
    assert scores(function("answers").verify(completed)) == [1.0, 0.0]


def test_messages_make_conversational_completions() -> None:
    prompt = [{"role": "user", "content": "hi"}]
    assert scores(function("conversation").verify([Completed(prompt, "abc")])) == [3.0]
    function("writes").verify([Completed(prompt, "abc")])
    assert prompt == [{"role": "user", "content": "hi"}]


def test_a_conversation_is_all_that_followed_the_prompt() -> None:
    prompt = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    said = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "abc"},
    ]
    system = {"role": "system", "content": "s"}
    for messages, behind in (
        ([*prompt, *said], 3.1),
        ([system, *prompt, *said], 3.1),
        ([system, {"role": "user", "content": "another"}, *said[:2]], 2.0),
        ([], 1.1),
    ):
        completed = [Completed(prompt, "abc", messages=messages)]
        assert scores(function("whole_conversation").verify(completed)) == [behind]
    assert [message["content"] for message in said] == ["call", "3", "abc"]


def test_what_only_the_trainer_of_trl_has_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="'trainer_state', which only TRL's own trainer has"):
        function("with_state")


def test_token_ids_are_passed() -> None:
    assert scores(function("by_ids").verify([Completed("p", "a", completion_ids=(3, 4))])) == [7.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("asynchronous", [1.0] * 6),
        ("numpy_array", [1.0] * 6),
        ("tensor", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        ("scalars", [0.5, 0.25, 1.0, 1.0, 2.0, None]),
        ("judge", [3.0] * 6),
        ("judge.__call__", [3.0] * 6),
    ],
)
def test_shapes_of_functions_and_of_results(name: str, expected: list[float | None]) -> None:
    assert scores(function(name).verify(rows(*"abcdef"))) == expected


def test_not_finite_is_an_error_of_that_completion() -> None:
    verdicts = function("not_finite").verify(rows(*"abcd"))
    assert [verdict.status for verdict in verdicts] == ["ok"] + ["verifier_error"] * 3
    assert [verdict.score for verdict in verdicts] == [1.0, None, None, None]
    assert verdicts[1].detail == "trl_rewards:not_finite returned nan"


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("raises", 'inner["missing"]', "KeyError: 'missing'"),
        ("exits", "SystemExit(", "SystemExit: done"),
        ("raises_in_library", "json.loads", "JSONDecodeError: Expecting value"),
    ],
)
def test_an_exception_names_type_message_and_line(name: str, line: str, message: str) -> None:
    verdicts = function(name).verify(rows("a", "b"))
    assert [verdict.status for verdict in verdicts] == ["verifier_error"] * 2
    number = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if line in text)
    assert f"trl_rewards:{name}" in verdicts[0].detail
    assert message in verdicts[0].detail
    assert f"trl_rewards.py:{number})" in verdicts[0].detail


@pytest.mark.parametrize("value", [5, "ab", {"a": 1}, None, ["a", "b"], [1j, 2], [[1.0], [2.0]], [1.0, 2.0, 3.0], []])
def test_anything_but_a_number_for_each_completion_stops_the_run(value: Any) -> None:
    with pytest.raises(RunFailure) as caught:
        function("returns", value=value).verify(rows("a", "b"))
    assert "trl_rewards:returns" in caught.value.what
    assert "returned" in caught.value.what
    assert "expected" in caught.value.what


def test_a_wrong_count_tells_both_counts() -> None:
    with pytest.raises(RunFailure, match="returned 1 numbers for 3 completions"):
        function("too_few").verify(rows("a", "b", "c"))


def test_a_column_that_the_data_lacks_stops_the_run() -> None:
    with pytest.raises(RunFailure) as caught:
        function("only_named").verify(rows("a", solutions=["a"]))
    assert "'solution'" in caught.value.what
    assert "'solutions'" in caught.value.mend


def refusal(path: str, **arguments: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        PythonFunction(PythonVerifier(kind="python", function=path, arguments=arguments), where="rewards.verifiers.2")
    assert caught.value.where.startswith("rewards.verifiers.2.")
    return caught.value


@pytest.mark.parametrize("path", ["trl_rewards", "trl_rewards:", ":f", "a b:f", "trl_rewards.py/x:f"])
def test_a_path_of_another_form_is_refused(path: str) -> None:
    assert "module:function" in refusal(path).mend


def test_the_mend_of_a_file_name_is_the_module() -> None:
    assert "my.rewards:score" in refusal("./my/rewards.py:score").mend


def test_a_module_that_is_not_there_is_named() -> None:
    assert "'no_such_module'" in refusal("no_such_module:f").what
    assert "'trl_rewards.part'" in refusal("trl_rewards.part:f").what


def test_the_nearest_function_is_named() -> None:
    error = refusal("trl_rewards:asynchronus")
    assert "'asynchronus'" in error.what
    assert "'asynchronous'" in error.mend
    assert "built in" in refusal("sys:no_such_function").what


def test_what_cannot_be_called_is_refused() -> None:
    assert "int" in refusal("trl_rewards:number").what
    assert "'completions'" in refusal("trl_rewards:by_position").what


@pytest.mark.parametrize("key", ["prompts", "unknown"])
def test_arguments_that_cannot_be_given_are_refused(key: str) -> None:
    error = refusal("trl_rewards:only_named", **{key: 1})
    assert error.where == f"rewards.verifiers.2.arguments.{key}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import not_installed_anywhere", "not_installed_anywhere"),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_that_breaks_at_import_tells_how(working_folder: Path, body: str, message: str) -> None:
    (working_folder / "broken_rewards.py").write_text(textwrap.dedent(body))
    error = refusal("broken_rewards:f")
    assert message in error.what
    assert "broken_rewards.py" in error.what
