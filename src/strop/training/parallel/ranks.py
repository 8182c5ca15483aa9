"""What a trainer asks of its surroundings: alone, or as one of many ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.algorithms.batch import TokenBatch
from strop.errors import ModelError
from strop.models.adapters import without_adapters
from strop.models.attention import Plan
from strop.models.forward import PackedInputs, backbone
from strop.models.logprobs import Vocabulary
from strop.training.parallel.balance import shares, stream_costs, units_of
from strop.training.parallel.collectives import leave
from strop.training.parallel.context import ContextAttention
from strop.training.parallel.gradients import Gradients, PlainGradients, RankGradients
from strop.training.parallel.mesh import Mesh, total
from strop.training.parallel.shard import shard
from strop.training.parallel.tensor import Part, TensorParallel


class Whole(nn.Module):
    """A model with its value head, called as one module, so that FSDP has the weights of all of it at hand."""

    def __init__(self, model: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.value_head = model, value_head

    def forward(self, work: Callable[[], Any]) -> Any:
        """What `work`, which uses the model, returns."""
        return work()


class Alone:
    """One rank that has everything."""

    rank = 0
    world = 1
    multiple = 1
    """Tokens of a packed row are a multiple of it."""
    context_rank = 0
    """Which part of a packed row it computes."""
    passes_together = False
    """Whether all ranks have to make the same number of passes."""
    divided = False
    """Whether a rank has but a part of the trained matrices."""
    divides_layers = False
    """Whether a rank has but a part of each layer also while it computes."""

    def divide(self, model: nn.Module, *, value_head: nn.Module | None = None) -> Whole:
        """Take this rank's part of a model, in place; what is called for a pass is returned."""
        return Whole(model, value_head)

    def gradients(self) -> Gradients:
        """How gradients become those of all ranks."""
        return PlainGradients()

    def share(self, batch: TokenBatch, *, whole_groups: bool) -> Tensor:
        """[n] int64, increasing: the sequences of a batch that this rank computes."""
        return torch.arange(batch.sequences)

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        return count

    def total(self, values: Tensor) -> Tensor:
        """[...] on the CPU, summed over ranks that have other sequences."""
        return values

    def all_of(self, value: Any) -> list[Any]:
        """What each of the ranks with other sequences has, one of each."""
        return [value]

    def plan(self, plan: Plan) -> Plan:
        """The plan that this rank's part of a packed row is attended with."""
        return plan

    def hidden(self, model: nn.Module, inputs: PackedInputs) -> Tensor:
        """[t, H]: last hidden states of this rank's part of a packed row."""
        found = backbone(model)(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False)
        return found.last_hidden_state[0]

    def at(self, hidden: Tensor, places: Tensor, *, vocabulary: bool) -> Tensor:
        """[n, H]: the hidden states [t, H] at those of the places [N] that are this rank's. vocabulary: for the output
        head, which may be divided."""
        return hidden.index_select(0, places)

    def mine(self, inputs: PackedInputs, places: Tensor) -> Tensor | None:
        """[n]: which of the places [N] of a packed row are this rank's; None for all of them."""
        return None

    def together(self, values: Tensor, mine: Tensor | None, count: int) -> Tensor:
        """[N] from this rank's [n], the same on all ranks of a stream."""
        return values

    def vocabulary(self) -> Vocabulary | None:
        """What this rank has of the output head; None for all of it."""
        return None

    def rest(self, whole: Whole) -> None:
        """Called when a pass without a gradient is over."""

    def begin(self, whole: Whole, *, last: bool) -> None:
        """Called before each pass with a gradient. last: of the passes of an update."""

    def least_room(self, needed: int, free: int) -> tuple[int, int]:
        """(bytes needed, bytes free) of the host that has the least room for what all ranks on it need."""
        return needed, free

    def whole(self, name: str, value: Tensor) -> Tensor:
        """A trained weight, or a tensor shaped like it, from the parts of all ranks, which all have to ask."""
        return value


