"""From token streams to the flat batch, and from the batch to mini-batches and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.models.forward import PackedInputs, packed_inputs
from strop.models.layout import LEAST_SHARED, common_prefix, pack, padded
from strop.models.moving import moved


class Stream(Protocol):
    """What a trainable stream must have; `rollout.TokenStream` is one. Arrays of length L."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def loss_mask(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def versions(self) -> np.ndarray: ...


@runtime_checkable
class EndToEnd(Protocol):
    """Streams that are cuts of a single one, one after the other; `rollout.Streams` are. lengths: tokens of each."""

    flat: Stream
    lengths: Sequence[int]


def token_batch(
    streams: Sequence[Stream],
    *,
    rewards: Sequence[float],
    group_ids: Sequence[int],
    truncated: Sequence[bool],
) -> TokenBatch:
    """Lay streams end to end. Sequence-level arguments have one entry for each stream.

    Of streams that lie so already (`EndToEnd`) the batch shares the memory.
    """
    flat, sizes = None, None
    if isinstance(streams, EndToEnd):
        flat, sizes = streams.flat, streams.lengths
    lengths = np.array([len(one.tokens) for one in streams] if sizes is None else sizes, dtype=np.int64)
    places = np.arange(lengths.max(initial=0))

    def whole(name: str, dtype: torch.dtype) -> Tensor:
        found = np.concatenate([getattr(s, name) for s in streams]) if flat is None else getattr(flat, name)
        return torch.from_numpy(found).to(dtype)

    return TokenBatch(
        input_ids=whole("tokens", torch.int64),
        position_ids=torch.from_numpy(np.concatenate([places[:0], *(places[:length] for length in lengths)])),
        seq_ids=torch.from_numpy(np.repeat(np.arange(len(streams)), lengths)),
        loss_mask=whole("loss_mask", torch.bool),
        sampler_logprobs=whole("logprobs", torch.float32),
        versions=whole("versions", torch.int32),
        rewards=torch.tensor(list(rewards), dtype=torch.float32),
        group_ids=torch.tensor(list(group_ids), dtype=torch.int64),
        truncated=torch.tensor(list(truncated), dtype=torch.bool),
    )


def trained_tokens(batch: TokenBatch) -> int:
    """How many tokens of a batch are trained."""
    # NumPy counts five times as fast as torch does on a CPU.
    mask = batch.loss_mask
    return int(np.count_nonzero(mask.numpy()) if mask.device.type == "cpu" else mask.count_nonzero())


@dataclass
class MicroBatch:
    """Sequences that go through the model in one pass.

    sequences: [n] indices into the mini-batch, increasing. batch: their cut of the flat batch. inputs: their packed
    row. trained: [N] places in the cut where the loss mask is True, in the order of `inputs.targets`. tokens, pairs: of
    the row without what it is filled up with: tokens, and pairs of a token and one that it sees.
    """

    sequences: Tensor
    batch: TokenBatch
    inputs: PackedInputs
    trained: Tensor
    tokens: int = 0
    pairs: int = 0

    def scatter(self, values: Tensor) -> Tensor:
        """[T of the cut] float32 with values [N] at the trained tokens and 0 elsewhere; differentiable.

        Of values [N, K] it makes [T of the cut, K].
        """
        return values.new_zeros((self.batch.input_ids.shape[0], *values.shape[1:])).index_put((self.trained,), values)


class Passes(Sequence[MicroBatch]):
    """Micro-batches, each of which is laid out when it is asked for: while a GPU still computes the one before."""

    def __init__(self, made: Sequence[Callable[[], MicroBatch]]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, at: Any) -> Any:
        return Passes(self.made[at]) if isinstance(at, slice) else self.made[at]()


def mini_batches(batch: TokenBatch, parts: int) -> list[Tensor]:
    """Divide sequences into `parts` by whole prompts, in order; [n] indices each. Fewer parts if prompts are fewer."""
    _, order = torch.unique(batch.group_ids if batch.prompt_ids is None else batch.prompt_ids, return_inverse=True)
    groups = int(order.max()) + 1 if len(order) else 0
    found = []
    for chosen in torch.arange(groups).tensor_split(min(parts, max(groups, 1))):
        found.append(torch.nonzero(torch.isin(order, chosen))[:, 0])
    return found


