"""Filling `hardware:` and every other `auto`.

Choices depend on what the machine has, never on what is free at the moment: the same machine chooses the same sizes
again, which resuming bit for bit needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.config.model import Recompute
from strop.errors import UserError
from strop.planning.turns import engine_sleeps

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
COMPILED_FROM = 100_000_000
"""Weights of a model whose blocks are compiled on a GPU where nothing else is said."""


@dataclass(frozen=True)
class Hardware:
    """Where a run computes. reasons: one line for each thing that was chosen, for people to read."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    memory: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """tokens_per_micro_batch, max_sequences, what the trainer recomputes, whether the engine sleeps while the trainer
    computes, and whether blocks of the model are compiled for trainer and `local` engine, with the reasons.
    prefill_tokens: of prompts, in one pass of the engine. logprob_chunk: tokens whose logits exist at the same time."""

    tokens_per_micro_batch: int
    max_sequences: int
    prefill_tokens: int
    recompute: Recompute
    reasons: tuple[str, ...]
    engine_sleeps: bool = False
    trainer_compiles: bool = False
    engine_compiles: bool = False
    logprob_chunk: int = 512


def choose_hardware(config: Config) -> Hardware:
    """Device, number format and threads.

    Raises:
        UserError: the recipe names a device that this machine lacks.
    """
    import psutil
    import torch

    asked = config.hardware.device
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = asked if asked != "auto" else next(kind for kind in ("cuda", "mps", "cpu") if has[kind])
    if not has[name]:
        raise UserError(
            f"there is no {name} device on this machine",
            where="hardware.device",
            mend="use `auto` or `cpu`, or install a torch build for the device",
        )
    device = torch.device(name)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    asked_dtype = config.model.dtype
    dtype = dtypes["bfloat16" if name == "cuda" else "float32"] if asked_dtype == "auto" else dtypes[asked_dtype]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = cores if config.hardware.threads == "auto" else config.hardware.threads
    memory = torch.cuda.get_device_properties(0).total_memory if name == "cuda" else _machine_memory(psutil)
    what = torch.cuda.get_device_name(0) if name == "cuda" else f"{threads} CPU threads"
    reason = f"{name} ({what}, {memory / GIB:.0f} GiB), {str(dtype).removeprefix('torch.')}"
    return Hardware(device, dtype, threads, memory, (reason,))


def _machine_memory(psutil: Any) -> int:
    """Bytes this process may use: the machine's, or its container's limit if that is lower."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue
    return total


