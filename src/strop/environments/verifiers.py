"""Environments of the package `verifiers`: it plays the episode, this engine is the model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from strop.config.adapted_environments import VerifiersEnvironment
from strop.data.rows import see_working_folder
from strop.environments.call_styles import CallStyle, Hermes, Llama3, Mistral, style_of_template
from strop.environments.chat import ChatPolicy
from strop.environments.driven import Driven, Policy
from strop.environments.loopback import HOST, Loopback
from strop.environments.own_loop import OwnLoop
from strop.environments.protocol import EnvironmentFactory
from strop.errors import MissingExtra, UserError

SESSION = "x-session-id"
"""Header in which `verifiers` says which agent asks."""


class VerifiersFactory(EnvironmentFactory):
    """One environment, which plays many episodes at a time, in a thread of its own.

    Raises:
        MissingExtra: the package is not installed.
        UserError: there is no such taskset or environment, or its configuration does not fit.
    """

    drives = True

    def __init__(self, settings: VerifiersEnvironment, template: str | None, *, where: str = "environment") -> None:
        if importlib.util.find_spec("verifiers") is None:
            raise MissingExtra("verifiers", extra="verifiers", needed_for=f"`{where}.kind: verifiers`")
        self._settings = settings
        self._loop = OwnLoop("strop-verifiers")
        self._world = _loaded(settings, where)
        name = style_of_template(template) if settings.style == "auto" else settings.style
        styles: dict[str, Any] = {"hermes": Hermes(), "llama3": Llama3(), "mistral": Mistral()}
        self.style: CallStyle = styles.get(name, styles["hermes"])
        self.keep_history = settings.keep_history
        self._server: Loopback | None = None
        self._serving: contextlib.AbstractAsyncContextManager[Any] | None = None
        self._episodes: dict[str, VerifiersEpisode] = {}
        self._made = 0
        self._port = 0

    def make(self) -> VerifiersEpisode:
        self._made += 1
        return VerifiersEpisode(self, f"policy-{self._made}")

    async def open(self) -> None:
        """Start the server that the environment asks, and what the environment shares (tools, its own proxy)."""
        self._server = Loopback({"/v1/chat/completions": self._complete})
        self._port = await self._server.open()
        self._serving = self._world.serving()
        await self._loop.run(self._serving.__aenter__())

    async def close(self) -> None:
        if self._serving is not None:
            serving, self._serving = self._serving, None
            with contextlib.suppress(Exception):
                await self._loop.run(serving.__aexit__(None, None, None))
        if self._server is not None:
            await self._server.close()
            self._server = None
        self._loop.stop()

    async def played(self, episode: VerifiersEpisode, row: Mapping[str, Any]) -> Any:
        """Play one episode; returns that of the package."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        config = EvalClientConfig(base_url=f"http://{HOST}:{self._port}/v1", api_key_var="STROP_HAS_NO_KEY")
        self._episodes[episode.name] = episode
        try:
            return await self._loop.run(self._world.run_episode(self._task(row), ModelContext(episode.name, config)))
        finally:
            del self._episodes[episode.name]

    def _task(self, row: Mapping[str, Any]) -> Any:
        """The task that a row of `verifiers:TASKSET` holds."""
        kind = type(self._world.taskset).task_type()
        if not isinstance(row.get("task"), Mapping):
            raise ValueError("the row has no column `task`, as rows of `verifiers:TASKSET` have it")
        return kind(kind.data_type().model_validate(dict(row["task"])), self._world.taskset.config.task)

    async def _complete(self, body: Any, headers: Mapping[str, str]) -> Any:
        episode = self._episodes.get(str(body.get("model")))
        if episode is None:
            raise ValueError(f"there is no episode {body.get('model')!r} in progress")
        return await episode.complete(body, headers.get(SESSION, ""))


class VerifiersEpisode:
    """One episode; each agent that speaks in it has a conversation of its own with the policy."""

    def __init__(self, factory: VerifiersFactory, name: str) -> None:
        self._factory = factory
        self.name = name
        self._policy: Policy | None = None
        self._agents: dict[str, ChatPolicy] = {}

    async def drive(self, policy: Policy) -> Driven:
        self._policy = policy
        played = await self._factory.played(self, policy.row)
        failures = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok and not any(trace.is_timeout for trace in played.traces):
            said = failures[-1] if failures else None
            return Driven(error="the episode failed" if said is None else f"{said.type}: {said.message}"[:500])
        traces = [trace for trace in played.traces if trace.agent.trainable and trace.id in self._agents]
        if not traces:
            return Driven(error="no agent that is trained spoke in the episode")
        late = [trace for trace in traces if trace.is_timeout]
        if late:
            return Driven(error=f"an agent ran into a time-out of its own: {late[0].stop_condition}")
        paths = [
            path
            for trace in traces
            for path in self._agents[trace.id].paths(reward=float(trace.reward) if trace.rewards else None)
        ]
        return Driven(
            paths=paths,
            finish="length" if any(trace.is_truncated for trace in traces) else "stop",
            text=str(traces[-1].last_reply),
            messages=self._agents[traces[-1].id].messages(),
        )

    async def complete(self, body: Mapping[str, Any], session: str) -> Any:
        assert self._policy is not None
        if session not in self._agents:
            self._agents[session] = ChatPolicy(
                self._policy, self._factory.style, keep_history=self._factory.keep_history
            )
        return await self._agents[session].complete(body)

    async def close(self) -> None:
        await asyncio.sleep(0)


def _loaded(settings: VerifiersEnvironment, where: str) -> Any:
    """The environment; its agents chat here unless the settings say otherwise."""
    from pydantic import ValidationError

    see_working_folder()
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    from strop.environments.verifiers_harness import ID, register

    register()
    taskset = {**settings.arguments, "id": settings.taskset}
    raw = {**settings.settings, "taskset": taskset}
    try:
        for name in agent_config_fields(vf.env_config_type(settings.taskset, raw.get("id") or "")()):
            given = dict(raw.get(name) or {})
            raw[name] = {"harness": {"id": ID}, "runtime": {"type": "subprocess"}} | given
        return vf.load_environment(vf.resolve_env_config(raw))
    except ModuleNotFoundError as error:
        raise UserError(str(error), where=f"{where}.taskset", mend="install it, or correct the name") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        place = "arguments" if key.startswith("taskset.") else "settings"
        raise UserError(
            f"the configuration does not fit: {key}: {first['msg']}",
            where=f"{where}.{place}.{key.removeprefix('taskset.')}",
            mend="see the configuration classes of the taskset and its environment",
        ) from error
    except Exception as error:
        raise UserError(
            f"{settings.taskset} cannot be loaded: {type(error).__name__}: {error}",
            where=f"{where}.taskset",
            mend="load it with verifiers alone to see the whole traceback",
        ) from error
