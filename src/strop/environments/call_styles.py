"""How models write calls of tools, and how results are shown to them: Hermes (Qwen), Llama 3, Mistral, plain tags."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from strop.environments.protocol import Message
from strop.rewards.failures import encodable


@dataclass(frozen=True)
class Call:
    """One call that a turn holds.

    arguments: by name, or a text where the style has no names. problem: why the call could not be understood; None when
    it could.
    """

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)
    problem: str | None = None


class CallStyle(Protocol):
    """Reads calls out of a turn, and makes messages of the results."""

    template_tells: bool
    """Whether the chat template tells the model of the tools."""
    stop: Sequence[str]
    """Texts after which a turn ends, so that the result comes from the tool and not from the model."""

    def calls(self, text: str) -> list[Call]:
        """The calls of a turn, in order; empty if it holds none."""
        ...

    def message(self, text: str, calls: Sequence[Call]) -> Message | None:
        """How the turn stands among the messages; None for `{"role": "assistant", "content": text}`."""
        ...

    def results(self, calls: Sequence[Call], results: Sequence[str]) -> list[Message]:
        """The messages that answer a turn."""
        ...

    def example(self, name: str, arguments: str) -> str:
        """How a call is written. arguments: a JSON object, in which places may be left."""
        ...

    def marks(self, name: str) -> tuple[str, str]:
        """What a call cannot do without: how it begins, and how it ends."""
        ...


@dataclass(frozen=True)
class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen 2.5 and 3.

    told: whether the chat template knows tools; if not, results are shown in a message of the user's.
    """

    told: bool = True
    template_tells = True
    stop: ClassVar[Sequence[str]] = ()
    _BLOCK: ClassVar[re.Pattern[str]] = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)

    def calls(self, text: str) -> list[Call]:
        found = []
        for match in self._BLOCK.finditer(text):
            if not match[2]:
                found.append(Call("", problem="<tool_call> is not closed"))
            else:
                found.append(_from_json(match[1], "arguments"))
        return found

    def message(self, text: str, calls: Sequence[Call]) -> Message | None:
        return None

    def results(self, calls: Sequence[Call], results: Sequence[str]) -> list[Message]:
        if not self.told:
            shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
            return [{"role": "user", "content": shown}]
        return [{"role": "tool", "name": c.name, "content": r} for c, r in zip(calls, results, strict=True)]

    def example(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": {_quoted(name)}, "arguments": {arguments}}}\n</tool_call>'

    def marks(self, name: str) -> tuple[str, str]:
        return f'<tool_call>{{"name":{_quoted(name)}', "}</tool_call>"


@dataclass(frozen=True)
class Llama3:
    """The turn is `{"name": ..., "parameters": {...}}`, or several joined by `;`: Llama 3.1 and later.

    told: as of `Hermes`.
    """

    told: bool = True
    template_tells = True
    stop: ClassVar[Sequence[str]] = ()

    def calls(self, text: str) -> list[Call]:
        body = text.strip().removeprefix("<|python_tag|>").strip()
        if not re.match(r'\{\s*"(name|type|parameters)"', body):
            return []
        decoder, found, at = json.JSONDecoder(), [], 0
        while at < len(body):
            try:
                value, at = decoder.raw_decode(body, at)
            except (ValueError, RecursionError) as error:
                found.append(Call("", problem=f"not valid JSON: {error}"))
                break
            found.append(_from_value(value, "parameters"))
            at = re.compile(r"[\s;]*").match(body, at).end()  # type: ignore[union-attr]
        return found

    def message(self, text: str, calls: Sequence[Call]) -> Message | None:
        return None

    def results(self, calls: Sequence[Call], results: Sequence[str]) -> list[Message]:
        if not self.told:
            return [{"role": "user", "content": "\n".join(results)}]
        return [{"role": "tool", "name": c.name, "content": r} for c, r in zip(calls, results, strict=True)]

    def example(self, name: str, arguments: str) -> str:
        return f'{{"name": {_quoted(name)}, "parameters": {arguments}}}'

    def marks(self, name: str) -> tuple[str, str]:
        return f'{{"name":{_quoted(name)}', "}"


@dataclass(frozen=True)
class Mistral:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`: Mistral 7B v0.3 and later.

    told: as of `Hermes`.
    """

    told: bool = True
    template_tells = True
    stop: ClassVar[Sequence[str]] = ()

    def calls(self, text: str) -> list[Call]:
        # The marker is a special token, which decoding leaves out.
        body = text.partition("[TOOL_CALLS]")[2] if "[TOOL_CALLS]" in text else text
        body = body.strip()
        if not re.match(r"\[\s*\{", body):
            return []
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            return [Call("", problem=f"not valid JSON: {error}")]
        return [_from_value(value, "arguments") for value in values]

    def message(self, text: str, calls: Sequence[Call]) -> Message | None:
        if not self.told or _none_understood(calls):
            return None
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": _call_id(n), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for n, c in enumerate(calls)
            ],
        }

    def results(self, calls: Sequence[Call], results: Sequence[str]) -> list[Message]:
        if not self.told or _none_understood(calls):
            # Results follow calls in this template, and there was none.
            return [{"role": "user", "content": "\n".join(results)}]
        return [
            {"role": "tool", "name": c.name, "content": r, "tool_call_id": _call_id(n)}
            for n, (c, r) in enumerate(zip(calls, results, strict=True))
        ]

    def example(self, name: str, arguments: str) -> str:
        return f'[TOOL_CALLS] [{{"name": {_quoted(name)}, "arguments": {arguments}}}]'

    def marks(self, name: str) -> tuple[str, str]:
        return f'[{{"name":{_quoted(name)}', "}]"


@dataclass(frozen=True)
class Tags:
    """`<name>argument</name>` for each tool, or one pair of texts for a single tool; for any model. Several arguments
    are a JSON object (`Tool.named`).

    names: of the tools. result: a template with `{result}`. opening, closing: of the single tool's calls.
    """

    names: Sequence[str]
    result: str = "{result}"
    opening: str | None = None
    closing: str | None = None
    template_tells = False

    @property
    def stop(self) -> Sequence[str]:
        return [self.closing] if self.closing else [f"</{name}>" for name in self.names]

    def calls(self, text: str) -> list[Call]:
        found: list[tuple[int, Call]] = []
        for name in self.names:
            opening, closing = self.marks(name)
            at = text.find(opening)
            while at >= 0:
                begin = at + len(opening)
                end = text.find(closing, begin)
                if end < 0:
                    found.append((at, Call(name, problem=f"{opening} is not closed by {closing}")))
                    break
                found.append((at, Call(name, text[begin:end])))
                at = text.find(opening, end + len(closing))
        return [call for _, call in sorted(found, key=lambda pair: pair[0])]

    def message(self, text: str, calls: Sequence[Call]) -> Message | None:
        return None

    def results(self, calls: Sequence[Call], results: Sequence[str]) -> list[Message]:
        shown = "\n".join(self.result.replace("{result}", result) for result in results)
        return [{"role": "user", "content": shown}]

    def example(self, name: str, arguments: str) -> str:
        begin, end = self.marks(name)
        return f"{begin}{arguments}{end}"

    def marks(self, name: str) -> tuple[str, str]:
        return self.opening or f"<{name}>", self.closing or f"</{name}>"


def style_of_template(template: str | None) -> str:
    """The style that a chat template speaks: `hermes`, `llama3`, `mistral`, or `tag` where it knows no tools."""
    text = template or ""
    for mark, style in (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3")):
        if mark in text:
            return style
    return "llama3" if "ipython" in text else "tag"


def _from_json(text: str, key: str) -> Call:
    try:
        return _from_value(json.loads(text), key)
    except (ValueError, RecursionError) as error:
        return Call("", problem=f"not valid JSON: {error}")


def _from_value(value: Any, key: str) -> Call:
    try:
        return _call_of(value, key)
    except RecursionError:
        return Call("", problem="not valid JSON: it is nested too deeply")


def _call_of(value: Any, key: str) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", problem=f'a call is an object with "name" and "{key}"')
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    if isinstance(arguments, str):
        # Some models write the arguments as JSON within JSON.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return Call(encodable(value["name"]), problem=f'"{key}" must be an object')
    return Call(encodable(value["name"]), _all_encodable(arguments))


def _all_encodable(value: Any) -> Any:
    if isinstance(value, dict):
        return {encodable(name): _all_encodable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_all_encodable(one) for one in value]
    return encodable(value) if isinstance(value, str) else value


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _none_understood(calls: Sequence[Call]) -> bool:
    return all(call.problem is not None for call in calls)


def _call_id(number: int) -> str:
    """Nine letters and digits, which Mistral's template asks for."""
    return f"call{number:05d}"
