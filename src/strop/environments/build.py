"""From `environment:` in a recipe to what makes the environments of a run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from strop.config.adapted_environments import (
    EnvironmentSettings,
    GymnasiumEnvironment,
    OpenEnvEnvironment,
    SlimeEnvironment,
    VerifiersEnvironment,
)
from strop.config.environment import (
    CalculatorTool,
    FunctionTool,
    McpTools,
    PythonEnvironment,
    PythonTool,
    RetrievalTool,
    SelfPlayEnvironment,
    ToolEnvironment,
)
from strop.environments.calculator import calculator
from strop.environments.gymnasium import GymnasiumFactory
from strop.environments.mcp import McpServer
from strop.environments.openenv import OpenEnvFactory
from strop.environments.protocol import Environment, EnvironmentFactory
from strop.environments.python_tool import python_tool
from strop.environments.retrieval import Passages
from strop.environments.slime import SlimeFactory
from strop.environments.tool_use import ToolUse, instructions, knows_tools, make_style
from strop.environments.tools import Tool, function_tool
from strop.environments.verifiers import VerifiersFactory
from strop.errors import UserError
from strop.paths import user_path
from strop.rewards.python import load_function
from strop.sandbox.build import SharedSandbox


class ToolFactory(EnvironmentFactory):
    """Makes environments of tool use that share their tools.

    Args:
        template: the tokenizer's chat template, None without one. sandbox: where programs run. where: key path of the
            settings, for messages.

    Raises:
        UserError: a tool cannot be made, or two have the same name.
    """

    def __init__(
        self,
        settings: ToolEnvironment,
        template: str | None,
        sandbox: SharedSandbox | None = None,
        *,
        where: str = "environment",
    ) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._servers: list[McpServer] = []
        self._passages: list[Passages] = []
        found = [
            tool
            for number, tool_settings in enumerate(settings.tools)
            for tool in self._tools_of(tool_settings, f"{where}.tools.{number}")
        ]
        self._by_name = {tool.name: tool for tool in found}
        if len(self._by_name) < len(found):
            names = [tool.name for tool in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(
                f"two tools are called {twice!r}, so a call could mean either",
                where=f"{where}.tools",
                mend="leave one of them out, or rename a function",
            )
        self._style = make_style(settings, found, template)
        self.names = [tool.name for tool in found]
        """Of the tools."""
        self.marks = [self._style.marks(tool.name) for tool in found]
        """What a call of each cannot do without: how it begins, and how it ends."""
        default = ToolEnvironment.model_fields["max_calls"].default
        if self._style.stop and settings.max_calls != default:
            raise UserError(
                f"`{where}.max_calls` has no effect with calls in tags: a turn ends with its first call",
                where=f"{where}.max_calls",
                mend="remove it",
            )
        told = self._style.template_tells and knows_tools(template)
        self.tools = [tool.schema for tool in found] if told else []
        self.instructions = "" if told else instructions(found, self._style)
        self.stop = self._style.stop
        self.forks = True

    def make(self) -> Environment:
        return ToolUse(self._by_name, self._style, self._settings)

    async def open(self) -> None:
        for server in self._servers:
            await server.open()

    async def close(self) -> None:
        for server in self._servers:
            await server.close()
        for passages in self._passages:
            passages.close()

    def _tools_of(self, settings: Any, where: str) -> list[Tool]:
        match settings:
            case CalculatorTool():
                return [function_tool(calculator)]
            case FunctionTool():
                return [function_tool(load_function(settings.path, where=f"{where}.path"), where=f"{where}.path")]
            case PythonTool():
                if self._sandbox is None:
                    raise ValueError("the tool `python` needs a sandbox")
                return [python_tool(self._sandbox.get(), self._sandbox.settings.limits)]
            case RetrievalTool():
                return [self._search(settings)]
            case McpTools():
                server = McpServer(settings, where=where)
                self._servers.append(server)
                return server.tools()
        raise AssertionError(settings)

    def _search(self, settings: RetrievalTool) -> Tool:
        passages = Passages(user_path(settings.folder), words=settings.passage_words)
        self._passages.append(passages)

        def search(query: str) -> str:
            """Searches a collection of texts.

            Args:
                query: words to look for.
            """
            found = passages.search(query, settings.top)
            return "\n\n".join(f"[{source}] {text}" for source, text in found) or "nothing was found"

        return function_tool(search)


class PythonFactory(EnvironmentFactory):
    """Makes objects of a class of the user's: environments, or matches of several roles."""

    def __init__(self, settings: PythonEnvironment | SelfPlayEnvironment, *, where: str = "environment") -> None:
        self.name = settings.factory
        self._class = load_function(settings.factory, where=f"{where}.factory")
        self._arguments = settings.arguments
        self.forks = inspect.iscoroutinefunction(getattr(self._class, "fork", None))
        match = isinstance(settings, SelfPlayEnvironment)
        self.roles = _roles(self._class, settings.factory, f"{where}.factory") if match else ()
        try:
            inspect.signature(self._class).bind(**settings.arguments)
        except TypeError as error:
            raise UserError(
                f"the arguments do not fit {settings.factory}: {error}",
                where=f"{where}.arguments",
                mend=f"it takes {inspect.signature(self._class)}",
            ) from error
        except ValueError:
            pass  # a class without a signature: the call itself will tell
        methods = ["reset(row)", "step(role, turn)", "rewards()"] if match else ["reset(row)", "step(turn)"]
        for method in [*methods, "close()"]:
            name = method.partition("(")[0]
            if inspect.isclass(self._class) and not inspect.iscoroutinefunction(getattr(self._class, name, None)):
                listed = ", ".join(f"`async {one}`" for one in methods)
                raise UserError(
                    f"{settings.factory} has no `async def {name}`",
                    where=f"{where}.factory",
                    mend=f"{'a match' if match else 'an environment'} has {listed} and `async close()`",
                )
        if inspect.isclass(self._class):
            for method in [*methods, "close()", *(["fork()"] if self.forks else [])]:
                _check_call(self._class, method, settings.factory, f"{where}.factory")

    def make(self) -> Environment:
        return self._class(**self._arguments)


