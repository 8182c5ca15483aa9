"""Tools: what the policy is told of a function, what happens to what it gives, and what it reads of the results."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from strop.config.environment import ToolEnvironment
from strop.environments.build import ToolFactory, build_environments
from strop.environments.calculator import calculator
from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.environments.retrieval import Passages
from strop.environments.tools import CallError, function_tool
from strop.errors import DataError, UserError
from strop.sandbox.build import SharedSandbox

HERMES = "... <tool_call> ... tools ..."


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tells the weather of a place.

    It knows only sunshine.

    Args:
        city: where.
        days: how many days,
            from today.
    """
    return {"city": city, "sun": [True] * days, "unit": unit}


async def slow(seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "awake"


def hangs() -> str:
    """Never comes back in time."""
    time.sleep(1.0)
    return "late"


def breaks(text: str) -> str:
    """Fails."""
    raise RuntimeError(f"cannot {text}")


def shouts(count: int) -> str:
    """Says much."""
    return "a" * count


def test_a_function_tells_its_name_its_words_and_its_types() -> None:
    tool = function_tool(weather)
    assert tool.schema["function"] == {
        "name": "weather",
        "description": "Tells the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where."},
                "days": {"type": "integer", "default": 1, "description": "how many days, from today."},
                "unit": {"enum": ["C", "F"], "type": "string", "default": "C"},
            },
            "required": ["city"],
        },
    }
    assert tool.describe() == "weather(city: string, days: integer, unit: string): Tells the weather of a place."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "city: Field required"),
        ({"city": "Rome", "days": "many"}, "days: Input should be a valid integer"),
        ({"city": "Rome", "when": "now"}, "when: Extra inputs"),
        ({"city": "Rome", "unit": "K"}, "unit: Input should be 'C' or 'F'"),
    ],
)
def test_arguments_are_checked_before_the_call(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(CallError, match=says):
        asyncio.run(function_tool(weather).call(arguments))


def test_results_are_text_and_arguments_are_converted() -> None:
    result = asyncio.run(function_tool(weather).call({"city": "Rome", "days": "2"}))
    assert result == '{"city": "Rome", "sun": [true, true], "unit": "C"}'
    assert asyncio.run(function_tool(slow).call({"seconds": 0})) == "awake"


def test_a_function_without_names_for_its_arguments_is_no_tool() -> None:
    def several(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(UserError, match="without a name of its own"):
        function_tool(several, where="environment.tools.0")


@pytest.mark.parametrize(
    ("expression", "result"),
    [("1 + 2", "3"), ("(12+30)*2", "84"), ("7 / 2", "3.5"), ("-2**3", "-8"), ("2**100", str(2**100)), ("7 % 4", "3")],
)
def test_the_calculator_works_out(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "__import__('os')", "open('x')", "10**10**10", "1/0", "a", "'a'*9", "(" * 499, "1" * 501, "(-8)**0.5"],
)
def test_the_calculator_refuses_what_is_no_arithmetic_quickly(expression: str) -> None:
    started = time.perf_counter()
    with pytest.raises(CallError):
        calculator(expression)
    assert time.perf_counter() - started < 2


def environment(
    tools: list[dict[str, Any]],
    template: str | None = HERMES,
    *,
    sandbox: SharedSandbox | None = None,
    **settings: Any,
) -> ToolFactory:
    found = ToolEnvironment.model_validate({"kind": "tools", "tools": tools, **settings})
    return build_environments(found, template, sandbox)  # type: ignore[no-any-return]


def step(factory: ToolFactory, text: str) -> Observation | Done:
    return asyncio.run(factory.make().step(PolicyTurn(text)))


def here(name: str) -> dict[str, str]:
    return {"kind": "function", "path": f"{__name__}:{name}"}


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_calls_are_answered_in_order_and_a_turn_without_one_ends() -> None:
    factory = environment([{"kind": "calculator"}, here("weather")])
    assert isinstance(step(factory, "It is 3."), Done)
    found = step(factory, call("weather", city="Rome") + call("calculator", expression="1+2"))
    assert isinstance(found, Observation)
    assert [(m["role"], m["name"]) for m in found.messages] == [("tool", "weather"), ("tool", "calculator")]
    assert found.messages[1]["content"] == "3"
    assert found.reward is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>{</tool_call>", "error: not valid JSON"),
        (call("abacus"), "error: there is no tool 'abacus'; there are calculator, breaks, slow, hangs, shouts"),
        (call("calculator", sum="1"), "error: expression: Field required; sum: Extra inputs are not permitted"),
        (call("breaks", text="do"), "error: RuntimeError: cannot do"),
        (call("slow", seconds=60), "error: slow took longer than 0.2 seconds"),
        (call("hangs"), "error: hangs took longer than 0.2 seconds"),
        (call("shouts", count=30), "a" * 20 + "\n(10 more characters are cut off)"),
    ],
)
def test_what_a_call_gets_wrong_is_told_to_the_policy(text: str, says: str) -> None:
    tools = [{"kind": "calculator"}, *(here(name) for name in ("breaks", "slow", "hangs", "shouts"))]
    limit = 20 if "shouts" in text and "abacus" not in text else 4000
    factory = environment(tools, call_timeout=0.2, max_result_characters=limit)
    found = step(factory, text)
    assert isinstance(found, Observation)
    assert found.messages[0]["content"].startswith(says)


