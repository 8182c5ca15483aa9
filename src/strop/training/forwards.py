"""The forward pass of a trainer: from a packed row to what is asked of its trained tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from strop.models.attention import Plan, running
from strop.models.blocks import ChangedBlocks
from strop.models.forward import PackedInputs, token_logprobs
from strop.models.logprobs import Entropy
from strop.models.scalar import packed_scores
from strop.training.batching import MicroBatch
from strop.training.parallel.ranks import Alone, Whole
from strop.training.ranges import named, named_plan

Head = Literal["logprobs", "score", "value"]


@dataclass
class Given:
    """What a pass gives for the trained tokens, [N] each: log-probabilities or scores, entropies, and the values of a
    head on the same backbone."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """As a tuple, in which FSDP looks for tensors with a gradient."""
        return self.logprobs, self.entropy, self.values


@dataclass(frozen=True)
class Asked:
    """What a pass is to give.

    entropy: whether, and with a gradient or not. hits: [N], is filled with whether each token is the likeliest. frozen:
    only the value head has a gradient. even: see `linear_logprobs`.
    """

    entropy: Entropy = "none"
    temperature: float = 1.0
    hits: Tensor | None = None
    frozen: bool = False
    even: bool = False


@dataclass(frozen=True)
class Forwards:
    """How a model is run over packed rows, together with the other ranks.

    blocks: how those of `model` are computed, None for as they are; those of another, such as a reference, are plain.
    head, chunk: see `SingleDeviceTrainer`.
    """

    model: Any
    ranks: Alone
    blocks: ChangedBlocks | None
    head: Head
    chunk: int

    @property
    def compiled(self) -> bool:
        return self.blocks is not None and self.blocks.compiled

    @contextmanager
    def running(self, model: Any, plan: Plan, *, plain: bool = False) -> Iterator[None]:
        """A plan for a model's attention, and how its blocks are computed, for one pass. plain: as they are."""
        blocks = self.blocks if model is self.model and not plain else None
        with running(model, named_plan(plan)), nullcontext() if blocks is None else blocks.used():
            yield

    def plan(self, micro: MicroBatch) -> Plan:
        return self.ranks.plan(micro.inputs.attention)

    def trained(self, whole: Whole, micro: MicroBatch, asked: Asked) -> Given:
        """What the model gives for the trained tokens of a micro-batch."""
        if not len(micro.trained) and not self.ranks.passes_together:
            empty = torch.zeros(0, device=micro.inputs.targets.device)
            return Given(empty, empty, empty)
        return Given(*whole(lambda: self.compute(whole, micro.inputs, asked).all()))

    def compute(self, whole: Whole, inputs: PackedInputs, asked: Asked) -> Given:
        """The pass itself, inside of `whole`."""
        ranks, model = self.ranks, whole.model
        places = inputs.places if self.head == "score" else inputs.predictors
        mine, count = ranks.mine(inputs, places), len(places)
        hits = asked.hits
        with torch.set_grad_enabled(torch.is_grad_enabled() and not asked.frozen):
            with named("blocks"):
                hidden = ranks.hidden(model, inputs)
            if self.head != "logprobs":
                at_head = ranks.at(hidden, places, vocabulary=False)
                scores = ranks.together(packed_scores(model, at_head), mine, count)
                return Given(scores, torch.zeros_like(scores), torch.zeros_like(scores))
            own_hits = hits if mine is None or hits is None else hits.new_zeros(len(mine))
            with named("output head"):
                logprobs, spread = token_logprobs(
                    model,
                    ranks.at(hidden, places, vocabulary=True),
                    inputs.targets if mine is None else inputs.targets[mine],
                    temperature=asked.temperature,
                    chunk=self.chunk,
                    entropy=asked.entropy,
                    hits=own_hits,
                    even=asked.even,
                    vocabulary=ranks.vocabulary(),
                )
            logprobs = ranks.together(logprobs, mine, count)
            spread = ranks.together(spread, mine, count)
            if hits is not None and own_hits is not None and mine is not None:
                hits.copy_(ranks.together(own_hits, mine, count))
        if whole.value_head is None:
            return Given(logprobs, spread, torch.zeros_like(spread))
        at_head = ranks.at(hidden, places, vocabulary=False)
        return Given(logprobs, spread, ranks.together(whole.value_head(at_head.float())[:, 0], mine, count))
