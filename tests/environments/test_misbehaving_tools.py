"""Tools that hang, leave, or answer oddly, and signatures that pydantic keeps for itself: no run ends of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from pydantic import Field

from strop.config.environment import ToolEnvironment
from strop.environments import tools
from strop.environments.build import ToolFactory
from strop.environments.call_styles import Hermes, Llama3, Mistral
from strop.environments.protocol import Observation, PolicyTurn
from strop.environments.tools import CallError, function_tool
from strop.errors import UserError

HERMES = "... <tool_call> ... tools ..."
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
released = threading.Event()


def hangs() -> str:
    """Comes back when it is released."""
    released.wait()
    return "late"


def leaves(how: str) -> str:
    """Raises what is no Exception."""
    raise {
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "cancel": asyncio.CancelledError(),
        "stop": StopIteration(1),
        "generator": GeneratorExit(),
        "late": TimeoutError("the server is asleep"),
    }[how]


async def leaves_async(how: str) -> str:
    """The same, on the loop."""
    return leaves(how)


def half() -> str:
    """Half of a character."""
    return "a\ud800b"


def fails_by_half() -> str:
    """Half of a character in an error."""
    raise ValueError("a\ud800b")


def later(number: int) -> Awaitable[int]:
    """A plain function that returns a coroutine."""

    async def twice() -> int:
        await asyncio.sleep(0)
        return 2 * number

    return twice()


def reserved(_x: int, model_config: str, schema: str, copy: int = 3, json: str = "j", self: int = 1) -> list[Any]:
    """Takes names that pydantic keeps."""
    return [_x, model_config, schema, copy, json, self]


def weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
        city: where.
        days: how many.
    """
    return f"{city}:{days}"


def route(start: str, end: str) -> str:
    """Finds a way."""
    return f"{start}-{end}"


def now() -> str:
    """Tells the time."""
    return "noon"


def total(numbers: list[int]) -> int:
    """Adds up."""
    return sum(numbers)


def environment(*names: str, template: str | None = HERMES, **settings: Any) -> ToolFactory:
    found = [{"kind": "function", "path": f"{__name__}:{name}"} for name in names]
    return ToolFactory(ToolEnvironment.model_validate({"kind": "tools", "tools": found, **settings}), template)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def answered(factory: ToolFactory, text: str) -> list[str]:
    found = await factory.make().step(PolicyTurn(text))
    assert isinstance(found, Observation)
    return [message["content"] for message in found.messages]


def test_calls_that_hang_take_nothing_from_other_tools_and_give_their_places_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tools, "PLACES", 2)
    released.clear()
    factory = environment("hangs", "now", call_timeout=0.1, max_calls=50)
    try:
        # More than there are places, and more than the threads of an executor.
        hung = asyncio.run(answered(factory, call("hangs") * 40))
        assert set(hung) == {"error: hangs took longer than 0.1 seconds"}
        assert asyncio.run(answered(factory, call("now"))) == ["noon"]
    finally:
        released.set()
    assert asyncio.run(answered(factory, call("hangs"))) == ["late"]


