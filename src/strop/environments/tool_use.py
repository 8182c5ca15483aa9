"""The environment of tool use: calls in a turn are answered, a turn without a call ends the episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from strop.config.environment import ToolEnvironment
from strop.environments.call_styles import Call, CallStyle, Hermes, Llama3, Mistral, Tags, style_of_template
from strop.environments.protocol import Done, Message, Observation, PolicyTurn
from strop.environments.tools import CallError, Tool, described
from strop.rewards.failures import encodable
from strop.sandbox.protocol import SandboxError


class ToolUse:
    """One episode of tool use; see `ToolEnvironment` for the settings."""

    def __init__(self, tools: Mapping[str, Tool], style: CallStyle, settings: ToolEnvironment) -> None:
        self._tools = tools
        self._style = style
        self._settings = settings

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        return None

    async def step(self, turn: PolicyTurn) -> Observation | Done:
        calls = self._style.calls(turn.text)
        if not calls:
            return Done()
        answers = await asyncio.gather(*(self._answer(number, call) for number, call in enumerate(calls)))
        malformed = sum(call.problem is not None for call in calls)
        penalty = -self._settings.malformed_penalty * malformed if self._settings.malformed_penalty else None
        return Observation(self._style.results(calls, list(answers)), penalty, self._style.message(turn.text, calls))

    async def fork(self) -> ToolUse:
        """The same: nothing is remembered between turns."""
        return self

    async def close(self) -> None:
        """Nothing is held."""

    async def _answer(self, number: int, call: Call) -> str:
        try:
            text = await self._called(number, call)
        except CallError as error:
            text = f"error: {error}"
        text = encodable(text)
        limit = self._settings.max_result_characters
        return text if len(text) <= limit else f"{text[:limit]}\n({len(text) - limit} more characters are cut off)"

    async def _called(self, number: int, call: Call) -> str:
        if number >= self._settings.max_calls:
            raise CallError(f"at most {self._settings.max_calls} calls are allowed in one turn")
        if call.problem is not None:
            raise CallError(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            raise CallError(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        async with tool.places.here():
            return await self._in_time(tool, call)

    async def _in_time(self, tool: Tool, call: Call) -> str:
        limit = self._settings.call_timeout
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await tool.call(tool.named(call.arguments))
        except (CallError, SandboxError, GeneratorExit):
            raise
        except BaseException as error:  # A tool fails at what it was given: the policy is told, and may do better.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if scope.expired():
                raise CallError(f"{tool.name} took longer than {limit:g} seconds") from None
            raise CallError(described(error)) from None


def make_style(settings: ToolEnvironment, tools: Sequence[Tool], template: str | None) -> CallStyle:
    """The style of calls that a recipe asks for, or that the chat template speaks."""
    name = style_of_template(template) if settings.style == "auto" else settings.style
    if name == "tag":
        tags: Any = Tags([tool.name for tool in tools], settings.result, settings.opening, settings.closing)
        return tags
    # Without any template contents are joined as they are, whosever they are.
    told = template is None or knows_tools(template)
    styles: dict[str, Any] = {"hermes": Hermes, "llama3": Llama3, "mistral": Mistral}
    return styles[name](told=told)


def knows_tools(template: str | None) -> bool:
    """Whether a chat template tells the model of tools."""
    return template is not None and "tools" in template


def instructions(tools: Sequence[Tool], style: CallStyle) -> str:
    """What a system prompt tells a model whose chat template knows nothing of tools."""
    how = _in_tags(tools, style) if isinstance(style, Tags) else _in_json(tools, style)
    return f"{how}\nYou will be shown the result, and can go on from there. An answer without a call is your last."


def _in_tags(tools: Sequence[Tool], style: CallStyle) -> str:
    listed = "\n".join(
        "\n".join([f"- {tool.describe()}", *(f"  - {line}" for line in tool.describe_arguments())]) for tool in tools
    )
    told = f"You can use these tools:\n{listed}\n"
    several = [tool for tool in tools if len(tool.properties) > 1]
    few = [tool for tool in tools if len(tool.properties) == 1]
    none = [tool for tool in tools if not tool.properties]
    ways = []
    if few:
        ways.append(f"To use one, write {style.example(few[0].name, '...')} with its argument between.")
    if several:
        whose = "To use one that has several arguments" if few else "To use one"
        example = style.example(several[0].name, several[0].example())
        ways.append(f"{whose}, write them as a JSON object: {example}")
    if none:
        ways.append(f"Without arguments, a call is {style.example(none[0].name, '')}")
    return told + "\n".join(ways)


def _in_json(tools: Sequence[Tool], style: CallStyle) -> str:
    schemas = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
    example = style.example(tools[0].name, tools[0].example())
    return (
        f"You can use these tools, each of which is described by a JSON schema:\n{schemas}\n"
        f"To use one, write the call as JSON, with a value for each ...:\n{example}"
    )
