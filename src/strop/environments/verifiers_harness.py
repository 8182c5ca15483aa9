"""A harness for `verifiers` that needs no program beside this one: it chats, and calls the tools that the task has.

Imported only where `verifiers` is installed, by `environments/verifiers.py`.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from strop.environments.chat import INVALID

ID = "strop_chat"
"""What configurations call it."""


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """It has no settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """One segment: the model speaks until a turn of its holds no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if trace.stop_condition is not None:
                    break
                if response.status_code != 200:
                    raise vf.HarnessError(f"the model answered {response.status_code}: {response.text[:500]}")
                choice = response.json()["choices"][0]
                messages.append(choice["message"])
                calls = choice["message"].get("tool_calls") or []
                if not calls or choice["finish_reason"] == "length":
                    break
                for call in calls:
                    content = await _called(connections, dispatch, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return vf.ProgramResult(0, "", "")


async def _called(connections: Any, dispatch: Any, function: dict[str, Any]) -> Any:
    """The result of a call, or what was wrong with it."""
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not valid JSON: {error}"
    if name == INVALID and name not in dispatch:
        return f"error: {arguments.get('problem')}"
    if name not in dispatch:
        return f"error: there is no tool {name!r}; there are {', '.join(dispatch)}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no object"
    try:
        return await call_mcp(connections, dispatch, name, arguments)
    except Exception as error:  # A tool fails at what it was given: the policy is told, and may do better.
        return f"error: {type(error).__name__}: {error}"


def _wire(message: Any) -> dict[str, Any]:
    from verifiers.v1.dialects.chat import message_to_wire

    return dict(message_to_wire(message))


def register() -> None:
    """Make the harness known to `verifiers`, which finds harnesses by the names of modules."""
    module = ModuleType(ID)
    module.__all__ = ["ChatHarness"]  # type: ignore[attr-defined]
    module.ChatHarness = ChatHarness  # type: ignore[attr-defined]
    module.ChatHarnessConfig = ChatHarnessConfig  # type: ignore[attr-defined]
    sys.modules.setdefault(ID, module)
