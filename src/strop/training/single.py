"""The trainer on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from strop.algorithms.base import LossTerms, Objective
from strop.algorithms.batch import TokenBatch
from strop.config.model import Recompute
from strop.config.training import OptimizerSettings
from strop.models.adaptive import adaptive_ranks
from strop.models.blocks import ChangedBlocks
from strop.models.consistent_mode import frozen_copy
from strop.models.disturbed import disturbed
from strop.models.few_rows import few_rows
from strop.models.forward import PackedInputs, by_stream, packed_inputs
from strop.models.layout import pack, padded
from strop.models.logprobs import Entropy
from strop.models.neftune import embedding_noise, noisy_embeddings
from strop.models.repeated import RepeatedScores
from strop.training.batching import MicroBatch, Passes, filler, micro_batches, mini_batches, trained_tokens
from strop.training.forwards import Asked, Forwards, Given, Head
from strop.training.optimizer import MasterOptimizer
from strop.training.parallel.ranks import Alone, Whole
from strop.training.protocol import Role
from strop.training.ranges import named
from strop.training.snapshot import Held
from strop.training.store import VALUE_HEAD, Store
from strop.training.targets import forward_on_targets
from strop.training.totals import Totals
from strop.training.update_rules import outer_weights

# Copies of what is scored, of which the one whose score is moved the most says what rounding may do to it. Eight miss
# some turns of a block that rounding makes now and then.
_DISTURBANCES = 32


class SingleDeviceTrainer:
    """Trains a causal model on one device.

    Args:
        model: a causal model or a peft model; what requires a gradient is trained.
        optimizer: which one, and its schedule. total_updates: optimizer updates of the whole run.
        temperature: log-probabilities are taken at it; the sampling temperature.
        budget: packed tokens in one forward and backward pass. chunk: rows whose logits exist at a time.
        parts, epochs: mini-batches of a step and passes over it.
        reference: keep a frozen copy of the model as it is now; not needed with adapters, which are switched off.
        recompute, compiled: how the blocks are computed, see `models/blocks.py`.
        head: what the model gives for a trained token: its log-probability, or for a model with a scalar head
            (`models/scalar.py`) the number at the token itself ("score") or at the one before it ("value").
        neftune_alpha: size of the noise on the embeddings while training (`models/neftune.py`); the batches then have
            `draw_keys`. 0 is none.
        value_head: a scalar head on the backbone of a causal model, trained with it: see `logprobs_and_values` and
            `WithValues`. value_rate: its peak learning rate, which follows the schedule of the model's.
        moving_ranks: let the ranks of adapters move that were made for it (`models/adaptive.py`).
        ranks: the other processes that train together with this one; all of them are made, and called, alike, and each
            returns the same. The model is then divided in place.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSettings,
        *,
        total_updates: int,
        temperature: float = 1.0,
        budget: int = 8192,
        chunk: int = 512,
        parts: int = 1,
        epochs: int = 1,
        reference: bool = False,
        recompute: Recompute = False,
        compiled: bool = False,
        head: Head = "logprobs",
        neftune_alpha: float = 0.0,
        value_head: nn.Linear | None = None,
        value_rate: float | None = None,
        moving_ranks: bool = False,
        ranks: Alone | None = None,
    ) -> None:
        self.model: Any = model
        self._ranks_of = Alone() if ranks is None else ranks
        self.device = next(model.parameters()).device
        self._neftune_alpha = neftune_alpha
        self._temperature = temperature
        self._budget = budget
        self._chunk = chunk
        self._parts = parts
        self._epochs = epochs
        self._adapters = hasattr(model, "disable_adapter")
        self._reference: Whole | None = None
        if reference and not self._adapters:
            self._reference = self._ranks_of.divide(frozen_copy(model))
        self._input_begins = bool(recompute) and self._adapters
        if self._input_begins:
            # What begins a graph is then the input of the first block, not only the adapters in it.
            cast(Any, self.model).enable_input_require_grads()
        self._ranks = adaptive_ranks(model) if moving_ranks else None
        self._value_head = value_head
        outer = outer_weights(model)
        store = Store(model, self._ranks_of, moving=self._ranks)
        blocks = ChangedBlocks(model, compiled=compiled, recompute=recompute) if compiled or recompute else None
        self._forwards = Forwards(model, self._ranks_of, blocks, head, chunk)
        self._whole = self._ranks_of.divide(model, value_head=value_head)
        # Where others have parts of the model, their passes are not to be captured.
        self._repeated = RepeatedScores(model) if type(self._ranks_of) is Alone else None
        trained = list(model.named_parameters())
        scales = {}
        if value_head is not None:
            own = [(f"{VALUE_HEAD}.{name}", weight) for name, weight in value_head.named_parameters()]
            trained += own
            rate = optimizer.learning_rate if value_rate is None else value_rate
            scales = {name: rate / optimizer.learning_rate for name, _ in own}
        self.optimizer = MasterOptimizer(trained, optimizer, total_updates, outer, scales, self._ranks_of.gradients())
        self._store = store
        store.optimizer = self.optimizer

    def logprobs(self, batch: TokenBatch, *, role: Role = "policy") -> Tensor:
        """[T] float32 on the CPU, at the sampling temperature, 0 where the loss mask is False."""
        return self._passes(batch, role)[0]

    def logprobs_and_values(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """The policy's, and what its value head says before each trained token, from one pass: [T] float32 each."""
        return self._passes(batch, "policy")

    def _passes(self, batch: TokenBatch, role: Role) -> tuple[Tensor, Tensor]:
        """([T] log-probabilities, [T] values), without a gradient; values are 0 without a value head."""
        out, values = torch.zeros(2, batch.input_ids.shape[0]).unbind()
        with torch.no_grad(), self._as(role) as whole:
            # The same cuts as in `update`, so that the first mini-batch finds the same numbers bit for bit.
            for part in mini_batches(batch, self._parts):
                for micro in self._divided(batch.select(part)):
                    with self._forwards.running(whole.model, self._forwards.plan(micro)):
                        given = self._forwards.trained(whole, micro, Asked(temperature=self._temperature))
                    places = self._places(batch, part[micro.sequences])
                    out[places], values[places] = given.logprobs.cpu(), given.values.cpu()
            self._ranks_of.rest(whole)
        return self._ranks_of.total(out), self._ranks_of.total(values)

    def update(self, batch: TokenBatch, objective: Objective) -> dict[str, float]:
        """Forward, backward and optimizer step for each mini-batch of each epoch.

        Returns:
            Means over the mini-batches: each term of the loss, their sum, the objective's metrics, gradient norm,
            learning rate, entropy, and how far the sampler's log-probabilities are from the policy's (first update).
            `batch.extra["logprobs"]` [T] then holds the policy's log-probabilities as the first epoch saw them.
        """
        self.reload()
        if self._parts * self._epochs > 1 and batch.old_logprobs is None:
            batch.old_logprobs = self.logprobs(batch)
        totals = Totals()
        seen: list[tuple[Tensor, Tensor]] = []
        for epoch in range(self._epochs):
            for part in mini_batches(batch, self._parts):
                cut = batch.select(part)
                if not bool(cut.loss_mask.any()):
                    continue
                for sequences, values in self._mini_batch(cut, objective, totals, first=not totals.norms):
                    if epoch == 0:
                        seen.append((self._places(batch, part[sequences]), values))
        batch.extra["logprobs"] = torch.zeros(batch.input_ids.shape[0])
        for places, values in seen:
            batch.extra["logprobs"][places] = values.cpu()
        batch.extra["logprobs"] = self._ranks_of.total(batch.extra["logprobs"])
        return totals.means(self._ranks_of)

    def evaluate(self, batch: TokenBatch, objective: Objective) -> dict[str, float]:
        """The loss and its metrics on a batch that is not trained, in evaluation mode, as `update` reports them."""
        self._without_dropout()
        totals = Totals()
        denominators = objective.denominators(batch)
        with torch.no_grad():
            for micro in self._cut(batch, objective):
                with self._forwards.running(self.model, self._forwards.plan(micro)):
                    _, found, terms, entropy = self._loss(micro, objective, denominators)
                if found is not None:
                    totals.add(terms, found, micro, entropy, trained_tokens(batch), denominators[""])
            self._ranks_of.rest(self._whole)
        return totals.means(self._ranks_of)

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, at temperature 1, float32 [L]; the first one is NaN."""
        self._without_dropout()
        streams = [np.asarray(tokens, dtype=np.int64) for tokens in token_lists]

        def scores() -> Callable[[], Tensor]:
            inputs = self._of_all_tokens(streams)
            return lambda: self._score(inputs)

        with torch.no_grad():
            flat = None
            if self._repeated is not None:
                flat = self._repeated.of([stream.tolist() for stream in streams], 1.0, scores)
            if flat is None:
                flat = scores()()
                self._ranks_of.rest(self._whole)
        return by_stream(flat, streams)

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """How far rounding may move what `score` gives: the largest distance of each token's log-probability, float32
        [L], among copies in a pass whose layers are `disturbed`; the first one is NaN."""
        self._without_dropout()
        streams = [np.asarray(tokens, dtype=np.int64) for tokens in token_lists]
        # Side by side they take one pass over the weights, each with draws of its own.
        inputs = self._of_all_tokens(streams * _DISTURBANCES)
        plan = self._ranks_of.plan(inputs.attention)

        def scores() -> Tensor:
            return self._whole(lambda: self._forwards.compute(self._whole, inputs, Asked())).logprobs

        # Compiled blocks would be compiled anew with what is disturbed in them.
        with torch.no_grad(), self._forwards.running(self.model, plan, plain=True):
            plain = scores()
            with disturbed(self.model, self._ranks_of.context_rank):
                moved = (scores() - plain).abs().view(_DISTURBANCES, -1)
            self._ranks_of.rest(self._whole)
        return by_stream(moved.amax(0), streams)

    def _of_all_tokens(self, streams: Sequence[np.ndarray]) -> PackedInputs:
        packed = padded(pack(streams), self._ranks_of.multiple)
        return packed_inputs(packed, [np.arange(len(stream)) > 0 for stream in streams], self.device)

    def _score(self, inputs: PackedInputs) -> Tensor:
        """Log-probabilities [N] of the wanted tokens."""
        # Compiled blocks have their own products, and would be compiled anew for others.
        few = nullcontext() if self._forwards.compiled else few_rows(self.model)
        # What else computes these layers otherwise comes first, and is left alone.
        with self._forwards.running(self.model, self._ranks_of.plan(inputs.attention)), few:
            return self._whole(lambda: self._forwards.compute(self._whole, inputs, Asked())).logprobs

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Store.named_weights`."""
        return self._store.named_weights()

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Store.trained_weights`."""
        return self._store.trained_weights()

    def export(self, tokenizer: Any, folder: Path) -> None:
        """See `Store.export`."""
        self._store.export(tokenizer, folder)

    def save(self, directory: Path) -> dict[str, Any]:
        """See `Store.save`."""
        return self._store.save(directory)

    def hold(self, tokenizer: Any) -> Held:
        """See `Store.hold`."""
        return self._store.hold(tokenizer)

    def hold_state(self) -> Callable[[Path], dict[str, Any]]:
        """See `Store.hold_state`."""
        return self._store.hold_state()

    def held_bytes(self) -> tuple[int, int]:
        """See `Store.held_bytes`."""
        return self._store.held_bytes()

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """See `Store.load`."""
        self._store.load(directory, state)

    def offload(self) -> int:
        """See `Parked.offload`."""
        return self.optimizer.parked.offload()

    def reload(self) -> int:
        """See `Parked.reload`; an update does it itself."""
        return self.optimizer.parked.reload()

    def close(self) -> None:
        self.optimizer.close()
        if self._input_begins:
            self.model.disable_input_require_grads()

    def _without_dropout(self) -> None:
        # A walk through all modules takes as long as some layers do.
        if self.model.training:
            self.model.eval()

    @contextmanager
    def _as(self, role: Role) -> Iterator[Whole]:
        """The model that plays a role."""
        self._without_dropout()
        if role == "policy":
            yield self._whole
        elif self._adapters:
            with self.model.disable_adapter():
                yield self._whole
        elif self._reference is not None:
            yield self._reference
        else:
            raise ValueError("this trainer was made without a reference")

    def _mini_batch(
        self, batch: TokenBatch, objective: Objective, totals: Totals, *, first: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """One optimizer update; returns for each micro-batch its sequences and its log-probabilities [N]."""
        # With dropout the values that a head alone learns would be others than those that it is asked for.
        head_alone = getattr(objective, "head_alone", False)
        self.model.train(not head_alone)
        seen = []
        denominators = objective.denominators(batch)
        trained = trained_tokens(batch)
        sampled = batch.sampler_logprobs[batch.versions >= 0]
        first = first and len(sampled) > 0 and not bool(torch.isnan(sampled).all())
        # Noise belongs to a sequence, so none may be computed together with another.
        with named("packing"):
            cut = self._cut(batch, objective, share=not self._neftune_alpha)
        for at, micro in enumerate(cut, start=1):
            self._ranks_of.begin(self._whole, last=at == len(cut))
            running = self._forwards.running(self.model, self._forwards.plan(micro))
            with running, self._noise(micro), named("loss"):
                given, found, terms, entropy = self._loss(micro, objective, denominators)
                if len(micro.trained):
                    torch.stack(list(terms.values())).sum().backward()
                elif self._ranks_of.passes_together:
                    (given.logprobs.sum() + given.values.sum()).backward()
            if found is None:
                continue
            values = given.logprobs.detach()
            totals.add(terms, found, micro, entropy, trained, denominators[""])
            seen.append((micro.sequences, values))
            if first:
                totals.mismatch(micro.scatter(values), micro, trained)
        with named("optimizer"):
            if self._ranks is None or head_alone:
                totals.updated(self.optimizer.step())
            else:
                penalty = self._ranks.penalty()
                penalty.backward()
                totals.add_term("orthogonality", penalty.detach())
                totals.updated(self.optimizer.step(self._ranks.reallocate))
        return seen

    def _cut(self, batch: TokenBatch, objective: Objective, *, share: bool = True) -> Passes:
        return self._divided(batch, whole_groups=getattr(objective, "whole_groups", False), share=share)

    def _divided(self, batch: TokenBatch, *, whole_groups: bool = False, share: bool = True) -> Passes:
        """This rank's passes over a batch; their `sequences` are those of the batch."""
        ranks = self._ranks_of
        mine = ranks.share(batch, whole_groups=whole_groups)
        own = batch if len(mine) == batch.sequences else batch.select(mine)
        found = micro_batches(
            own, self._budget, self.device, whole_groups=whole_groups, share=share, multiple=ranks.multiple
        )

        def of_the_batch(made: Callable[[], MicroBatch]) -> MicroBatch:
            with named("packing"):
                micro = made()
            micro.sequences = mine[micro.sequences]
            return micro

        passes = [partial(of_the_batch, made) for made in found.made]
        if ranks.passes_together:
            missing = ranks.most(len(found)) - len(found)
            passes += [partial(filler, batch, self.device, multiple=ranks.multiple)] * missing
        return Passes(passes)

    def _noise(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """NEFTune's noise on the embeddings of what is computed inside, where it is asked for."""
        if not self._neftune_alpha:
            return nullcontext()
        batch = micro.batch
        assert batch.draw_keys is not None, "noise is drawn for each sequence by its key, and the batch has none"
        assert micro.inputs.tokens == len(batch.input_ids), "the packed row is not the flat batch"
        width = int(self.model.get_input_embeddings().weight.shape[1])
        keys, update = batch.draw_keys.tolist(), self.optimizer.updates
        noise = embedding_noise(batch.lengths().tolist(), width, self._neftune_alpha, keys=keys, update=update)
        return noisy_embeddings(self.model, noise.to(self.device))

    def _loss(
        self, micro: MicroBatch, objective: Objective, denominators: Mapping[str, float]
    ) -> tuple[Given, LossTerms | None, dict[str, Tensor], Tensor | None]:
        """(what the model gave [N], what the objective made of it, its terms as numbers, entropy [T]); the objective is
        not asked about a pass without sequences."""
        wanted = _entropy_of(objective)
        if getattr(objective, "needs_targets", False):
            temperatures = self._temperature, getattr(objective, "targets_temperature", self._temperature)
            logprobs, spread = forward_on_targets(
                self.model, micro, temperatures=temperatures, chunk=self._chunk, entropy=wanted
            )
            given = Given(logprobs, spread, torch.zeros_like(spread))
        else:
            hits = None
            if getattr(objective, "needs_hits", False):
                hits = torch.zeros(len(micro.trained), device=self.device)
            frozen, even = (getattr(objective, name, False) for name in ("head_alone", "counts_alike"))
            asked = Asked(wanted, self._temperature, hits, frozen=frozen, even=even)
            given = self._forwards.trained(self._whole, micro, asked)
            if hits is not None:
                micro.batch.extra["hits"] = micro.scatter(hits)
            if getattr(objective, "needs_values", False):
                micro.batch.extra["new_values"] = micro.scatter(given.values)
        if not len(micro.sequences):
            return given, None, {}, None
        entropy = micro.scatter(given.entropy) if wanted != "none" else None
        found = objective.loss(micro.batch, micro.scatter(given.logprobs), entropy)
        terms = {
            name: objective.reduce(term, micro.batch, denominators.get(name, denominators[""]))
            for name, term in found.terms.items()
        }
        return given, found, terms, entropy

    def _places(self, batch: TokenBatch, sequences: Tensor) -> Tensor:
        """Flat places of the trained tokens of some sequences, in order."""
        inside = torch.isin(batch.seq_ids, sequences)
        return torch.nonzero(inside & batch.loss_mask)[:, 0]


def _entropy_of(objective: Objective) -> Entropy:
    if objective.needs_entropy:
        return "graph"
    return "value" if getattr(objective, "logs_entropy", True) else "none"
