"""What an algorithm is: three hooks around pure functions.

An algorithm never sees a file, a process or an engine, and a loss never sees a local count: `denominators` is called
once for a whole mini-batch, before it is cut into micro-batches or handed to ranks, and every term of the loss is a sum
over tokens divided by its denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from strop.algorithms.batch import TokenBatch


@dataclass
class LossTerms:
    """What `loss` returns for one micro-batch.

    terms: name -> per-token loss [T], already weighted by its coefficient; each is aggregated with the algorithm's mode
    and the mini-batch's denominators, and their sum is minimised. metrics: name -> per-token value [T], detached, whose
    mean over the mini-batch's trained tokens is logged (a name that ends in `_max` logs the maximum). units: name ->
    detached values, one for each thing that the objective counts (a pair, a sequence), whose sum over the mini-batch
    divided by the denominator "" is logged.

    Where the objective counts other things than tokens, its terms have one entry for each of them.
    """

    terms: dict[str, Tensor]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """What a trainer minimises.

    It may have `whole_groups`, True where the loss of a sequence depends on the others of its group: a group is then
    never divided between micro-batches. And `needs_hits`: `batch.extra["hits"]` [T] is then 1 where the model's most
    likely token is the trained one, and 0 elsewhere. And `logs_entropy`, False where nobody asks how certain the model
    is. And `needs_targets`: the loss compares whole distributions, as `algorithms/targets.py` says; they are taken at
    `targets_temperature`, or without such an attribute at the trainer's.
    And `needs_values`: `batch.extra["new_values"]` [T] is then what a value head on the same backbone gives, with a
    graph; with `head_alone` nothing but this head has a gradient. And `counts_alike`, True where the loss has the same
    gradient to the log-probability of every trained token, which saves a pass over the output head.
    """

    needs_entropy: bool
    """Whether the loss uses the entropy of each token's distribution (it then has a graph)."""

    def loss(self, batch: TokenBatch, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        """Per-token losses of one micro-batch.

        Args:
            batch: a whole mini-batch or a cut of it.
            logprobs: [T] float32 with a graph, the policy's, 0 where the mask is False.
            entropy: [T] float32, 0 where the mask is False; None when it was not computed.
        """
        ...

    def denominators(self, batch: TokenBatch) -> Mapping[str, float]:
        """What each term is divided by, counted over a whole mini-batch; the key "" serves every other term."""
        ...

    def reduce(self, per_token: Tensor, batch: TokenBatch, denominator: float) -> Tensor:
        """Sum a term over a micro-batch: scalar float32; the sum over micro-batches is the loss of the mini-batch."""
        ...


class Algorithm(Objective, Protocol):
    """An objective of reinforcement learning.

    It may have more, which `loops/algorithm.py` reads where it is there: `needs_old_logprobs`, `needs_greedy` and
    `needs_teacher`, which ask for a field of the batch; `needs_targets` with `top_k`, which ask for more of the
    teacher; `correct(batch)`, called before `advantages`; and the rules of sampling `overlong_filter`, `without_spread`
    and `max_refills`.
    """

    name: str
    needs_reference: bool
    """Whether `ref_logprobs` must be filled before `advantages` and `loss`."""
    needs_group: bool
    """Whether a group of one has no advantage, so that `rollout.group_size` must be at least 2."""

    def advantages(self, batch: TokenBatch) -> Tensor:
        """[T] float32: the advantage of each token, from `rewards`, `group_ids` and what `needs_*` asked for."""
        ...
