"""Processes that begin with everything imported: they are forked from one that has it, and does nothing else."""

from __future__ import annotations

import multiprocessing
from typing import Any

IMPORTED = [
    "peft",
    "strop.algorithms.named",
    "strop.algorithms.supervised",
    "strop.models.create",
    "strop.models.load",
    "strop.publishing.receiver",
    "strop.publishing.sides",
    "strop.training.parallel.ranks",
    "strop.training.single",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
]
"""Nothing of it starts a thread, or touches a GPU, which a fork would not survive."""


def forked() -> Any:
    """A context of `multiprocessing`. Imports take such a process some seconds, and the work of a test far less."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