def activation_bytes(model_config: Any, *, item: int, recompute: Recompute) -> int:
    """Bytes of activations that one token keeps for the backward pass, all blocks together.

    Counted for a Llama block: two norms, three projections with rotated copies, attention, gate, up, their product and
    the residuals; with recomputation only the input of each block, and attention's results where they are kept.
    """
    layers, hidden = model_config.num_hidden_layers, model_config.hidden_size
    if recompute == "keep_attention":
        heads = model_config.num_attention_heads
        return int(layers * item * (hidden + heads * (getattr(model_config, "head_dim", None) or hidden // heads)))
    if recompute:
        return int(layers * hidden * item)
    inner = _inner_size(model_config)
    return int(layers * item * (16 * hidden + 5 * inner))


def _inner_size(model_config: Any) -> int:
    found = getattr(model_config, "intermediate_size", None) or getattr(model_config, "n_inner", None)
    return int(found or 4 * model_config.hidden_size)


def _most_tokens(device: str, *, sampled: bool) -> int:
    """Tokens of a pass beyond which it gets no faster. On a CPU that is soon, but the completions of a group should be
    in one pass: their prompt is then computed once."""
    if device == "cuda":
        return 16384
    return 512 if device == "cpu" and not sampled else 4096


def choose_sizes(
    config: Config, hardware: Hardware, model: Any, longest: int, *, share: float = 0.0, reference: bool = False
) -> Sizes:
    """Sizes of passes and batches.

    Args:
        model: the loaded model, whose config is read. longest: tokens of the longest sequence that is expected; a
            longer one is still sampled, and trained in a pass of its own. share, reference: see
            `planning/turns.py`.
    """
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    item = hardware.dtype.itemsize
    reasons = []
    budget = config.training.tokens_per_micro_batch
    most = _most_tokens(hardware.device.type, sampled=config.supervised is None)
    asked = config.model.activation_checkpointing
    if asked == "auto":
        # What must fit: a pass of the size that was asked for, or the longest sequence, which has a pass of its own.
        needed = max(longest, min(most, 4096) if budget == "auto" else budget)
        half = hardware.device.type == "cuda" and item == 2
        choices: list[Recompute] = [False, "keep_attention", True] if half else [False, True]
        room = hardware.memory * 0.25
        fitting = (c for c in choices if activation_bytes(text, item=item, recompute=c) * needed <= room)
        recompute = next(fitting, True)
        if recompute:
            kept = " but the results of attention" if recompute == "keep_attention" else ""
            reasons.append(f"activations{kept} are recomputed, so that {needed} tokens fit")
    else:
        recompute = asked
    if budget == "auto":
        each = activation_bytes(text, item=item, recompute=recompute)
        fits = max(min(int(hardware.memory * 0.25 / each), most) // 256 * 256, 256)
        budget = fits
        reasons.append(f"{budget} tokens in a micro-batch ({each / 1024:.0f} KiB of activations a token)")
    rows = config.rollout.engine.max_sequences
    if rows == "auto":
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cached = 2 * text.num_hidden_layers * heads * size * item * longest
        most_rows = 512 if hardware.device.type == "cuda" else 256
        # An engine on several GPUs has the memory of all of them; on a CPU its processes share the machine's.
        cards = config.rollout.engine.tensor if hardware.device.type == "cuda" else 1
        most_rows = max(1, min(most_rows, int(hardware.memory * 0.25 * cards / cached)))
        rows = most_rows
        if config.supervised is None and (config.offline is None or config.data.eval is not None):
            reasons.append(f"{rows} sequences sampled together ({cached / (1 << 20):.1f} MiB of cache each at most)")
    sleeps, why = engine_sleeps(config, hardware, model, share=share, reference=reference)
    compiles, eager = config.training.compile, config.rollout.engine.eager
    pays = not config.rollout.engine.consistent and _compiling_pays(hardware, model)
    trainer_compiles = pays if compiles == "auto" else compiles
    engine_compiles = pays if eager == "auto" else not eager
    if trainer_compiles and compiles == "auto":
        why = (*why, "blocks are compiled, which takes up to a minute in the first step")
    chunk = config.training.logprob_chunk
    if chunk == "auto":
        chunk = choose_chunk(hardware, int(text.vocab_size))
    prefill = config.rollout.engine.prefill_tokens
    if prefill == "auto":
        prefill = choose_prefill(hardware, text, config.rollout.engine.kind)
    return Sizes(budget, rows, prefill, recompute, (*reasons, *why), sleeps, trainer_compiles, engine_compiles, chunk)


def choose_prefill(hardware: Hardware, model_config: Any, engine: str) -> int:
    """Prompt tokens in one pass of an engine.

    On a GPU a pass of the engine `local` over 4,096 tokens of a small model ends before Python has begun the next: it
    is as large as a 25th of the memory holds, some eight states of a token and four of the inner ones of a block. vLLM
    reserves memory for its largest pass.
    """
    if hardware.device.type != "cuda" or engine != "local":
        return 4096
    hidden = model_config.hidden_size
    inner = _inner_size(model_config)
    fits = int(hardware.memory // 25 // (hardware.dtype.itemsize * (8 * hidden + 4 * inner)))
    return max(4096, min(16384, 1 << max(0, fits.bit_length() - 1)))


def choose_chunk(hardware: Hardware, vocabulary: int) -> int:
    """Tokens whose logits exist at the same time. On a GPU as many as a 64th of its memory holds, up to 4,096: each
    chunk more is a pass over the head's gradient, and some ten kernels for the host to start."""
    if hardware.device.type != "cuda":
        return 512
    fits = hardware.memory // 64 // (vocabulary * hardware.dtype.itemsize)
    return max(256, min(4096, 1 << max(0, fits.bit_length() - 1)))


def _compiling_pays(hardware: Hardware, model: Any) -> bool:
    """On a GPU, for models in which what is computed between matrix products takes longer than compiling it does."""
    if hardware.device.type != "cuda":
        return False
    from torch.utils._triton import has_triton

    return sum(p.numel() for p in model.parameters()) >= COMPILED_FROM and bool(has_triton())
