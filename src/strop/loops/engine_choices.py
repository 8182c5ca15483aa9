"""What of `rollout.engine` would have no effect, or cannot work here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from strop.config import Config
from strop.config.rollout import EngineSettings
from strop.errors import ConfigError, MissingExtra, UserError
from strop.loops.spread import colocated

KNOWN = {
    "local": ("max_sequences", "prefill_tokens", "pack_weights", "eager", "consistent", "after_update", "sleep"),
    "vllm": (
        *("max_sequences", "prefill_tokens", "memory", "eager", "tensor", "merge_adapters", "prefix_caching"),
        *("after_update", "sleep"),
    ),
    "sglang": ("server",),
    "openai": ("server",),
}
"""Keys that each kind of engine knows."""
SERVED = ("sglang", "openai")
"""Kinds that are servers."""

BESIDE_THE_TRAINER, IN_TURN, ALONE = 0.3, 0.6, 0.85
"""Shares of a GPU's memory that vLLM gets: beside a trainer that keeps what it has, beside one of which only the
weights stay while vLLM is awake, and where it has the GPU to itself."""
CACHE_OF_LOCAL = 0.25
"""Share that `local`'s keys and values take at most, by which its rows are chosen."""


def idle_in_engine(config: Config) -> Iterator[UserError]:
    """Settings of another kind of engine than the chosen one."""
    engine = config.rollout.engine
    for name, field in EngineSettings.model_fields.items():
        if name != "kind" and name not in KNOWN[engine.kind] and getattr(engine, name) != field.default:
            key, others = f"rollout.engine.{name}", [kind for kind, names in KNOWN.items() if name in names]
            what = f"`{key}` has no effect on the engine {engine.kind}"
            mend = f"remove the line, or set rollout.engine.kind to {' or '.join(others)}"
            yield UserError(what, where=key, mend=mend)
    if engine.kind == "sglang" and engine.server is not None and engine.server.model:
        key = "rollout.engine.server.model"
        yield UserError(f"`{key}` has no effect on the engine sglang", where=key, mend="remove the line")
    if engine.kind in SERVED and engine.server is None:
        yield UserError(
            f"the engine {engine.kind} is a server, and there is no `server` that says where",
            where="rollout.engine",
            mend="add server: {urls: [http://HOST:PORT]}",
        )


def served(config: Config) -> bool:
    """Whether servers sample for this recipe."""
    return config.supervised is None and config.rollout.engine.kind in SERVED


def refuse_servers(config: Config, command: str) -> None:
    """Raises ConfigError for a command that samples with a model of this process, where servers have weights of their
    own."""
    if served(config):
        what = f"strop {command} samples with a model in its own process, and rollout.engine.kind is a server"
        mend = "add rollout.engine.kind=local rollout.engine.server=null to the command"
        raise ConfigError([UserError(what, where="rollout.engine.kind", mend=mend)])


def check_engine(config: Config, device: str) -> None:
    """Raise UserError where the engine's package is missing, where it does not sample on this device, or for settings
    of another kind of engine.

    Args:
        device: the kind that was chosen, "cpu", "cuda" or "mps".
    """
    engine = config.rollout.engine
    if idle := list(idle_in_engine(config)):
        raise ConfigError(idle)
    if served(config) and importlib.util.find_spec("aiohttp") is None:
        raise MissingExtra("aiohttp", extra="servers", needed_for=f"`rollout.engine.kind: {engine.kind}`")
    if engine.kind == "local" and engine.eager is False and device != "cuda":
        where = "rollout.engine.eager"
        raise UserError(
            f"`{where}: false` compiles for a GPU and captures its graphs, and the model is on {device}",
            where=where,
            mend="remove the line",
        )
    if engine.kind != "vllm" or config.supervised is not None:
        return
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", extra="vllm", needed_for="`rollout.engine.kind: vllm`")
    problems = []
    if device == "cpu" and _has_cuda():
        problems.append(
            UserError(
                "vLLM samples on the GPU of this machine, and the trainer was told to compute on the CPU",
                where="hardware.device",
                mend="set it to cuda, or rollout.engine.kind to local",
            )
        )
    if device == "mps":
        problems.append(
            UserError("vLLM does not sample on mps", where="rollout.engine.kind", mend="set it to local, or use a CPU")
        )
    if device != "cuda" and engine.sleep == "always":
        where = "rollout.engine.sleep"
        what = f"vLLM gives memory back on CUDA only, where its sleep mode has a pool of its own, and this is {device}"
        problems.append(UserError(what, where=where, mend="leave it on auto, or set rollout.engine.kind to local"))
    problems += [*_problems_of_several(config, device), *_problems_of_adapters(config)]
    if device != "cuda" and engine.memory != "auto":
        where = "rollout.engine.memory"
        problems.append(UserError(f"`{where}` has no effect without a GPU", where=where, mend="remove the line"))
    if problems:
        raise ConfigError(problems)


