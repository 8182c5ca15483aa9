"""`training.compile`: the blocks of a model by torch.compile, one by one and in place.

A block is compiled for any number of packed tokens. Attention over packed streams is left out, in the middle of it: how
a row divides into streams is another in every pass, and would be compiled anew each time. Blocks of one class share
what is compiled; weights are its inputs.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.errors import ModelError, UserError
from strop.models.attention import compiled_around
from strop.training.parallel.shard import blocks_of

# Variants of a block: with a gradient and without, in training and evaluation, adapters on and off, windows. torch
# would compute a ninth one as if nothing had been compiled.
VARIANTS = 64


class CompiledBlocks:
    """The blocks of a model, which are compiled while `used` is entered, and plain outside.

    Make it before FSDP divides the model, which gives the blocks other classes. Nothing is compiled before it is used.

    Raises:
        ModelError: transformers does not say what the model's blocks are.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks = blocks_of(model)
        if not blocks:
            raise ModelError(
                f"{type(model).__name__} does not name the class of its blocks, so they cannot be compiled",
                where="training.compile",
                mend="remove the key",
            )
        config: Any = torch._dynamo.config  # type: ignore[attr-defined]
        config.recompile_limit = max(config.recompile_limit, VARIANTS)
        compiled_around()
        self._blocks: list[tuple[Any, Any]] = []
        for block in blocks:
            block.compile(dynamic=True)
            self._blocks.append((block, block._compiled_call_impl))
            block._compiled_call_impl = None  # type: ignore[assignment]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute the blocks as they were compiled."""
        for block, compiled in self._blocks:
            block._compiled_call_impl = compiled
        try:
            yield
        finally:
            for block, _ in self._blocks:
                block._compiled_call_impl = None


def check_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile lacks what it compiles with on a device."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UserError(
                "torch.compile needs a C++ compiler on a CPU, and there is none",
                where="training.compile",
                mend="install g++, or name a compiler in the variable CXX; or remove the key",
            ) from error
        headers = sysconfig.get_path("include")
        if not Path(headers, "Python.h").exists():
            raise UserError(
                f"torch.compile needs the headers of Python on a CPU, and they are not in {headers}",
                where="training.compile",
                mend="install them (the package python3-dev); or remove the key",
            )
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(
                "torch.compile needs Triton on a GPU, and it is not there or does not know this one",
                where="training.compile",
                mend="install the package triton, or remove the key",
            )


__all__ = ["CompiledBlocks", "check_compiler"]
