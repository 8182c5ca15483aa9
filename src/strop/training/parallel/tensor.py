"""Tensor parallelism: each rank of a layer holds a part of its heads, features, experts and vocabulary.

Weights become plain, smaller tensors, and the modules around them stay as they are, so that this composes with
adapters, recomputation and FSDP. Two rules keep gradients right in any architecture of the family (arXiv 1909.08053):

- Attention and feed-forward block are entered and left through `collectives.enter` and `leave` (or, with sequence
  parallelism, `gather` and `scatter`). What is inside computes a part of a sum.
- So the gradient of a whole weight *inside* is a part of a sum too, whatever it is: norms of queries and keys, routers,
  halves of adapters. It is summed over the ranks before the update. With sequence parallelism that holds of those
  between the layers as well, which see a piece of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.errors import ModelError
from strop.models.adapters import without_adapters
from strop.training.parallel.collectives import all_gather, enter, gather, leave, scatter

# Linear layers by what of their weight [out, in] is divided.
OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
INPUTS = ("o_proj", "down_proj")
WHERE = "cluster.trainer.tensor"

Kind = Literal["divided", "summed", "same"]


@dataclass(frozen=True)
class Part:
    """What a rank holds of a weight.

    kind: `divided` along `dim`, of `size` in all; or whole, with gradients that have to be `summed` over the ranks, or
    that are the `same` on each.
    """

    kind: Kind
    dim: int = 0
    size: int = 0


class TensorParallel:
    """A model divided among the ranks of a group, in place; the trained weights have to be looked up anew afterwards.

    Args:
        model: a Llama-shaped causal model, with adapters or without, the same on each rank. group: ranks of a layer.
        sequence: divide what lies between the layers along the stream.

    Attributes:
        parts: how this rank holds the weight of a name. FSDP may divide it further.
        vocabulary: what it has of the output head.

    Raises:
        ModelError: the model is shaped otherwise, or cannot be divided by so many ranks.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, sequence: bool) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sequence = sequence
        self._parts: dict[int, Part] = {}
        base = without_adapters(model)
        blocks = _blocks(base)
        _check(base, blocks, self.ranks)
        for block in blocks:
            for module in (block.self_attn, block.mlp):
                self._divide_block(module)
        self._divide_vocabulary(base)
        if (score := getattr(base, "score", None)) is not None:
            # A scalar head sees the whole stream on every rank.
            self._parts |= {id(p): Part("same") for p in score.parameters()}
        self.parts = {name: self._part(p) for name, p in model.named_parameters()}

    def _part(self, parameter: nn.Parameter) -> Part:
        return self._parts.get(id(parameter), Part("summed" if self.sequence else "same"))

    def whole(self, part: Part, value: Tensor) -> Tensor:
        """The weight, or a tensor shaped like it, from the parts of all ranks; all have to ask."""
        if part.kind != "divided":
            return value
        longest = -(-part.size // self.ranks)
        flat = value.movedim(part.dim, 0)
        padded = flat.new_zeros((longest, *flat.shape[1:]))
        padded[: len(flat)] = flat
        out = padded.new_empty((self.ranks * longest, *flat.shape[1:]))
        all_gather(out, padded, group=self.group)
        pieces = [out[at * longest :][: _length(part.size, self.ranks, at)] for at in range(self.ranks)]
        return torch.cat(pieces).movedim(0, part.dim).contiguous()

    def mine(self, part: Part, value: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        if part.kind != "divided":
            return value
        start = self.rank * -(-part.size // self.ranks)
        return value.narrow(part.dim, start, _length(part.size, self.ranks, self.rank))

    # What a forward pass does at the borders.

    def entered(self, x: Tensor) -> Tensor:
        """[1, T, ...] on the way into a block, from what the ranks hold between blocks."""
        return gather(x, 1, self.group, parts=True) if self.sequence else enter(x, self.group)

    def left(self, x: Tensor) -> Tensor:
        """The other way."""
        return scatter(x, 1, self.group) if self.sequence else leave(x, self.group)

    def to_vocabulary(self, hidden: Tensor) -> Tensor:
        """[T, H] before the divided output head."""
        return self.entered(hidden[None])[0]

    def to_whole_head(self, hidden: Tensor) -> Tensor:
        """[T, H] before a head that every rank has."""
        return gather(hidden, 0, self.group, parts=False) if self.sequence else hidden

    # Making it.

    def _divide_block(self, module: nn.Module) -> None:
        for name, child in module.named_modules():
            last = name.rsplit(".", 1)[-1]
            if hasattr(child, "gate_up_proj") and isinstance(child.gate_up_proj, nn.Parameter):
                self._divide_experts(child)
            elif last in (*OUTPUTS, *INPUTS):
                self._divide_linear(child, 0 if last in OUTPUTS else 1)
        for parameter in module.parameters():
            self._parts.setdefault(id(parameter), Part("summed"))
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self.entered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.entered(kwargs["hidden_states"])}

    def _leave(self, _: nn.Module, __: Any, out: Any) -> Any:
        return (self.left(out[0]), *out[1:]) if isinstance(out, tuple) else self.left(out)

    def _divide_linear(self, layer: Any, dim: int) -> None:
        base = getattr(layer, "base_layer", layer)
        self._replace(base, "weight", dim)
        if base.bias is not None:
            if dim == 1:
                raise ModelError(
                    f"{type(base).__name__} adds a bias after its inputs were divided, which {WHERE} does not support",
                    where=WHERE,
                    mend="set it to 1",
                )
            self._replace(base, "bias", 0)
        for half, own in (("lora_A", 1), ("lora_B", 0)):
            for adapter in getattr(layer, half, {}).values():
                if own == dim:
                    self._replace(adapter, "weight", dim)

    def _divide_experts(self, experts: Any) -> None:
        first = self.rank * -(-experts.num_experts // self.ranks)
        held = _length(experts.num_experts, self.ranks, self.rank)
        for name in [name for name, _ in experts.named_parameters(recurse=False)]:
            self._replace(experts, name, 0)
        experts.num_experts = held
        experts._is_expert_parallel = True

        def localise(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden, index, weights = (*args, *kwargs.values())
            mine = (index >= first) & (index < first + held)
            # One past the last expert is transformers' sign for an expert of another rank.
            return (hidden, torch.where(mine, index - first, held), torch.where(mine, weights, 0)), {}

        experts.register_forward_pre_hook(localise, with_kwargs=True)

    def _divide_vocabulary(self, base: Any) -> None:
        embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        size = embedding.weight.shape[0]
        self._replace(embedding, "weight", 0)
        if tied:
            head.weight = embedding.weight
        elif head is not None:
            self._replace(head, "weight", 0)
            if head.bias is not None:
                self._replace(head, "bias", 0)
        start = self.rank * -(-size // self.ranks)
        self.vocabulary = VocabularyPart(start, self.group)
        held = embedding.weight.shape[0]
        embedding.num_embeddings = held
        pad = embedding.padding_idx
        embedding.padding_idx = pad - start if pad is not None and start <= pad < start + held else None
        outside: list[Tensor] = []

        def localise(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            local = args[0] - start
            missing = (local < 0) | (local >= held)
            outside.append(missing)
            return (local.masked_fill(missing, 0), *args[1:])

        def complete(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            return self.left(out.masked_fill(outside.pop()[..., None], 0))

        embedding.register_forward_pre_hook(localise)
        embedding.register_forward_hook(complete)

    def _replace(self, module: nn.Module, name: str, dim: int) -> None:
        old = getattr(module, name)
        if self._part(old).kind == "divided":
            return
        part = Part("divided", dim, old.shape[dim])
        new = nn.Parameter(self.mine(part, old.detach()).clone(), requires_grad=old.requires_grad)
        setattr(module, name, new)
        self._parts[id(new)] = part


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's rows of the output head, and sums and maxima over those of all; see `models/logprobs.py`."""

    start: int
    group: dist.ProcessGroup

    def maximum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values


def _length(size: int, ranks: int, rank: int) -> int:
    longest = -(-size // ranks)
    return max(0, min(longest, size - rank * longest))


def _blocks(base: Any) -> list[Any]:
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base.base_model
    blocks = list(getattr(decoder, "layers", []))
    if not blocks or not all(hasattr(block, "self_attn") and hasattr(block, "mlp") for block in blocks):
        raise ModelError(
            f"{type(base).__name__} is not built of blocks of self_attn and mlp, so its layers cannot be divided",
            where=WHERE,
            mend="set it to 1, or use a model of the shape of Llama, Mistral, Qwen 2, Qwen 3 or Qwen 3 MoE",
        )
    return blocks


def _linears(block: Any) -> Iterator[str]:
    for module in (block.self_attn, block.mlp):
        for name, child in module.named_modules():
            if isinstance(child, nn.Linear) and "lora_" not in name:
                yield name.removesuffix(".base_layer").rsplit(".", 1)[-1]


def _check(base: Any, blocks: list[Any], ranks: int) -> None:
    config = base.config.get_text_config()
    wrong = sorted({name for block in blocks for name in _linears(block)} - {*OUTPUTS, *INPUTS})
    if wrong:
        raise ModelError(
            f"{type(base).__name__} has linear layers that cannot be divided: {', '.join(wrong)}",
            where=WHERE,
            mend="set it to 1",
        )
    for what, count in (
        ("attention heads", config.num_attention_heads),
        ("key heads", config.num_key_value_heads),
        ("features of a feed-forward block", config.intermediate_size),
        ("experts", getattr(config, "num_experts", None) or ranks),
    ):
        if count % ranks:
            raise ModelError(
                f"{count} {what} cannot be divided among {ranks} ranks",
                where=WHERE,
                mend="choose a number that divides them",
            )
    if any(getattr(module, "lora_magnitude_vector", None) for module in base.modules()):
        raise ModelError(
            "DoRA measures whole rows of a weight, which tensor parallelism divides",
            where=WHERE,
            mend="set it to 1, or model.lora.dora to false",
        )


__all__ = ["Part", "TensorParallel", "VocabularyPart"]
