"""Which ranks share what: data, weights, streams, layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Dimensions:
    """How many ranks each kind of sharing has; their product is the number of ranks.

    replicas, shards: together they divide a step's streams; with FSDP the weights are divided within a replica.
    context: ranks of one packed stream. tensor: ranks of one layer.
    """

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * self.context * self.tensor


class Mesh:
    """The process groups of this rank. Ranks of one layer are neighbours, then those of one stream.

    Args:
        dimensions: their product is the number of ranks of the default process group.
        device: "cuda" or "cpu".

    Attributes:
        data: ranks with other streams and the same part of them. context, tensor: see `Dimensions`. copies: all ranks
            that compute gradients of the same values, data x context.
        weights: the mesh for `fully_shard`: one dimension, or with several replicas two.
    """

    def __init__(self, dimensions: Dimensions, device: str) -> None:
        world = dist.get_world_size()
        if world != dimensions.ranks:
            raise ValueError(f"{dimensions} is for {dimensions.ranks} ranks, and there are {world}")
        self.dimensions = dimensions
        d = dimensions
        ranks = torch.arange(world)
        apart = DeviceMesh(
            device,
            ranks.view(d.replicas * d.shards, d.context, d.tensor),
            mesh_dim_names=("data", "context", "tensor"),
        )
        self.data, self.context, self.tensor = (apart.get_group(name) for name in ("data", "context", "tensor"))
        self.data_rank, self.context_rank, self.tensor_rank = (
            apart.get_local_rank(name) for name in ("data", "context", "tensor")
        )
        together = DeviceMesh(
            device, ranks.view(d.replicas, d.shards * d.context, d.tensor), mesh_dim_names=("replica", "shard", "layer")
        )
        self.weights = together["replica", "shard"] if d.replicas > 1 else together["shard"]
        copies = DeviceMesh(device, ranks.view(-1, d.tensor), mesh_dim_names=("copy", "layer"))
        self.copies = copies.get_group("copy")
        # Layers are divided first and the pieces then by FSDP, which is the order in which a checkpoint nests them.
        self.nested = DeviceMesh(
            device,
            ranks.view(d.replicas, d.shards * d.context, d.tensor).permute(2, 0, 1).contiguous(),
            mesh_dim_names=("layer", "replica", "shard"),
        )

    @property
    def data_ranks(self) -> int:
        return self.dimensions.replicas * self.dimensions.shards


def total(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor summed over a group, in place."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor
