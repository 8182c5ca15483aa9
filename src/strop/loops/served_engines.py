"""Servers that sample for a run: made from a recipe, looked at before anything is written, and given weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.router import EngineRouter
from strop.config import Config
from strop.loops.assembly import Roles, make_probe
from strop.publishing.served import ServedPublisher
from strop.rewards.client import server_of
from strop.rollout.engine import Engine
from strop.rollout.engines.dialects import OpenAI, Sglang
from strop.rollout.engines.served import KEY, ServedEngine

T = TypeVar("T")


def make_served(config: Config, roles: Roles) -> list[ServedEngine]:
    """An engine for each server.

    Raises:
        UserError: an address is none, or the variable of the key is not set.
    """
    settings = config.rollout.engine.server
    assert settings is not None
    made = []
    for url in settings.urls:
        server = server_of(
            url, settings.api_key_env, timeout=settings.timeout, retries=settings.retries, where=KEY, key="urls"
        )
        made.append(
            ServedEngine(
                server,
                Sglang() if config.rollout.engine.kind == "sglang" else OpenAI(settings.model),
                roles.tokenizer,
                concurrency=settings.concurrency,
                eos_ids=roles.loaded.eos_ids,
                seed=config.run.seed,
                context=roles.loaded.context,
                vocabulary=roles.vocabulary,
            )
        )
    return made


async def check_served(config: Config, roles: Roles) -> tuple[str, ...]:
    """What the servers say of themselves, a line for each.

    Raises:
        UserError: one cannot be reached, or cannot do what a run needs.
    """
    lines = []
    for engine in make_served(config, roles):
        try:
            lines.append(f"{engine.server.url}: {await engine.check()}")
        finally:
            await engine.close()
    return tuple(lines)


class WithServers:
    """A place whose engines are servers; everything else of it is as it was.

    Args:
        place: a `Place`. said: what the servers say of themselves.
    """

    def __init__(self, place: Any, config: Config, said: tuple[str, ...]) -> None:
        self._place = place
        self._config = config
        self._run = Path()
        self._engines: list[ServedEngine] = []
        self.reasons: tuple[str, ...] = (*place.reasons, *said)
        self.shares_weights = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    async def aside(self, work: Callable[[], T]) -> T:
        """What `work` returns. Where servers sample meanwhile, their answers are taken while it computes."""
        if self._config.rollout.max_staleness:
            return await asyncio.to_thread(work)
        found: T = await self._place.aside(work)
        return found

    def settle_in(self, run: Path) -> None:
        self._run = run
        self._place.settle_in(run)

    def make_engine(self) -> Engine:
        """All servers behind the protocol of one engine."""
        self._engines = make_served(self._config, self._place.roles)
        return self._engines[0] if len(self._engines) == 1 else EngineRouter(self._engines)

    def make_publisher(self, engine: Engine) -> ServedPublisher:
        """What gives the servers of `make_engine` the weights of each version."""
        settings, roles = self._config.rollout.engine.server, self._place.roles
        assert settings is not None
        folder = settings.folder
        return ServedPublisher(
            {one.server.url: one for one in self._engines},
            make_probe(roles.vocabulary, roles.dtype),
            lambda: self._run / "weights" if folder is None else Path(folder),
            roles.tokenizer,
            self.aside,
        )