def test_malformed_calls_cost_what_the_recipe_says_and_too_many_are_refused() -> None:
    factory = environment([{"kind": "calculator"}], malformed_penalty=0.25, max_calls=1)
    found = step(factory, "<tool_call>{</tool_call><tool_call>[</tool_call>")
    assert isinstance(found, Observation)
    assert found.reward == -0.5
    found = step(factory, call("calculator", expression="1") * 2)
    assert isinstance(found, Observation)
    assert [m["content"] for m in found.messages] == ["1", "error: at most 1 calls are allowed in one turn"]


def test_programs_run_in_the_sandbox_and_what_they_print_is_shown() -> None:
    with SharedSandbox() as sandbox:
        check_programs(environment([{"kind": "python"}], sandbox=sandbox))


def check_programs(factory: ToolFactory) -> None:
    texts = {
        "print(6 * 7)": "42",
        "x = 1": "(nothing was printed)",
        "print('a')\n1 / 0": "error: a\nZeroDivisionError: division by zero",
        "import sys; sys.exit(3)": "error: the program ended with code 3",
        "open('/etc/shadow').read()": "error: ",
    }
    for program, result in texts.items():
        found = step(factory, call("python", program=program))
        assert isinstance(found, Observation)
        assert found.messages[0]["content"].startswith(result), program
    asyncio.run(factory.close())


def test_a_template_that_knows_tools_tells_of_them_and_another_gets_a_system_message() -> None:
    knows = environment([{"kind": "calculator"}])
    assert [tool["function"]["name"] for tool in knows.tools] == ["calculator"]
    assert knows.instructions == ""
    plain = environment([{"kind": "calculator"}], template="{{ messages }}")
    assert plain.tools == []
    assert "calculator(expression: string): Works out an arithmetic expression." in plain.instructions
    assert "<calculator>...</calculator>" in plain.instructions
    assert plain.stop == ["</calculator>"]
    found = step(plain, "<calculator>1+2</calculator>")
    assert isinstance(found, Observation)
    assert found.messages == [{"role": "user", "content": "3"}]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two tools are called 'calculator'"):
        environment([{"kind": "calculator"}, {"kind": "calculator"}])


def test_passages_of_a_folder_are_found_by_their_words(tmp_path: Path) -> None:
    (tmp_path / "rivers.txt").write_text("The Nile flows north.\n\nThe Rhine flows into the North Sea.")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "hills.jsonl").write_text('{"text": "Mont Blanc is 4806 m high."}\n\n{"text": "A hill."}\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    factory = environment([{"kind": "retrieval", "folder": str(tmp_path), "top": 1, "passage_words": 8}])
    found = step(factory, call("search", query="how high is mont blanc?"))
    assert isinstance(found, Observation)
    assert found.messages[0]["content"] == "[below/hills.jsonl:1] Mont Blanc is 4806 m high."
    found = step(factory, call("search", query="rhine"))
    assert isinstance(found, Observation)
    assert found.messages[0]["content"] == "[rivers.txt] The Rhine flows into the North Sea."
    for query in ('" OR body:x', "NEAR(", "???"):
        found = step(factory, call("search", query=query))
        assert isinstance(found, Observation)
    assert "no word" in found.messages[0]["content"]
    asyncio.run(factory.close())


def test_long_texts_are_cut_between_words(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(" ".join(f"w{n}" for n in range(25)))
    passages = Passages(tmp_path, words=10)
    assert passages.count == 3
    assert passages.search("w24", 5) == [("a.md", "w20 w21 w22 w23 w24")]


@pytest.mark.parametrize(
    ("files", "says"),
    [(None, "no such folder"), ({}, "holds no text"), ({"a.jsonl": '{"txt": 1}'}, "not a JSON object with a `text`")],
)
def test_a_folder_without_texts_is_refused(tmp_path: Path, files: dict[str, str] | None, says: str) -> None:
    folder = tmp_path / "texts"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(DataError, match=says):
        environment([{"kind": "retrieval", "folder": str(folder)}])


class Mine:
    def __init__(self, size: int = 1) -> None:
        self.size = size

    async def reset(self, row: Any) -> None: ...

    async def step(self, turn: PolicyTurn) -> Done:
        return Done()

    async def close(self) -> None: ...


class Half:
    async def reset(self, row: Any) -> None: ...


@pytest.mark.parametrize(
    ("factory", "arguments", "says"),
    [
        ("Mine", {"length": 1}, "the arguments do not fit"),
        ("Half", {}, "has no `async def step`"),
        ("Nothing", {}, "has no function 'Nothing'"),
    ],
)
def test_an_environment_of_one_s_own_is_checked_before_it_is_used(
    factory: str, arguments: dict[str, Any], says: str
) -> None:
    from strop.config.environment import PythonEnvironment

    settings = PythonEnvironment(kind="python", factory=f"{__name__}:{factory}", arguments=arguments)
    with pytest.raises(UserError, match=says):
        build_environments(settings, None)
    good = PythonEnvironment(kind="python", factory=f"{__name__}:Mine", arguments={"size": 3})
    assert build_environments(good, None).make().size == 3
