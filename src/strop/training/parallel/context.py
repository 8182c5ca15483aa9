"""Context parallelism: each rank has a part of the packed stream, and for attention a part of the heads.

Attention exchanges positions for heads and back (Ulysses, arXiv 2309.14509), so the plan that attends sees the whole
stream and does not know that there are other ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from strop.errors import ModelError
from strop.models.attention import Plan, Scores
from strop.training.parallel.collectives import exchange


class ContextAttention:
    """A plan for the whole stream, asked by ranks that have a part of it each. Tensors are [1, heads, T / ranks, d]."""

    def __init__(self, inner: Plan, group: dist.ProcessGroup) -> None:
        self._inner, self._group = inner, group
        self._ranks = dist.get_world_size(group)

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T / ranks, heads, d]."""
        heads, key_heads = query.shape[1], key.shape[1]
        if heads % self._ranks:
            raise ModelError(
                f"{heads} attention heads cannot be divided among {self._ranks} ranks",
                where="cluster.trainer.context",
                mend="choose a number that divides the heads, after `tensor` has divided them",
            )
        if key_heads % self._ranks:
            # Fewer key heads than ranks: each query head brings its own.
            key = key.repeat_interleave(heads // key_heads, 1)
            value = value.repeat_interleave(heads // key_heads, 1)
        if scores.sinks is not None:
            mine = scores.sinks.chunk(self._ranks)[dist.get_rank(self._group)]
            scores = replace(scores, sinks=mine)
        q, k, v = (exchange(x, split=1, join=2, group=self._group) for x in (query, key, value))
        found = self._inner.attend(layer, q, k, v, scores)
        return exchange(found, split=1, join=2, group=self._group)