def _check_call(made: type, method: str, name: str, where: str) -> None:
    """Check that a method can be called as `method` says, such as `step(role, turn)`.

    Raises:
        UserError: it takes other arguments.
    """
    called, _, given = method.rstrip(")").partition("(")
    arguments = [one for one in given.split(", ") if one]
    fixed = isinstance(inspect.getattr_static(made, called), (staticmethod, classmethod))
    found = getattr(made, called)
    try:
        inspect.signature(found).bind(*arguments if fixed else ["self", *arguments])
    except TypeError as error:
        raise UserError(
            f"`{called}` of {name} takes other arguments: {error}",
            where=where,
            mend=f"write it as `async def {called}({', '.join(['self', *arguments])})`",
        ) from error
    except ValueError:
        return  # no signature to be found: the call itself will tell


def _roles(factory: Any, name: str, where: str) -> Sequence[str]:
    """The roles of a class of matches.

    Raises:
        UserError: it does not name at least two.
    """
    found: Any = getattr(factory, "roles", None)
    fits = isinstance(found, (list, tuple)) and all(isinstance(role, str) for role in found)
    if not fits or len(set(found)) < 2 or len(set(found)) < len(found):
        raise UserError(
            f"{name} has no `roles`, or not two different names at least",
            where=where,
            mend='name them in the class, as in `roles = ("buyer", "seller")`',
        )
    return tuple(found)


def build_environments(
    settings: EnvironmentSettings, template: str | None, sandbox: SharedSandbox | None = None
) -> EnvironmentFactory:
    """The factory of a recipe's environments.

    Args:
        template: the tokenizer's chat template; None without one. sandbox: where programs run; the tool
            `python` needs one, and does not close it.

    Raises:
        UserError: a function cannot be imported, a folder is empty, a server does not start, there is no sandbox.
    """
    if isinstance(settings, ToolEnvironment):
        return ToolFactory(settings, template, sandbox)
    if isinstance(settings, GymnasiumEnvironment):
        return GymnasiumFactory(settings)
    if isinstance(settings, OpenEnvEnvironment):
        return OpenEnvFactory(settings)
    if isinstance(settings, VerifiersEnvironment):
        return VerifiersFactory(settings, template)
    if isinstance(settings, SlimeEnvironment):
        return SlimeFactory(settings)
    return PythonFactory(settings)