class Ranks(Alone):
    """One of many ranks.

    Args:
        mesh: the process groups. fsdp: divide the weights too, else every rank that computes the same layer has all of
            it. dtype: what is computed in. sequence: see `TensorParallel`. offload: see `fully_shard`. every_pass: sum
            gradients over the ranks after each pass, so that no rank keeps more of them than its share; else after the
            last one of an update.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        fsdp: bool,
        dtype: torch.dtype,
        sequence: bool = False,
        offload: bool = False,
        every_pass: bool = False,
    ) -> None:
        self.mesh = mesh
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._fsdp, self._dtype, self._sequence, self._offload = fsdp, dtype, sequence, offload
        self._every_pass = every_pass
        d = mesh.dimensions
        self.multiple = d.context * (d.tensor if sequence else 1)
        self.context_rank = mesh.context_rank
        self.passes_together = fsdp
        self.divided = fsdp or d.tensor > 1
        self.divides_layers = d.tensor > 1
        self._tensor: TensorParallel | None = None
        self._cost = (0, 0)

    def divide(self, model: nn.Module, *, value_head: nn.Module | None = None) -> Whole:
        base = without_adapters(model)
        config = base.config.get_text_config()
        matrices = sum(p.numel() for p in base.parameters() if p.dim() > 1)
        self._cost = (matrices, config.hidden_size * config.num_hidden_layers)
        self._check_heads(config)
        layers = None
        if self.mesh.dimensions.tensor > 1:
            layers = TensorParallel(model, self.mesh.tensor, sequence=self._sequence)
            if self._tensor is None:
                self._tensor = layers
        whole = Whole(model, value_head)
        if self._fsdp:
            shard(whole, model, self.mesh.weights, self._dtype, offload=self._offload)
        return whole

    def gradients(self) -> Gradients:
        return RankGradients(self.mesh, self.part, fsdp=self._fsdp)

    def part(self, name: str) -> Part:
        """How this rank holds a trained weight, before FSDP divides it further; a head beside the model is whole."""
        if self._tensor is None:
            return Part("same")
        return self._tensor.parts.get(name, Part("same"))

    def share(self, batch: TokenBatch, *, whole_groups: bool) -> Tensor:
        weights, width = self._cost
        ranks = self.mesh.data_ranks
        costs = stream_costs(batch.lengths(), weights=weights, width=width)
        units = units_of(batch, costs, ranks, whole_groups=whole_groups)
        return shares(costs, units, ranks)[self.mesh.data_rank]

    def most(self, count: int) -> int:
        found = torch.tensor([count])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mesh.data)
        return int(found)

    def total(self, values: Tensor) -> Tensor:
        return total(values.contiguous(), self.mesh.data)

    def all_of(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.mesh.data_ranks
        dist.all_gather_object(found, value, group=self.mesh.data)
        return found

    def plan(self, plan: Plan) -> Plan:
        return plan if self.mesh.dimensions.context == 1 else ContextAttention(plan, self.mesh.context)

    def hidden(self, model: nn.Module, inputs: PackedInputs) -> Tensor:
        start, end = self._span(inputs)
        ids, positions = inputs.input_ids[:, start:end], inputs.position_ids[:, start:end]
        found = backbone(model)(input_ids=ids, position_ids=positions, use_cache=False)
        return found.last_hidden_state[0]

    def at(self, hidden: Tensor, places: Tensor, *, vocabulary: bool) -> Tensor:
        if self._tensor is not None:
            hidden = self._tensor.to_vocabulary(hidden) if vocabulary else self._tensor.to_whole_head(hidden)
        first = self.context_rank * hidden.shape[0]
        inside = (places >= first) & (places < first + hidden.shape[0])
        return hidden.index_select(0, places[inside] - first)

    def mine(self, inputs: PackedInputs, places: Tensor) -> Tensor | None:
        if self.mesh.dimensions.context == 1:
            return None
        start, end = self._span(inputs)
        return torch.nonzero((places >= start) & (places < end))[:, 0]

    def together(self, values: Tensor, mine: Tensor | None, count: int) -> Tensor:
        if mine is None:
            return values
        return leave(values.new_zeros(count).index_put((mine,), values), self.mesh.context)

    def vocabulary(self) -> Vocabulary | None:
        return None if self._tensor is None else self._tensor.vocabulary

    def rest(self, whole: Whole) -> None:
        if self._fsdp:
            whole.reshard()  # type: ignore[operator]

    def begin(self, whole: Whole, *, last: bool) -> None:
        if self._fsdp:
            # All ranks make equally many passes, so they agree on which one is the last. Until then FSDP adds up whole
            # gradients in the number format that they are summed in, float32.
            whole.set_requires_gradient_sync(last or self._every_pass)  # type: ignore[operator]

    def least_room(self, needed: int, free: int) -> tuple[int, int]:
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, (socket.gethostname(), needed, free))
        hosts: dict[str, tuple[int, int]] = {}
        for host, own, left in said:
            before = hosts.get(host, (0, left))
            hosts[host] = before[0] + own, min(before[1], left)
        return max(hosts.values(), key=lambda host: host[0] / max(host[1], 1))

    def whole(self, name: str, value: Tensor) -> Tensor:
        value = value.detach()
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        if self._tensor is None:
            return full
        return self._tensor.whole(self.part(name), full)

    def local(self, name: str, value: Tensor) -> Tensor:
        """This rank's part, before FSDP, of a whole tensor."""
        return value if self._tensor is None else self._tensor.mine(self.part(name), value)

    def _span(self, inputs: PackedInputs) -> tuple[int, int]:
        each = inputs.tokens // self.mesh.dimensions.context
        return self.context_rank * each, (self.context_rank + 1) * each

    def _check_heads(self, config: Any) -> None:
        d = self.mesh.dimensions
        if config.num_attention_heads % (d.context * d.tensor):
            raise ModelError(
                f"{config.num_attention_heads} attention heads cannot be divided by tensor x context "
                f"({d.tensor} x {d.context})",
                where="cluster.trainer",
                mend="choose numbers whose product divides the heads",
            )


__all__ = ["Alone", "Ranks", "Whole"]
