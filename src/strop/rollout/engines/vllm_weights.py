"""Where the weights of a model's files are in a model of vLLM, and how they get in.

vLLM fuses some of them (query, key and value; gate and up), pads the vocabulary, divides them among the processes of a
tensor-parallel engine, and on some devices keeps them in a form of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NAMED = 5
"""Tensors that a message has room for."""


@dataclass(frozen=True)
class Sent:
    """What weights are without their values, by the names of Hugging Face. shapes: in order. same_as: the names whose
    values lie where those of another name do, as a tied head's."""

    shapes: dict[str, tuple[int, ...]]
    same_as: dict[str, str]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Sent:
        first: dict[int, str] = {}
        same_as = {}
        for name, tensor in weights.items():
            owner = first.setdefault(tensor.data_ptr(), name)
            if owner != name:
                same_as[name] = owner
        return cls({name: tuple(tensor.shape) for name, tensor in weights.items()}, same_as)


class Place(NamedTuple):
    """live: the values in vLLM's model, a view. part: which of the weight's they are."""

    live: Tensor
    part: tuple[slice, ...]


def places(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, rank: int = 0, size: int = 1
) -> dict[str, Place]:
    """Where the values are: in whole parameters, in parts of fused ones, in the first rows of a padded vocabulary, or
    in the share of a rank. What is not kept in such a form is left out.

    Args:
        rank, size: of the processes that divide the weights.
    """
    own = dict(model.named_parameters())
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found = {}
    for name, shape in shapes.items():
        live = own.get(name)
        place = None if live is None else _alone(live.detach(), shape, rank, size)
        for whole, parts in fused.items():
            part = next((one for one in parts if f".{one}." in name), None)
            if (
                live is None
                and part is not None
                and (live := own.get(name.replace(f".{part}.", f".{whole}."))) is not None
            ):
                siblings = [shapes.get(name.replace(f".{part}.", f".{one}.")) for one in parts]
                place = _fused(live.detach(), shape, siblings, parts.index(part), rank, size)
        if place is not None:
            found[name] = place
    return found


def _alone(live: Tensor, shape: tuple[int, ...], rank: int, size: int) -> Place | None:
    if not live.dim() or live.dim() != len(shape):
        return None
    if tuple(live.shape) == shape:
        return Place(live, ())
    if live.shape[1:] == shape[1:]:  # rows: padded at the end, then divided
        if len(live) * size < shape[0]:
            return None
        first = min(rank * len(live), shape[0])
        last = min(first + len(live), shape[0])
        return Place(live[: last - first], (slice(first, last),))
    if len(shape) == 2 and live.shape[0] == shape[0] and live.shape[1] * size == shape[1]:
        return Place(live, (slice(None), slice(rank * live.shape[1], (rank + 1) * live.shape[1])))
    return None


def _fused(
    live: Tensor, shape: tuple[int, ...], siblings: list[tuple[int, ...] | None], index: int, rank: int, size: int
) -> Place | None:
    rows = [0 if sibling is None else sibling[0] for sibling in siblings]
    # Keys and values that fewer heads have than there are ranks are there more than once: not looked for.
    if not live.dim() or live.shape[1:] != shape[1:] or any(count % size for count in rows):
        return None
    if len(live) * size != sum(rows):
        return None
    first, count = sum(rows[:index]) // size, rows[index] // size
    return Place(live[first : first + count], (slice(rank * count, (rank + 1) * count),))


def as_they_are(found: Mapping[str, Place], sent: Sent) -> bool:
    """Whether vLLM has all weights as they are in a model's files. Then they can be overwritten in place, which takes
    milliseconds; packed, shuffled and quantised ones are built anew, layer by layer."""
    return all(name in found or sent.same_as.get(name) in found for name in sent.shapes)


@contextmanager
def adapters_aside(model: nn.Module) -> Iterator[nn.Module]:
    """The model without vLLM's wrappers of layers that adapters may sit on.

    What a wrapped layer's weights are called, and whether vLLM's loaders find them, changes from version to version.
    """
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "base_layer") and hasattr(child, "set_lora")
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield model
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def stale(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Names whose values in vLLM's model are not these, of those that it keeps in their own form."""
    with torch.no_grad(), adapters_aside(model):
        found = places(model, Sent.of(weights).shapes)
        differ = [
            (live != weights[name][part].to(live.device, live.dtype)).any() for name, (live, part) in found.items()
        ]
        # One wait for the device.
        return [
            name for name, other in zip(found, torch.stack(differ).tolist() if differ else [], strict=True) if other
        ]


def load(worker: Any, weights: Iterable[tuple[str, Tensor]], sent: Sent, *, rank: int = 0, size: int = 1) -> None:
    """Put all weights into the model of one of vLLM's workers, by vLLM's own loaders.

    Args:
        weights: by the names of Hugging Face, whole, on any device and in any number format; `sent` describes them.
    """
    model: Any
    with torch.no_grad(), adapters_aside(worker.model_runner.get_model()) as model:
        found = places(model, sent.shapes, rank=rank, size=size)
        if worker.vllm_config.model_config.quantization is None and as_they_are(found, sent):
            model.load_weights(weights)
        else:
            worker.reload_weights(weights_iterator=iter(weights))