def test_a_tool_that_hangs_does_not_keep_the_process_alive() -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
import test_misbehaving_tools as here
print(asyncio.run(here.answered(here.environment("hangs", call_timeout=0.1), here.call("hangs"))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "took longer than 0.1 seconds" in done.stdout


@pytest.mark.parametrize("name", ["leaves", "leaves_async"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "error: SystemExit: 3"),
        ("interrupt", "error: KeyboardInterrupt"),
        ("cancel", "error: CancelledError"),
        ("late", "error: TimeoutError: the server is asleep"),
    ],
)
def test_whatever_a_tool_raises_is_told(name: str, how: str, says: str) -> None:
    assert asyncio.run(answered(environment(name), call(name, how=how))) == [says]


@pytest.mark.parametrize(("how", "says"), [("stop", "error: StopIteration: 1"), ("generator", "error: GeneratorExit")])
def test_what_no_coroutine_can_raise_is_told_too(how: str, says: str) -> None:
    assert asyncio.run(answered(environment("leaves"), call("leaves", how=how))) == [says]


@pytest.mark.parametrize("name", ["hangs", "waits"])
def test_a_turn_that_is_cancelled_is_cancelled(name: str) -> None:
    released.clear()

    async def cancelled() -> bool:
        task = asyncio.create_task(answered(environment(name), call(name)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    try:
        assert asyncio.run(cancelled())
    finally:
        released.set()


async def waits() -> str:
    """Waits for ever."""
    await asyncio.Event().wait()
    return ""


def test_texts_that_no_tokenizer_takes_are_mended() -> None:
    factory = environment("half", "fails_by_half")
    assert asyncio.run(answered(factory, call("half") + call("fails_by_half"))) == [
        r"a\ud800b",
        r"error: ValueError: a\ud800b",
    ]
    # The policy may write one too, as JSON spells it, and the template would show it again.
    for style, text in (
        (Hermes(), '<tool_call>{"name": "x\\ud800", "arguments": {"a\\ud800": ["\\ud800"]}}</tool_call>'),
        (Llama3(), '{"name": "x\\ud800", "parameters": {"a\\ud800": ["\\ud800"]}}'),
        (Mistral(), '[{"name": "x\\ud800", "arguments": {"a\\ud800": ["\\ud800"]}}]'),
    ):
        (found,) = style.calls(text)
        assert (found.name, found.arguments) == (r"x\ud800", {r"a\ud800": [r"\ud800"]})
        json.dumps([style.message(text, [found]), style.results([found], ["r"])], ensure_ascii=False).encode()


def test_a_plain_function_may_return_a_coroutine() -> None:
    assert asyncio.run(answered(environment("later"), call("later", number=4))) == ["8"]


def test_arguments_may_have_names_that_pydantic_keeps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tool = function_tool(reserved)
    assert list(tool.parameters["properties"]) == ["_x", "model_config", "schema", "copy", "json", "self"]
    assert tool.parameters["required"] == ["_x", "model_config", "schema"]
    given = {"_x": "1", "model_config": "m", "schema": "s", "json": "k"}
    assert json.loads(asyncio.run(tool.call(given))) == [1, "m", "s", 3, "k", 1]
    with pytest.raises(CallError, match="argument_0: Extra inputs"):
        asyncio.run(tool.call({**given, "argument_0": 1}))


def test_defaults_that_are_no_json_stay_the_functions_own() -> None:
    marker = object()

    def tool(text: Annotated[str, Field(description="what to say")], mark: Any = marker) -> str:
        """Says it."""
        return f"{text} {mark is marker}"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = function_tool(tool)
    assert made.parameters["properties"]["text"]["description"] == "what to say"
    assert asyncio.run(made.call({"text": "a"})) == "a True"


def odd(value: threading.Event) -> str:
    """Takes what no JSON makes."""
    return str(value)


def odder(value: Callable[[], int]) -> str:
    """Takes what has no schema."""
    return str(value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("builtins:int", "does not tell its arguments"),
        ("builtins:len", "without a name of its own"),
        (f"{__name__}:odd", "cannot be made of JSON"),
        (f"{__name__}:odder", "cannot be made of JSON"),
    ],
)
def test_functions_whose_arguments_cannot_be_told_are_refused(path: str, says: str) -> None:
    settings = {"kind": "tools", "tools": [{"kind": "function", "path": path}]}
    with pytest.raises(UserError, match=says) as found:
        ToolFactory(ToolEnvironment.model_validate(settings), HERMES)
    assert found.value.where == "environment.tools.0.path"
    assert found.value.mend


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<weather>Rome</weather>", "Rome:1"),
        ('<weather>{"city": "Rome", "days": 3}</weather>', "Rome:3"),
        ('<weather>{"town": "Rome"}</weather>', '{"town": "Rome"}:1'),
        ('<route>{"start": "A", "end": "B"}</route>', "A-B"),
        ('<route>{"start": "A"}</route>', "error: end: Field required"),
        (
            "<route>A, B</route>",
            'error: route needs start, end: write them as a JSON object, such as {"start": ..., "end": ...}',
        ),
        ("<now></now>", "noon"),
        ("<now>{}</now>", "noon"),
        ("<now>today</now>", "error: now takes no argument"),
        ("<total>[1, 2, 3]</total>", "6"),
    ],
)
def test_tags_take_one_argument_as_it_is_and_several_as_json(text: str, says: str) -> None:
    factory = environment("weather", "route", "now", "total", template=None)
    assert asyncio.run(answered(factory, text)) == [says]


def test_a_single_text_that_looks_like_json_stays_a_text() -> None:
    def search(query: str) -> str:
        """Finds."""
        return query

    assert function_tool(search).named('{"query": 1}') == {"query": '{"query": 1}'}


def test_tags_are_taught_with_all_that_is_to_know() -> None:
    told = environment("weather", "route", "now", "total", template=PLAIN).instructions
    assert "- weather(city: string, days: integer): Tells the weather." in told
    assert "  - city: where." in told
    assert "  - days: how many.; optional, 1 if left out" in told
    assert "<total>...</total>" in told
    assert '<weather>{"city": ...}</weather>' in told
    assert "<now></now>" in told


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
def test_a_forced_style_is_taught_as_it_is_read(style: str) -> None:
    factory = environment("route", "weather", template=PLAIN, style=style)
    told = factory.instructions
    assert "<route>" not in told
    assert factory.tools == []
    assert '"description": "how many."' in told  # The schema is told.
    example = told.split("...:\n", 1)[1].rsplit("\n", 1)[0]
    filled = example.replace('"start": ...', '"start": "A"').replace('"end": ...', '"end": "B"')
    turn = asyncio.run(factory.make().step(PolicyTurn(filled)))
    assert isinstance(turn, Observation)
    # Such a template may know no role `tool`.
    assert [message["role"] for message in turn.messages] == ["user"]
    assert "A-B" in turn.messages[0]["content"]
    assert turn.turn is None
