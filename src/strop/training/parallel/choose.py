"""From `cluster.trainer` to the ranks of this process."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from strop.config.cluster import TrainerPlacement
from strop.errors import ConfigError, UserError
from strop.training.parallel.mesh import Dimensions, Mesh
from strop.training.parallel.ranks import Alone, Ranks

# Bytes of a trained weight with its gradient, its master and AdamW's two moments; and of a frozen one.
TRAINED, FROZEN = 16, 4
# Bytes of a gradient that is added up over passes.
GRADIENT = 4
# Share of a device's memory that these may take before they are divided.
SHARE = 1 / 3


def join(device: torch.device) -> None:
    """Meet the other ranks where the environment says (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    # Small things are told through gloo, and without waiting for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def choose_ranks(
    settings: TrainerPlacement, model: Any, *, device: torch.device, dtype: torch.dtype, memory: int
) -> tuple[Alone, str]:
    """(this process among those that train, why so).

    Args:
        memory: bytes of the device.
    """
    if settings.ranks == 1:
        return Alone(), "one trainer rank"
    fsdp, why = _divides(settings, model, memory)
    copies = settings.ranks // (settings.tensor * settings.context)
    dimensions = Dimensions(settings.replicas, copies // settings.replicas, settings.context, settings.tensor)
    every_pass, when = _sums_every_pass(settings, model, dimensions, memory)
    ranks = Ranks(
        Mesh(dimensions, device.type),
        fsdp=fsdp,
        dtype=dtype,
        sequence=settings.sequence,
        offload=settings.offload,
        every_pass=every_pass,
    )
    parts = {"replicas": dimensions.replicas, "context": dimensions.context, "tensor": dimensions.tensor}
    named = ", ".join(f"{name} {count}" for name, count in parts.items() if count > 1)
    text = f"{settings.ranks} trainer ranks, {'fsdp' if fsdp else 'ddp'} {dimensions.shards}{named and ', ' + named}"
    return ranks, f"{text}: {why}" + (f"; {when}" if fsdp else "")


def _divides(settings: TrainerPlacement, model: Any, memory: int) -> tuple[bool, str]:
    if settings.backend != "auto":
        return settings.backend == "fsdp", f"cluster.trainer.backend is {settings.backend}"
    if settings.replicas > 1 or settings.offload:
        return True, "replicas and offload are of fsdp"
    need = sum(p.numel() * (TRAINED if p.requires_grad else FROZEN) for p in model.parameters()) / settings.tensor
    gib = f"weights, gradients and optimizer state take {need / 2**30:.1f} GiB of {memory / 2**30:.0f}"
    return need > SHARE * memory, gib


def _sums_every_pass(settings: TrainerPlacement, model: Any, d: Dimensions, memory: int) -> tuple[bool, str]:
    """(whether gradients are summed over the ranks after each pass of an update, why so)."""
    names = {True: "gradients are summed after every pass", False: "gradients are summed once an update"}
    if settings.gradient_sync != "auto":
        every = settings.gradient_sync == "every_pass"
        return every, f"{names[every]}: cluster.trainer.gradient_sync is {settings.gradient_sync}"
    whole = sum(GRADIENT * p.numel() for p in model.parameters() if p.requires_grad) / d.tensor
    held = sum(p.numel() * (TRAINED if p.requires_grad else FROZEN) for p in model.parameters()) / d.tensor
    share = 0.0 if settings.offload else held / (d.shards * d.context)
    every = whole + share > SHARE * memory
    gib = f"a whole gradient and a rank's share take {(whole + share) / 2**30:.1f} GiB of {memory / 2**30:.0f}"
    return every, f"{names[every]}: {gib}"


def check_ranks(config: Any) -> None:
    """Refuse what ranks cannot do together.

    Raises:
        ConfigError: with everything that does not go together.
    """
    placement, problems = config.cluster.trainer, []
    if placement.ranks == 1:
        return
    divided = placement.backend != "ddp" or placement.tensor > 1

    def refuse(what: str, where: str, mend: str) -> None:
        problems.append(UserError(what, where=where, mend=mend))

    for key, optimizer in (
        ("training.optimizer", config.training.optimizer),
        ("critic.optimizer", config.critic.optimizer),
    ):
        if divided and optimizer.name != "adamw":
            refuse(
                f"{optimizer.name} looks at whole matrices, and cluster.trainer divides them",
                f"{key}.name",
                "use adamw, or set cluster.trainer.backend: ddp and tensor: 1",
            )
        if optimizer.offload:
            refuse(
                "offload is for one trainer rank",
                f"{key}.offload",
                "remove it; cluster.trainer.offload keeps the ranks' shares in the CPU's memory",
            )
    if config.model.lora is not None and config.model.lora.adaptive is not None:
        refuse(
            "adaptive ranks of adapters are reallocated by one trainer rank only",
            "model.lora.adaptive",
            "remove it, or set cluster.trainer.ranks to 1",
        )
    streams = placement.tensor > 1 or placement.context > 1
    if streams and (
        config.algorithm.name == "gkd" or (config.supervised and config.supervised.method == "distillation")
    ):
        refuse(
            "distributions of a teacher are compared by ranks that have the whole vocabulary and the whole stream",
            "cluster.trainer",
            "set tensor and context to 1",
        )
    if config.training.compile is True and placement.tensor > 1:
        refuse(
            "blocks whose layers are divided are not compiled: their ranks talk to each other inside",
            "training.compile",
            "remove it, or set cluster.trainer.tensor to 1",
        )
    if config.supervised is not None and config.supervised.neftune_alpha and streams:
        refuse(
            "noise on embeddings is drawn for whole streams and layers",
            "supervised.neftune_alpha",
            "remove it, or set cluster.trainer.tensor and context to 1",
        )
    if problems:
        raise ConfigError(problems)
