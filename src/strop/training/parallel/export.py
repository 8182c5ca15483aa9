"""A divided model as a Hugging Face folder, without having all of it in anybody's memory."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from strop.models.adapters import without_adapters
from strop.models.save import hold_model, save_model

# Bytes that are gathered before they are written.
PIECE = 1 << 30
PIECES = ".pieces"


def skeleton(model: nn.Module) -> Any:
    """A copy of a model with its weights on the meta device: it knows names, shapes and adapters, and takes no room."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def export_ranks(
    weights: Iterator[tuple[str, Tensor]], skeleton: Any, tokenizer: Any, folder: Path, *, writes: bool
) -> None:
    """Write a model from an iterator over its whole weights, which all ranks have to go through.

    The pieces are written as they come and read back as mapped memory, so that the same code as for a model in one
    process puts adapters in and divides the files.

    Args:
        skeleton: see above; its weights are exchanged. writes: this rank does the writing.
    """
    held: dict[str, Tensor] = {}
    files: list[Path] = []
    size = 0

    def write() -> None:
        files.append(folder / PIECES / f"{len(files)}.safetensors")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        save_file(held, files[-1])
        held.clear()

    for name, weight in weights:
        if writes:
            held[name] = weight.detach().cpu().contiguous()
            size += held[name].numel() * held[name].element_size()
            if size >= PIECE:
                write()
                size = 0
    if not writes:
        return
    if held:
        write()
    mapped: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as pieces:
            mapped |= {name: pieces.get_tensor(name) for name in pieces.keys()}  # noqa: SIM118 - not a dict
    save_model(_filled(skeleton, mapped), tokenizer, folder)
    shutil.rmtree(folder / PIECES)


def hold_ranks(
    weights: Iterator[tuple[str, Tensor]], skeleton: Any, tokenizer: Any, *, writes: bool
) -> Callable[[Path], None]:
    """As `export_ranks`, but all of the model is held in the memory of the rank that writes, until the function that is
    returned is called there; it needs no other rank."""
    held = {}
    for name, weight in weights:
        if writes:
            held[name] = weight.detach().to("cpu", copy=True).contiguous()
    if not writes:
        return lambda folder: None
    return hold_model(_filled(skeleton, held), tokenizer, lambda tensor: tensor)


def _filled(skeleton: Any, weights: dict[str, Tensor]) -> Any:
    filled = copy.deepcopy(skeleton)
    filled.load_state_dict(weights, strict=False, assign=True)
    base = without_adapters(filled)
    base.tie_weights()
    return filled
