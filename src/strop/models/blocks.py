"""The blocks of a model: compiled, recomputed in the backward pass, or both.

A block is compiled by torch.compile, in place and for any number of packed tokens. Attention over packed streams is
left out, in the middle of it: how a row divides into streams is another in every pass, and would be compiled anew each
time. Blocks of one class share what is compiled; weights are its inputs.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.config.model import Recompute
from strop.errors import ModelError, UserError
from strop.models.adapters import without_adapters
from strop.models.attention import compiled_around
from strop.models.consistent_mode import is_consistent
from strop.models.recompute import recomputed

# Variants of a block: with a gradient and without, in training and evaluation, adapters on and off, windows. torch
# would compute a ninth one as if nothing had been compiled.
VARIANTS = 64


def blocks_of(model: Any) -> list[nn.Module]:
    """The decoder's blocks: modules of the classes that transformers says must stay whole, or of those that FSDP makes
    of them."""
    base = without_adapters(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if names & {of.__name__ for of in type(module).__mro__}]


class ChangedBlocks:
    """The blocks of a model, which are compiled and recomputed while `used` is entered, and plain outside.

    Make it before FSDP divides the model, which gives the blocks other classes. Nothing is compiled before it is used.

    Raises:
        ModelError: transformers does not say what the model's blocks are.
        ValueError: blocks of a model in the consistent mode are to be compiled.
    """

    def __init__(self, model: nn.Module, *, compiled: bool, recompute: Recompute) -> None:
        if compiled and is_consistent(model):
            raise ValueError("compiled blocks add up in an order of their own, which no engine has")
        blocks = blocks_of(model)
        if not blocks:
            key = "training.compile" if compiled else "model.activation_checkpointing"
            raise ModelError(
                f"{type(model).__name__} does not name the class of its blocks, so none can be compiled or recomputed",
                where=key,
                mend="set the key to false",
            )
        if compiled:
            config: Any = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, VARIANTS)
            compiled_around()
        self.compiled = compiled
        # (block, attribute that is called, what is put there)
        self._changed: list[tuple[Any, str, Any]] = []
        for number, block in enumerate(blocks):
            if recompute:
                compute = torch.compile(block.forward, dynamic=True) if compiled else block.forward
                # The peak is in the last block's backward pass, when all results are held. Those of one block fewer
                # cost a few thousandths of the time, and leave room for what that pass needs.
                forward = recomputed(compute, block, keep_attention=recompute == "keep_attention" and number > 0)
                self._changed.append((block, "forward", forward))
            elif compiled:
                block.compile(dynamic=True)
                self._changed.append((block, "_compiled_call_impl", block._compiled_call_impl))
                block._compiled_call_impl = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute the blocks so; keep it open over the backward pass."""
        for block, name, value in self._changed:
            object.__setattr__(block, name, value)
        try:
            yield
        finally:
            for block, name, _ in self._changed:
                if name == "forward":
                    object.__delattr__(block, name)
                else:
                    setattr(block, name, None)


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


__all__ = ["ChangedBlocks", "blocks_of", "check_compiler"]
