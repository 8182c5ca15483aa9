"""Tools of real MCP servers: one that speaks over its input and output, one over HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.config.environment import ToolEnvironment
from strop.environments.build import ToolFactory
from strop.environments.protocol import Observation, PolicyTurn
from strop.errors import UserError

SERVER = """
import sys
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")

@server.tool()
def double(number: int) -> str:
    "Doubles a number."
    return str(2 * number)

@server.tool()
def refuse() -> str:
    "Never works."
    raise ToolError("not today")

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""
TURN = (
    '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    '<tool_call>{"name": "refuse", "arguments": {}}</tool_call>'
)


def factory(**where: Any) -> ToolFactory:
    tools = [{"kind": "mcp", **where}]
    settings = ToolEnvironment.model_validate({"kind": "tools", "tools": tools, "style": "hermes"})
    return ToolFactory(settings, "tools <tool_call>")


async def answers(made: ToolFactory) -> list[str]:
    await made.open()
    try:
        found = await made.make().step(PolicyTurn(TURN))
        assert isinstance(found, Observation)
        return [message["content"] for message in found.messages]
    finally:
        await made.close()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def address(script: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def check(made: ToolFactory) -> None:
    assert [tool["function"]["name"] for tool in made.tools] == ["double", "refuse"]
    assert made.tools[0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    doubled, refused = asyncio.run(answers(made))
    assert doubled == "42"
    assert refused.startswith("error: ")
    assert "not today" in refused


def test_a_server_that_is_started_by_a_command(script: Path) -> None:
    check(factory(command=[sys.executable, str(script)]))


def test_a_server_that_runs_already(address: str) -> None:
    check(factory(url=address))


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be asked for its tools"):
        factory(command=[str(tmp_path / "nothing")])


def test_a_server_that_writes_what_is_no_protocol_is_told_in_the_error_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chatty.py"
    path.write_text("print('hello from me', flush=True)\nimport sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match="cannot be asked for its tools") as found:
        factory(command=[sys.executable, str(path)])
    assert "hello from me" in str(found.value)
    assert "Traceback" not in str(found.value)
    assert capfd.readouterr() == ("", "")
