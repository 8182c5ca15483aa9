"""What of `rollout.engine` would have no effect, or cannot work here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from strop.config import Config
from strop.config.rollout import EngineSettings
from strop.errors import ConfigError, MissingExtra, UserError
from strop.loops.spread import colocated

OF_KINDS = {"local": ("pack_weights",), "vllm": ("memory", "eager", "prefix_caching")}
"""Keys that one kind of engine alone knows."""

BESIDE_THE_TRAINER, ALONE = 0.3, 0.85
"""Shares of a GPU's memory that vLLM gets."""


def idle_in_engine(config: Config) -> Iterator[UserError]:
    """Settings of another kind of engine than the chosen one."""
    engine = config.rollout.engine
    for kind, names in OF_KINDS.items():
        for name in names:
            if kind != engine.kind and getattr(engine, name) != EngineSettings.model_fields[name].default:
                key = f"rollout.engine.{name}"
                what = f"`{key}` has no effect on the engine {engine.kind}"
                yield UserError(what, where=key, mend=f"remove the line, or set rollout.engine.kind to {kind}")


def check_engine(config: Config, device: str) -> None:
    """Raise UserError where the engine's package is missing, or where it does not sample on this device.

    Args:
        device: the kind that was chosen, "cpu", "cuda" or "mps".
    """
    engine = config.rollout.engine
    if engine.kind != "vllm" or config.supervised is not None:
        return
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", extra="vllm", needed_for="`rollout.engine.kind: vllm`")
    problems = []
    if device == "mps":
        problems.append(
            UserError("vLLM does not sample on mps", where="rollout.engine.kind", mend="set it to local, or use a CPU")
        )
    if device != "cuda" and engine.memory != "auto":
        where = "rollout.engine.memory"
        problems.append(UserError(f"`{where}` has no effect without a GPU", where=where, mend="remove the line"))
    if problems:
        raise ConfigError(problems)


def engine_memory(config: Config) -> float:
    """Share of a GPU's memory that vLLM gets."""
    chosen = config.rollout.engine.memory
    if chosen != "auto":
        return chosen
    beside = config.cluster.kind == "local" or colocated(config.cluster)
    return BESIDE_THE_TRAINER if beside else ALONE
