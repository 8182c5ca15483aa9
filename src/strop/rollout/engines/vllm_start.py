"""How vLLM is started: its arguments, what it reads from the environment, and what it must leave as it was."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.errors import MissingExtra, RunFailure

_MOST_CACHE_GIB = 4


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM is started.

    dtype: of weights and cache. context: longest prompt + completion. max_sequences: decoded together. prefill_tokens:
    of prompts in one pass. memory: share of the GPU's memory for weights, cache and workspace. eager: neither compile
    nor capture CUDA graphs. prefix_caching: keep keys and values of prompts that are asked for again. sleeps: start it
    so that it can give its memory back; on a GPU only. keeps: requests that run keep their keys and values when weights
    change; without prefix_caching only. tensor: GPUs, or processes on a CPU, that share each layer; it does not sleep
    with several. adapter_rank: highest rank of adapters that are kept beside the weights; 0 where there are none.
    """

    dtype: torch.dtype
    context: int
    max_sequences: int
    prefill_tokens: int
    memory: float
    eager: bool
    prefix_caching: bool
    sleeps: bool = False
    keeps: bool = False
    tensor: int = 1
    adapter_rank: int = 0


def start(config: Any, architecture: str, settings: VllmSettings, extension: str | None = None) -> Any:
    """vLLM's `LLMEngine` in this process, without weights.

    Args:
        config: of the model in transformers' form.
        architecture: name of its class.
        extension: full name of a class that is mixed into vLLM's workers, where `settings.tensor` makes several.

    Raises:
        MissingExtra: vLLM is not installed. RunFailure: it could not be started.
    """
    _announce(_cache_gib(config, settings))
    try:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise MissingExtra("vllm", extra="vllm", needed_for="`rollout.engine.kind: vllm`") from error
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="strop-vllm-") as folder, _own_randomness():
        _write_config(config, architecture, settings.dtype, Path(folder))
        arguments: dict[str, Any] = {
            "model": folder,
            "skip_tokenizer_init": True,
            # They come with the first publication.
            "load_format": "dummy",
            "dtype": str(settings.dtype).removeprefix("torch."),
            "max_model_len": settings.context,
            "max_num_seqs": settings.max_sequences,
            "max_num_batched_tokens": max(
                settings.prefill_tokens, settings.max_sequences, 0 if cuda else settings.context
            ),
            # In parts, a prompt breaks vLLM's draws with a seed on CPUs.
            "enable_chunked_prefill": cuda,
            "enforce_eager": settings.eager,
            "enable_prefix_caching": settings.prefix_caching,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "seed": 0,
        }
        if cuda:
            arguments["gpu_memory_utilization"] = settings.memory
        if settings.sleeps:
            arguments["enable_sleep_mode"] = True
        if extension is not None:
            arguments["tensor_parallel_size"] = settings.tensor
            arguments["distributed_executor_backend"] = "mp"
            arguments["worker_extension_cls"] = extension
        if settings.adapter_rank:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
            arguments["max_lora_rank"] = _room_for(settings.adapter_rank)
        try:
            with _threads_of_workers(settings.tensor):
                return LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            raise RunFailure(
                f"vLLM could not be started: {type(error).__name__}: {error}",
                where="rollout.engine",
                mend="see what vLLM printed; where memory is short lower rollout.engine.memory or max_sequences, "
                "or sample with rollout.engine.kind: local",
            ) from error


def _announce(cache_gib: int) -> None:
    """What vLLM reads from the environment; what a user has set stays. cache_gib: of keys and values, on a CPU."""
    # The engine's core in this process, where weights can be handed over as tensors: nothing else works here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    chosen = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # On CPUs: threads are strop's to place.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Of several processes, when there are: this one has threads, which a fork would not survive.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
    }
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def _cache_gib(config: Any, settings: VllmSettings) -> int:
    """GiB that the keys and values of all sequences can need; vLLM lets some wait where it has fewer."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * size
    needed = kept * settings.dtype.itemsize * settings.context * settings.max_sequences
    return min(_MOST_CACHE_GIB, max(1, -(-needed // 2**30)))


def _room_for(rank: int) -> int:
    """The smallest rank that vLLM has room for and that is not below this one."""
    known = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    return next((one for one in known if one >= rank), rank)


def _write_config(config: Any, architecture: str, dtype: torch.dtype, folder: Path) -> None:
    copied = type(config).from_dict(config.to_dict())
    copied.architectures = [architecture]
    copied.dtype = dtype
    copied.save_pretrained(folder)


@contextmanager
def _threads_of_workers(count: int) -> Iterator[None]:
    """Processes that are started meanwhile share the threads that this one computes with."""
    before = os.environ.get("OMP_NUM_THREADS")
    if count > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // count))
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def _own_randomness() -> Iterator[None]:
    """vLLM seeds the global generators when it starts."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


__all__ = ["VllmSettings", "start"]