def _problems_of_several(config: Config, device: str) -> Iterator[UserError]:
    """Of an engine whose layers several GPUs share."""
    engine, where = config.rollout.engine, "rollout.engine.tensor"
    if engine.tensor == 1:
        return
    if engine.sleep == "always":
        yield UserError(
            "a vLLM on several GPUs does not give its memory back while the trainer computes",
            where="rollout.engine.sleep",
            mend=f"leave it on auto, or {where} on 1",
        )
    if config.cluster.kind == "local" and device == "cuda" and (there := _gpus()) < engine.tensor:
        yield UserError(
            f"`{where}: {engine.tensor}` asks for {engine.tensor} GPUs, and this machine shows {there}",
            where=where,
            mend="lower it, or look at CUDA_VISIBLE_DEVICES",
        )


def _problems_of_adapters(config: Config) -> Iterator[UserError]:
    """Of an engine that has adapters beside the weights."""
    lora, where = config.model.lora, "rollout.engine.merge_adapters"
    if config.rollout.engine.merge_adapters:
        return
    if lora is None:
        yield UserError(
            f"`{where}: false` has no effect without `model.lora`: there are no adapters",
            where=where,
            mend="remove the line",
        )
    elif lora.dora or lora.adaptive is not None:
        name = "dora" if lora.dora else "adaptive"
        yield UserError(
            f"vLLM knows plain adapters only, and the recipe sets model.lora.{name}",
            where=where,
            mend="leave it on true, so that adapters of any kind are merged",
        )


def check_adapters(config: Config, model: Any) -> None:
    """Raise UserError for adapters that vLLM has no layer for. model: with its adapters."""
    if not config.rollout.engine.merge_adapters and any(hasattr(one, "parameter_name") for one in model.modules()):
        raise UserError(
            "vLLM reads no adapters of stacked experts as peft writes them",
            where="rollout.engine.merge_adapters",
            mend="leave it on true",
        )


def check_heads(config: Config, model: Any) -> None:
    """Raise UserError where the GPUs of an engine cannot divide a model's heads. model: transformers' configuration."""
    tensor, where = config.rollout.engine.tensor, "rollout.engine.tensor"
    if model.num_attention_heads % tensor:
        raise UserError(
            f"{model.num_attention_heads} attention heads cannot be divided among {tensor} GPUs",
            where=where,
            mend=f"set {where} to a number that divides {model.num_attention_heads}",
        )


def _has_cuda() -> bool:
    return _gpus() > 0


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def engine_memory(config: Config, *, sleeps: bool = False) -> float:
    """Share of a GPU's memory that vLLM gets. sleeps: while the trainer computes."""
    chosen = config.rollout.engine.memory
    if chosen != "auto":
        return chosen
    if not _beside(config):
        return ALONE
    return IN_TURN if sleeps and config.training.offload else BESIDE_THE_TRAINER


def share_beside_trainer(config: Config) -> float:
    """Share of the trainer's GPU that an engine takes which does not sleep; 0 where none samples there."""
    unused = config.offline is not None and config.data.eval is None
    if config.supervised is not None or unused or served(config) or not _beside(config):
        return 0.0
    return engine_memory(config) if config.rollout.engine.kind == "vllm" else CACHE_OF_LOCAL


def _beside(config: Config) -> bool:
    """Whether the engine is on the trainer's device."""
    return config.cluster.kind == "local" or colocated(config)
