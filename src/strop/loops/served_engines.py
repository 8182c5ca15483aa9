"""Servers that sample for a run: made from a recipe, looked at before anything is written, and given weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from strop.cluster.router import EngineRouter
from strop.config import Config
from strop.loops.assembly import Roles, make_probe
from strop.publishing.served import ServedPublisher
from strop.rewards.client import server_of
from strop.rollout.engine import Engine
from strop.rollout.engines.dialects import OpenAI, Sglang
from strop.rollout.engines.served import KEY, ServedEngine


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


def as_one(engines: Sequence[ServedEngine]) -> Engine:
    """Several servers behind the protocol of one engine."""
    return engines[0] if len(engines) == 1 else EngineRouter(engines)


def make_served_publisher(
    config: Config,
    roles: Roles,
    engine: Any,
    run: Callable[[], Path],
    aside: Callable[[Callable[[], Any]], Awaitable[Any]],
) -> ServedPublisher:
    """What gives servers the weights of each version.

    Args:
        engine: of `as_one`. run: the run's folder, once it has one. aside: runs what asks the trainer.
    """
    settings = config.rollout.engine.server
    assert settings is not None
    each: Sequence[Any] = engine.engines if isinstance(engine, EngineRouter) else [engine]
    chosen = settings.folder
    return ServedPublisher(
        {one.server.url: one for one in each},
        make_probe(roles.vocabulary, roles.dtype),
        lambda: Path(chosen) if chosen is not None else run() / "weights",
        roles.tokenizer,
        aside,
    )
