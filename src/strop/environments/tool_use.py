"""The environment of tool use: calls in a turn are answered, a turn without a call ends the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from strop.config.environment import ToolEnvironment
from strop.environments.call_styles import Call, CallStyle, Hermes, Llama3, Mistral, Tags, style_of_template
from strop.environments.protocol import Done, Message, Observation, PolicyTurn
from strop.environments.tools import CallError, Tool
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
        try:
            async with asyncio.timeout(self._settings.call_timeout):
                return await tool.call(tool.named(call.arguments))
        except TimeoutError:
            raise CallError(f"{tool.name} took longer than {self._settings.call_timeout:g} seconds") from None
        except (CallError, SandboxError):
            raise
        except Exception as error:  # A tool fails at what it was given: the policy is told, and may do better.
            raise CallError(f"{type(error).__name__}: {error}") from None


def make_style(settings: ToolEnvironment, tools: Sequence[Tool], template: str | None) -> CallStyle:
    """The style of calls that a recipe asks for, or that the chat template speaks."""
    name = style_of_template(template) if settings.style == "auto" else settings.style
    if name == "tag":
        return Tags([tool.name for tool in tools], settings.result, settings.opening, settings.closing)
    return {"hermes": Hermes, "llama3": Llama3, "mistral": Mistral}[name]()


def instructions(tools: Sequence[Tool], style: CallStyle) -> str:
    """What a system prompt tells a model whose chat template knows nothing of tools."""
    listed = "\n".join(f"- {tool.describe()}" for tool in tools)
    example = tools[0].name
    opening, closing = f"<{example}>", f"</{example}>"
    if isinstance(style, Tags) and style.opening is not None:
        opening, closing = style.opening, style.closing or ""
    return (
        f"You can use these tools:\n{listed}\nTo use one, write {opening}...{closing} with its argument between. "
        "You will be shown the result, and can go on from there. An answer without a call is your last."
    )
