"""`environment:` kinds that speak the language of other frameworks, and with them all kinds there are."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import NonNegativeFloat, PositiveInt
from strop.config.environment import AnyEnvironment, PythonEnvironment, SelfPlayEnvironment, ToolEnvironment


class ActingEnvironment(AnyEnvironment):
    """What environments have whose turns are actions."""

    observation: str = "{observation}"
    """What the policy reads after an action: a template with `{observation}`, `{reward}` and `{step}` (actions so
    far)."""
    opening: str = "{prompt}\n{observation}"
    """What the policy reads first: a template with `{observation}` and the columns of the row. A `prompt` that is a
    list of messages stands before it."""
    malformed: Literal["answer", "end"] = "answer"
    """What a turn without an action gets: an answer that says what the actions are, or the end of the episode."""
    malformed_penalty: NonNegativeFloat = 0.0
    """Taken off the reward of a turn without an action (verifier `environment`)."""


class GymnasiumEnvironment(ActingEnvironment):
    """An environment of Gymnasium (extra `gymnasium`) whose actions can be written: discrete ones, or texts."""

    kind: Literal["gymnasium"]
    """Act in an environment of Gymnasium."""
    id: str
    """Its id, `FrozenLake-v1`, or `module:Id-v0` for one that a module registers."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    render: Literal["auto", "ansi", "observation"] = "auto"
    """What `{observation}` is: the picture in characters that the environment renders, what is coloured in it in
    brackets, or the observation itself; `auto` is the picture if there is one."""
    actions: Annotated[list[str], Field(min_length=2)] | None = None
    """Names of the actions, in order; their numbers when not set."""
    take: Literal["last", "first", "only", "whole"] = "last"
    """Which action of a turn counts, if there are several; with `only` several are as none, and with `whole` the turn
    must be the action and nothing else."""
    seed: str = "seed"
    """Column with the seed of the episode; of a row without it the seed follows from its content. All completions of a
    prompt begin in the same state."""

    @model_validator(mode="after")
    def _actions_differ(self) -> Self:
        lowered = [name.strip().lower() for name in self.actions or []]
        if "" in lowered or len(set(lowered)) < len(lowered):
            raise ValueError("`actions` needs a different name for each action")
        return self


class OpenEnvEnvironment(ActingEnvironment):
    """An environment of OpenEnv, on a server that runs (extra `openenv`)."""

    kind: Literal["openenv"]
    """Act in an environment of OpenEnv."""
    url: str
    """Address of the server, `http://host:port`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the environment's `reset` is given beside the seed."""
    action: dict[str, Any] = Field(default_factory=lambda: {"message": "{action}"})
    """The action as the server takes it; a text `{action}` in it stands for the turn, or for the number of the action
    where `actions` names some."""
    actions: Annotated[list[str], Field(min_length=2)] | None = None
    """Names of the actions, in the order of their numbers from 0; every turn is an action when not set."""
    take: Literal["last", "first", "only", "whole"] = "last"
    """Which action of a turn counts, as for Gymnasium."""
    show: str | None = None
    """Field of the observation that the policy reads; all of them when not set."""
    seed: str = "seed"
    """Column with the seed of the episode; of a row without it the seed follows from its content."""
    sessions: PositiveInt = 1
    """Episodes that are played at the same time; a server has a largest number, often 1."""

    @model_validator(mode="after")
    def _action_is_there(self) -> Self:
        if "{action}" not in json.dumps(self.action):
            raise ValueError("`action` needs the text `{action}`, which stands for the turn")
        if self.actions is None and self.take != "last":
            raise ValueError("`take` has no effect without `actions`")
        return self


class SlimeEnvironment(AnyEnvironment):
    """A generate function as slime has them, `async def generate(args, sample, sampling_params) -> Sample`.

    `max_turns` bounds its requests, and `step_timeout` the time between them.
    """

    kind: Literal["slime"]
    """Let a function of slime's form make each completion."""
    generate: str
    """`module:function`, importable from the working folder or the Python path."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More of what `args` holds."""
    prompt: Literal["rendered", "given"] = "rendered"
    """What `sample.prompt` is: the text that the model reads, or the prompt as the data has it."""

    @model_validator(mode="after")
    def _has_its_own_history(self) -> Self:
        if self.keep_history:
            raise ValueError("`keep_history` has no effect: the function makes the history itself")
        return self


class VerifiersEnvironment(AnyEnvironment):
    """An environment of the package `verifiers` (extra `verifiers`), with its agents, tools and rewards.

    The data is `verifiers:TASKSET`. `max_turns` bounds the requests of an episode, and `step_timeout` the time between
    them.
    """

    kind: Literal["verifiers"]
    """Let an environment of `verifiers` play the episodes."""
    taskset: str
    """Id of an installed taskset, or of a module that exports one."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More fields of the taskset's configuration; those of the data source unless it says otherwise."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """More fields of the environment's configuration, such as `{id: best-of-n}` or `{agent: {max_turns: 3}}`. An agent
    without a harness gets one that chats and calls the tools, on this machine."""
    style: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    """How calls of tools are written; `auto` reads the chat template, and is `hermes` where that knows no tools."""


EnvironmentSettings = Annotated[
    ToolEnvironment
    | PythonEnvironment
    | GymnasiumEnvironment
    | OpenEnvEnvironment
    | SelfPlayEnvironment
    | SlimeEnvironment
    | VerifiersEnvironment,
    Field(discriminator="kind"),
]
