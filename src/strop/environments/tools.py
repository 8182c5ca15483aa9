"""Tools: functions that the policy may call, told to it by JSON schema, with arguments that are checked first."""

from __future__ import annotations

import inspect
import json
import re
import typing
import warnings
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from strop.errors import UserError
from strop.rewards.calls import Slots
from strop.rewards.calls import call as call_in_a_thread

PLACES = 64
"""Calls of one tool at a time; more wait, and their time begins when their turn has come."""


class CallError(Exception):
    """What a call did wrong, told to the policy."""


@dataclass(frozen=True)
class Tool:
    """One function that the policy may call.

    name, description: what the policy is told. parameters: JSON schema of the arguments, an object. call: from
    arguments by name to a text; raises CallError for what the policy did wrong. places: bounds how many calls run at a
    time, and whoever calls takes one.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[str]]
    places: Slots = field(default_factory=lambda: Slots(PLACES), compare=False)

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible servers want it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """The schema of each parameter."""
        found = self.parameters.get("properties", {}).items()
        return {name: about if isinstance(about, dict) else {} for name, about in found}

    def named(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Arguments by name. Of a text: those of a JSON object with names of parameters, where there are several;
        else the text is the first one's.

        Raises:
            CallError: a text, and the tool takes no argument or needs several.
        """
        if not isinstance(arguments, str):
            return dict(arguments)
        names, required = list(self.properties), self.parameters.get("required", [])
        value = _json(arguments)
        if not names:
            if arguments.strip() and value != {}:
                raise CallError(f"{self.name} takes no argument")
            return {}
        if len(names) > 1:
            if isinstance(value, dict) and value and set(value) <= set(names):
                return value
            if len(required) > 1:
                raise CallError(
                    f"{self.name} needs {', '.join(required)}: write them as a JSON object, such as {self.example()}"
                )
        only = next((name for name in names if name in required), names[0])
        return {only: arguments if value is None or _takes_text(self.properties[only]) else value}

    def describe(self) -> str:
        """One line for a prompt: the name, the parameters, what it does."""
        listed = ", ".join(f"{name}: {about.get('type', 'any')}" for name, about in self.properties.items())
        return f"{self.name}({listed}): {self.description}"

    def describe_arguments(self) -> list[str]:
        """A line for each parameter of which there is more to say than its type."""
        required = self.parameters.get("required", [])
        lines = []
        for name, about in self.properties.items():
            more = [about["description"]] if about.get("description") else []
            if "enum" in about:
                more.append(f"one of {', '.join(json.dumps(one, ensure_ascii=False) for one in about['enum'])}")
            if name not in required:
                default = (
                    f", {json.dumps(about['default'], ensure_ascii=False)} if left out" if "default" in about else ""
                )
                more.append(f"optional{default}")
            if more:
                lines.append(f"{name}: {'; '.join(more)}")
        return lines

    def example(self) -> str:
        """Arguments as a JSON object, with a place for each value that is needed (or may be given, if none is)."""
        names = self.parameters.get("required") or list(self.properties)
        return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: ..." for name in names) + "}"


def function_tool(function: Callable[..., Any], *, where: str = "") -> Tool:
    """A tool of a Python function: its name, the first paragraph of its docstring, its arguments' types.

    Arguments are converted and checked by pydantic before the call; what does not fit is a CallError. The function may
    be `async`; another one runs in a daemon thread of its own, which is abandoned where the call is cancelled. A result
    that is not a text is shown as JSON.

    Args:
        where: key path of the setting that names it, for messages.

    Raises:
        UserError: it takes arguments by position only, or without names (`*args`, `**kwargs`), or of types that no
            JSON can be checked against.
    """
    name = getattr(function, "__name__", type(function).__name__)
    arguments, names = _arguments_model(function, name, where)
    text = inspect.getdoc(function) or name

    async def call(given: dict[str, Any]) -> str:
        try:
            checked = arguments.model_validate(given)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, detail['loc'])) or 'arguments'}: {detail['msg']}" for detail in error.errors()
            )
            raise CallError(problems) from None
        # What was not given is left to the function's own defaults.
        values = {names[key]: getattr(checked, key) for key in checked.model_fields_set}
        if inspect.iscoroutinefunction(function):
            result = await function(**values)
        else:
            result = await _apart(lambda: function(**values), name)
            if inspect.isawaitable(result):
                result = await result
        return result if isinstance(result, str) else _shown(result)

    parameters = _parameters(arguments, _described_arguments(text), name, where)
    return Tool(name, " ".join(text.split("\n\n")[0].split()), parameters, call)


async def _apart(function: Callable[[], Any], name: str) -> Any:
    """The result of a function in a thread of its own; CallError with what it raised, whatever that is."""

    def attempted() -> Any:
        try:
            return function(), None
        except Exception as error:
            # A coroutine cannot pass it on.
            return None, CallError(described(error)) if isinstance(error, StopIteration) else error
        except BaseException as error:
            return None, CallError(described(error))

    result, error = await call_in_a_thread(attempted, name=f"tool-{name}")
    if error is not None:
        raise error
    return result


def described(error: BaseException) -> str:
    """Type and message of what a tool raised."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # any object of the user's
        return kind
    return f"{kind}: {text}" if text else kind


def _arguments_model(function: Callable[..., Any], name: str, where: str) -> tuple[type[BaseModel], dict[str, str]]:
    """A model of the arguments, and the name of the argument that each of its fields stands for: pydantic keeps some
    names for itself (`_x`, `model_config`, `copy`, `schema`), so the arguments' names are aliases."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the tool {name!r} does not tell its arguments: {error}",
            where=where,
            mend="name a function of your own that calls it, with a name and a type for each argument",
        ) from None
    types, names = _types(function), {}
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"the tool {name!r} takes {parameter} without a name of its own",
                where=where,
                mend="give every argument a name; calls are by name",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        names[f"argument_{number}"] = parameter.name
        fields[f"argument_{number}"] = (types.get(parameter.name, Any), Field(default, alias=parameter.name))
    try:
        return create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields), names
    except Exception as error:
        raise _unusable(name, error, where) from error


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    if inspect.isclass(function):
        function = function.__init__
    elif not inspect.isroutine(function):
        function = getattr(function, "func", type(function).__call__)
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def _parameters(arguments: type[BaseModel], words: Mapping[str, str], name: str, where: str) -> dict[str, Any]:
    """The JSON schema of the arguments. words: what the docstring says of them."""
    try:
        with warnings.catch_warnings():
            # A default that is no JSON is not told; the function has it all the same.
            warnings.simplefilter("ignore")
            schema = arguments.model_json_schema()
    except Exception as error:
        raise _unusable(name, error, where) from error
    properties = {
        key: {k: v for k, v in about.items() if k != "title"} | ({"description": words[key]} if key in words else {})
        for key, about in schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    return parameters


def _unusable(name: str, error: Exception, where: str) -> UserError:
    said = str(error).strip().split("\n")[0]
    return UserError(
        f"the tool {name!r} takes an argument that cannot be made of JSON: {said}",
        where=where,
        mend="give its arguments types such as str, int, list[str], a Literal, a dataclass or a pydantic model",
    )


def _json(text: str) -> Any:
    """What a text is as JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _takes_text(about: Mapping[str, Any]) -> bool:
    """Whether a text may be a value of this schema."""
    if "anyOf" in about:
        return any(_takes_text(one) for one in about["anyOf"])
    kinds = about.get("type", [] if "$ref" in about else "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)


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