def micro_batches(
    batch: TokenBatch,
    budget: int,
    device: torch.device,
    *,
    whole_groups: bool = False,
    share: bool = True,
    multiple: int = 1,
) -> Passes:
    """Cut a mini-batch into passes of at most `budget` packed tokens; what streams begin with alike is counted once.

    A sequence that alone is longer than the budget gets a pass of its own: nothing is cut or left out. With
    `whole_groups` the same holds of a group, whose sequences follow each other. Without `share` nothing is computed
    together: the packed row is the cut of the flat batch itself. Packed rows are filled up to a multiple of `multiple`
    tokens.
    """
    if not batch.sequences:
        return Passes([])
    edges = np.concatenate([[0], np.cumsum(batch.lengths().numpy())])
    ids, mask = batch.input_ids.numpy(), batch.loss_mask.numpy()
    streams = [ids[a:b] for a, b in pairwise(edges)]
    masks = [mask[a:b] for a, b in pairwise(edges)]
    # The prompt: everything before the first trained token. Prompts are shared as far as their tokens are equal.
    heads = [int(np.argmax(m)) if share and m.any() else 0 for m in masks]
    chosen: list[list[int]] = []
    used = 0
    for unit in _units(batch, whole_groups):
        alone = _extra(unit, None, streams, heads)
        if chosen:
            # An upper bound; near the end of the budget the packed row itself is counted.
            used += _extra(unit, chosen[-1][-1], streams, heads)
            if used > budget:
                part = [*chosen[-1], *unit]
                used = len(pack([streams[i] for i in part], [heads[i] for i in part]).layout.input_ids)
        if not chosen or used > budget:
            chosen.append([])
            used = alone
        chosen[-1] += unit
    return Passes([partial(_micro_batch, batch, part, streams, masks, heads, device, multiple) for part in chosen])


def _units(batch: TokenBatch, whole_groups: bool) -> list[list[int]]:
    """Sequences that must stay together, in order."""
    if not whole_groups:
        return [[at] for at in range(batch.sequences)]
    counts = torch.unique_consecutive(batch.group_ids, return_counts=True)[1].tolist()
    return [part.tolist() for part in torch.arange(batch.sequences).split(counts)]


def _extra(unit: list[int], before: int | None, streams: list[np.ndarray], heads: list[int]) -> int:
    """At most how many packed tokens some sequences add behind another."""
    total = 0
    for at in unit:
        common = 0
        if before is not None:
            common = common_prefix(streams[at][: heads[at]], streams[before][: heads[before]])
        total += len(streams[at]) - max(0, common - LEAST_SHARED + 1)
        before = at
    return total


def _micro_batch(
    batch: TokenBatch,
    part: list[int],
    streams: list[np.ndarray],
    masks: list[np.ndarray],
    heads: list[int],
    device: torch.device,
    multiple: int,
) -> MicroBatch:
    own = pack([streams[at] for at in part], [heads[at] for at in part])
    packed = padded(own, multiple)
    sequences = torch.tensor(part)
    cut = batch.select(sequences)
    return MicroBatch(
        sequences=sequences,
        batch=cut.mapped(lambda value: moved(value, device)),
        inputs=packed_inputs(packed, [masks[at] for at in part], device),
        trained=moved(torch.nonzero(cut.loss_mask)[:, 0], device),
        tokens=len(own.layout.input_ids),
        pairs=own.layout.pairs,
    )


def filler(batch: TokenBatch, device: torch.device, *, multiple: int = 1) -> MicroBatch:
    """A pass without sequences: for a rank that has nothing left to do while others, who need its share of the weights,
    have."""
    packed = padded(pack([np.zeros(1, np.int64)]), multiple)
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        sequences=none,
        batch=batch.select(none).to(device),
        inputs=packed_inputs(packed, [np.zeros(1, bool)], device),
        trained=none.to(device),
    )
