"""Tools: functions that the policy may call, told to it by JSON schema, with arguments that are checked first."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from strop.errors import UserError


class CallError(Exception):
    """What a call did wrong, told to the policy."""


@dataclass(frozen=True)
class Tool:
    """One function that the policy may call.

    name, description: what the policy is told. parameters: JSON schema of the arguments, an object. call: from
    arguments by name to a text; raises CallError for what the policy did wrong.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible servers want it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    def named(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Arguments by name; a text is the first parameter's.

        Raises:
            CallError: a text, and the tool takes no argument.
        """
        if not isinstance(arguments, str):
            return dict(arguments)
        names = list(self.parameters.get("properties", {}))
        if not names:
            raise CallError(f"{self.name} takes no argument")
        return {names[0]: arguments}

    def describe(self) -> str:
        """One line for a prompt: the name, the parameters, what it does."""
        properties = self.parameters.get("properties", {})
        listed = ", ".join(f"{name}: {about.get('type', 'any')}" for name, about in properties.items())
        return f"{self.name}({listed}): {self.description}"


def function_tool(function: Callable[..., Any], *, where: str = "") -> Tool:
    """A tool of a Python function: its name, the first paragraph of its docstring, its arguments' types.

    Arguments are converted and checked by pydantic before the call; what does not fit is a CallError. The function may
    be `async`; another one runs in a thread. A result that is not a text is shown as JSON.

    Args:
        where: key path of the setting that names it, for messages.

    Raises:
        UserError: it takes arguments by position only, or without names (`*args`, `**kwargs`).
    """
    name = getattr(function, "__name__", type(function).__name__)
    arguments = _arguments_model(function, name, where)
    text = inspect.getdoc(function) or name
    described = _described_arguments(text)
    schema = arguments.model_json_schema()
    properties = {
        key: {k: v for k, v in about.items() if k != "title"}
        | ({"description": described[key]} if key in described else {})
        for key, about in schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]

    async def call(given: dict[str, Any]) -> str:
        try:
            checked = arguments.model_validate(given)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, detail['loc'])) or 'arguments'}: {detail['msg']}" for detail in error.errors()
            )
            raise CallError(problems) from None
        values = {key: getattr(checked, key) for key in type(checked).model_fields}
        if inspect.iscoroutinefunction(function):
            result = await function(**values)
        else:
            result = await asyncio.to_thread(function, **values)
        return result if isinstance(result, str) else _shown(result)

    return Tool(name, " ".join(text.split("\n\n")[0].split()), parameters, call)


def _arguments_model(function: Callable[..., Any], name: str, where: str) -> type[BaseModel]:
    try:
        types = typing.get_type_hints(function)
    except (NameError, TypeError):
        types = {}
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"the tool {name!r} takes {parameter} without a name of its own",
                where=where,
                mend="give every argument a name; calls are by name",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (types.get(parameter.name, Any), default)
    return create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _described_arguments(docstring: str) -> dict[str, str]:
    """What a docstring in Google's style says of each argument."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return {}
    found = re.findall(r"^[ \t]+(\w+)(?: \([^)]*\))?:[ \t]*(.*(?:\n[ \t]{6,}.*)*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        try:
            return TypeAdapter(type(value)).dump_json(value).decode()
        except Exception:  # any object of the user's: its own text is better than none
            return str(value)
