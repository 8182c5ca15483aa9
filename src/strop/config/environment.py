"""`environment:` what answers the policy's turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.config.base import Auto, NonNegativeFloat, PositiveFloat, PositiveInt, StrictModel


class CalculatorTool(StrictModel):
    """Works out one arithmetic expression: numbers, + - * / // % **, brackets."""

    kind: Literal["calculator"]
    """A calculator."""


class FunctionTool(StrictModel):
    """A Python function: its name, its docstring and the types of its arguments are what the policy is told."""

    kind: Literal["function"]
    """Call a Python function, plain or `async`."""
    path: str
    """`module:function`, importable from the working folder or the Python path. It returns a text, or a value that is
    shown as JSON; an exception is told to the policy as an error."""


class PythonTool(StrictModel):
    """Runs a Python program in the sandbox (`sandbox:`) and shows what it prints."""

    kind: Literal["python"]
    """Run Python programs; each call begins anew."""


class RetrievalTool(StrictModel):
    """Searches the text files of a folder."""

    kind: Literal["retrieval"]
    """Search passages by words (BM25)."""
    folder: str
    """A folder; its `.txt`, `.md` and `.jsonl` files (a `text` in each line) are read, those in folders below too."""
    top: PositiveInt = 3
    """Passages in an answer."""
    passage_words: PositiveInt = 120
    """Longest passage; longer texts are cut."""


class McpTools(StrictModel):
    """All tools of a server that speaks the Model Context Protocol (extra `mcp`)."""

    kind: Literal["mcp"]
    """Take the tools of an MCP server."""
    command: list[str] | None = None
    """Start the server with this command and speak over its input and output."""
    url: str | None = None
    """Or the address of a running server (streamable HTTP)."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.url is None) or self.command == []:
            raise ValueError("give either `command` or `url`")
        return self


ToolSettings = Annotated[
    CalculatorTool | FunctionTool | PythonTool | RetrievalTool | McpTools, Field(discriminator="kind")
]


class AnyEnvironment(StrictModel):
    """What environments of every kind have."""

    max_turns: PositiveInt = 8
    """Turns of the policy in one episode; after that it ends with the status `length`."""
    max_turn_tokens: PositiveInt | Auto = "auto"
    """Longest turn of the policy in tokens; `auto` is what is left of `rollout.max_new_tokens`, which bounds all turns
    of an episode together."""
    max_tokens: PositiveInt | Auto = "auto"
    """Tokens of an episode behind its first prompt, what the environment says included; `auto` is what the model's
    context leaves."""
    step_timeout: PositiveFloat = 60.0
    """Seconds that the environment may take for one answer; the episode then has the status `timeout`."""
    episode_timeout: PositiveFloat = 1800.0
    """Seconds that a whole episode may take, sampling included."""
    keep_history: bool = False
    """Go on behind the policy's turns as it wrote them, even where the chat template renders earlier turns in another
    way (drops `<think>`, say). If false, the episode forks there: the policy reads what it will read when it serves."""


class ToolEnvironment(AnyEnvironment):
    """The policy calls tools; a turn without a call is its answer and ends the episode."""

    kind: Literal["tools"]
    """Answer calls of tools."""
    tools: Annotated[list[ToolSettings], Field(min_length=1)]
    """What can be called."""
    style: Literal["auto", "hermes", "llama3", "mistral", "tag"] = "auto"
    """How calls are written. `hermes` (Qwen too): JSON between <tool_call> tags; `llama3` and `mistral`: their JSON;
    `tag`: `<name>argument</name>`, for models whose template knows nothing of tools. `auto` reads the template."""
    opening: str | None = None
    """With `tag` and a single tool: the text that begins a call, instead of `<name>`."""
    closing: str | None = None
    """With `opening`: the text that ends a call."""
    result: str = "{result}"
    """With `tag`: how a result is shown to the policy; `{result}` stands for it."""
    malformed_penalty: NonNegativeFloat = 0.0
    """Taken off the reward of a turn for each call in it that could not be understood (verifier `environment`)."""
    max_calls: PositiveInt = 8
    """Calls in one turn; the rest is answered with an error."""
    call_timeout: PositiveFloat = 30.0
    """Seconds for one call; after that the policy is told that it took too long."""
    max_result_characters: PositiveInt = 4000
    """Longest result; the rest is cut off, and the policy is told so."""

    @field_validator("result")
    @classmethod
    def _result_is_shown(cls, value: str) -> str:
        if "{result}" not in value:
            raise ValueError("it must hold {result}, which stands for the result")
        return value

    @model_validator(mode="after")
    def _tags_fit(self) -> Self:
        if (self.opening is None) != (self.closing is None):
            raise ValueError("`opening` and `closing` go together")
        if self.opening is not None and not (self.opening and self.closing):
            raise ValueError("`opening` and `closing` must not be empty")
        if self.opening is not None and (self.style != "tag" or len(self.tools) > 1):
            raise ValueError("`opening` and `closing` are for `style: tag` with a single tool")
        if self.style != "tag" and self.result != "{result}":
            raise ValueError("`result` is for `style: tag`; the chat template shows results in the other styles")
        return self


class PythonEnvironment(AnyEnvironment):
    """An environment of your own: a class with `async reset(row)`, `async step(turn)` and `async close()`."""

    kind: Literal["python"]
    """Make objects of a Python class."""
    factory: str
    """`module:Class`, called once for each episode."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of each call."""


class SelfPlayEnvironment(AnyEnvironment):
    """The policy plays all roles of a match. Each role has a conversation, an episode and rewards of its own, and is
    compared with itself in the other matches of the prompt; `role` is a column of its rows. `max_turns` is of all roles
    together. What the match says is rendered as the data's prompts are (`data.render`)."""

    kind: Literal["self_play"]
    """Let the policy play against itself, or with itself."""
    factory: str
    """`module:Class`, called once for each match: `roles`, and `async` methods `reset(row)`, `step(role, turn)`,
    `rewards()` and `close()`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of each call."""
