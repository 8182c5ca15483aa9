"""Collectives with gradients. Each pair is the other's backward pass (arXiv 1909.08053, 2205.05198).

Between `enter` and `leave` every rank of a group computes a part of a sum. What lies outside is the same on all of
them, or with sequence parallelism a piece of the stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
# torch 2.13 renamed them.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, parts: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.parts = dim, group, parts
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.parts:
            return _scattered(grad, ctx.dim, ctx.group), None, None, None
        return _own(grad, ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: Group) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _exchanged(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.join, ctx.split, ctx.group), None, None, None


def enter(x: Tensor, group: Group) -> Tensor:
    """x, whose gradient is the sum of what the ranks' parts say."""
    return _Enter.apply(x, group)


def leave(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the ranks, the same on each; its gradient is the same on each too."""
    return _Leave.apply(x, group)


def gather(x: Tensor, dim: int, group: Group, *, parts: bool) -> Tensor:
    """The pieces of all ranks one after another. parts: what follows computes a part of a sum on each rank, so that
    gradients are summed; else it is the same on each."""
    return _Gather.apply(x, dim, group, parts)


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's piece of the sum of x over the ranks; `dim` is divisible by them."""
    return _Scatter.apply(x, dim, group)


def exchange(x: Tensor, *, split: int, join: int, group: Group) -> Tensor:
    """All to all: each rank gives away pieces along `split` and puts what it gets together along `join`."""
    return _Exchange.apply(x, split, join, group)


def _summed(x: Tensor, group: Group) -> Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def _gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    flat = x.movedim(dim, 0).contiguous()
    out = flat.new_empty((size * flat.shape[0], *flat.shape[1:]))
    all_gather(out, flat, group=group)
    return out.movedim(0, dim)


def _scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    flat = x.movedim(dim, 0).contiguous()
    out = flat.new_empty((flat.shape[0] // size, *flat.shape[1:]))
    reduce_scatter(out, flat, group=group)
    return out.movedim(0, dim)


def _own(x: Tensor, dim: int, group: Group) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return x.chunk(size, dim)[rank].contiguous()


def _exchanged(x: Tensor, split: int, join: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    given = torch.stack(x.chunk(size, split)).contiguous()
    got = torch.empty_like(given)
    dist.all_to_all_single(got, given, group=group)
    return torch.cat(got.unbind(0), join)
