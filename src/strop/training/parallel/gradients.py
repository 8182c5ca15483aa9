"""From the gradients of each rank to those of one process, and their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.training.parallel.mesh import Mesh, total
from strop.training.parallel.tensor import Part

# Bytes of gradients that are summed over the ranks at a time.
BUCKET = 64 << 20


class Gradients(Protocol):
    """What the optimizer does with gradients before it uses them."""

    def reduce(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Make the gradients of all masters those of the whole batch."""
        ...

    def norm(self, masters: Mapping[str, nn.Parameter]) -> Tensor:
        """Their global norm, a float32 number, the same on every rank."""
        ...

    def clip(self, masters: Mapping[str, nn.Parameter], most: float, norm: Tensor) -> None:
        """Scale them down to a norm, if they are longer."""
        ...


class PlainGradients:
    """Those of one process."""

    def reduce(self, masters: Mapping[str, nn.Parameter]) -> None:
        """They are what they are."""

    def norm(self, masters: Mapping[str, nn.Parameter]) -> Tensor:
        return torch.nn.utils.get_total_norm([m.grad for m in masters.values() if m.grad is not None])

    def clip(self, masters: Mapping[str, nn.Parameter], most: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(list(masters.values()), most, norm)


class RankGradients:
    """Those of one rank of many.

    Args:
        part: how a rank holds the weight of a name. fsdp: gradients are summed over the copies already.
    """

    def __init__(self, mesh: Mesh, part: Callable[[str], Part], *, fsdp: bool) -> None:
        self._mesh, self._part, self._fsdp = mesh, part, fsdp

    def reduce(self, masters: Mapping[str, nn.Parameter]) -> None:
        if not self._fsdp:
            self._fill_in(masters)
            for bucket in _buckets([_local(m.grad) for m in masters.values() if m.grad is not None]):
                _sum(bucket, self._mesh.copies)
        parts = [m.grad for name, m in masters.items() if self._part(name).kind == "summed" and m.grad is not None]
        for bucket in _buckets([_local(grad) for grad in parts]):
            _sum(bucket, self._mesh.tensor)

    def norm(self, masters: Mapping[str, nn.Parameter]) -> Tensor:
        device = next((_local(m.grad).device for m in masters.values() if m.grad is not None), torch.device("cpu"))
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for divided in (False, True):
            chosen = [
                _local(m.grad)
                for name, m in masters.items()
                if m.grad is not None and (self._part(name).kind == "divided") == divided
            ]
            if chosen:
                lengths = torch.stack(torch._foreach_norm(chosen)).double()
                squares[int(divided)] = (lengths**2).sum()
        if self._fsdp:
            mesh = self._mesh.weights
            total(squares, mesh.get_group("shard") if mesh.ndim > 1 else mesh.get_group())
        squares[1:] = total(squares[1:].clone(), self._mesh.tensor)
        return squares.sum().sqrt().float()

    def clip(self, masters: Mapping[str, nn.Parameter], most: float, norm: Tensor) -> None:
        scale = (most / (norm + 1e-6)).clamp(max=1.0)
        grads = [_local(m.grad) for m in masters.values() if m.grad is not None]
        torch._foreach_mul_(grads, scale.to(grads[0].device))

    def _fill_in(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Zeros where another rank has a gradient and this one, which had no stream for it, has none."""
        has = torch.tensor([m.grad is not None for m in masters.values()], dtype=torch.int32)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._mesh.copies)
        for there, master in zip(has.tolist(), masters.values(), strict=True):
            if there and master.grad is None:
                master.grad = torch.zeros_like(master)


def _local(grad: Any) -> Tensor:
    found: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return found


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    size = 0
    for tensor in tensors:
        found.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET:
            yield found
            found, size = [], 0
    if found:
        yield found


def _sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))
